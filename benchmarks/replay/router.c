/* A user-space router between its own network namespaces: links with a rate, a latency, loss and cuts.
 *
 *   router SEED QUEUE_MS NODES
 *
 * It makes NODES network namespaces, each with one TUN device, "eth0", and prints "ready" with a file descriptor for
 * each namespace: a process that may open /proc/PID/fd/N can enter it. The namespaces have no name outside, so they
 * vanish with the last process in them, however this one ends. Node k has the address 10.78.0.k+1.
 *
 * A packet from i to j first waits for i's uplink, which takes its bytes over the rate. It may be lost. Then it takes
 * the latency of the pair, and waits for j's downlink in the same way. A packet that would wait longer than QUEUE_MS
 * (or behind 64 KiB, if that is more) finds the queue full and is dropped, as by a home router. Rates count IP bytes.
 * A pair's losses depend on (SEED, i, j) alone: the n-th packet from i to j is lost or not whatever others send.
 *
 * Commands come on stdin, one per line, and each is answered by a line. The node -1 stands for all nodes.
 *   rate NODE UP_MBIT DOWN_MBIT     latency I J MS (both ways)     loss I J SHARE (both ways)
 *   cut I J    heal I J    stats    quit
 * It ends when its stdin closes, or when the thread that started it ends.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_NODES 32
#define MOST_PACKETS 65536 /* In flight: 100 MB, a second of 800 Mbit/s. Beyond it a queue counts as full. */
#define LARGEST 1500       /* Bytes of a packet: the devices' MTU. */
#define TURN 64            /* Packets read from one device before the others have their turn. */
#define FLOWING_NS 2000000 /* After a packet the devices are polled for so long, instead of waited for. */
#define LOOK_NS 150000     /* The poll interval: a wake-up for each packet would cost more than the packet. */
#define LATE_NS 5000000    /* A packet this late shows that the run was disturbed. */
#define LEAST_QUEUE 65536.0

typedef int64_t ns;

typedef struct packet {
    ns due;
    uint64_t number; /* In order of arrival: of two packets due at once the older goes first. */
    struct packet *next_free;
    uint16_t size;
    uint8_t from, to, on_downlink;
    unsigned char bytes[LARGEST];
} packet;

typedef struct {
    double bytes_ns; /* The rate. */
    ns free_at;      /* The time at which its last packet has left it. */
} wire;

typedef struct {
    ns latency;
    double loss;
    int cut;
    uint64_t luck; /* The state of the generator that decides losses. */
} path;

static int nodes, devices[MOST_NODES], spaces[MOST_NODES];
static wire uplinks[MOST_NODES], downlinks[MOST_NODES];
static path paths[MOST_NODES][MOST_NODES];
static double queue_ns;
static struct { uint64_t sent, sent_bytes, got, got_bytes; } counts[MOST_NODES];
static uint64_t delivered, late, lost, full, severed;
static ns latest;

static ns now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), to a number from 0 to below 1. */
static double draw(uint64_t *state) {
    uint64_t x = (*state += 0x9E3779B97F4A7C15ULL);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return (double)((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
}

/* -- packets in flight: a heap by due time, and a free list -------------------------------------------------------- */
static packet *heap[MOST_PACKETS], *spare;
static size_t on_way;

static int sooner(const packet *a, const packet *b) { return a->due != b->due ? a->due < b->due : a->number < b->number; }

static void put(packet *p) {
    size_t at = on_way++;
    for (; at && sooner(p, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = p;
}

static packet *take(void) {
    packet *first = heap[0], *last = heap[--on_way];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < on_way) {
        if (child + 1 < on_way && sooner(heap[child + 1], heap[child])) child++;
        if (!sooner(heap[child], last)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

static packet *obtain(void) {
    packet *p = spare;
    if (p) spare = p->next_free;
    else if (!(p = malloc(sizeof *p))) { perror("memory for packets"); exit(1); }
    return p;
}

static void drop(packet *p, uint64_t *why) {
    if (why) ++*why;
    p->next_free = spare;
    spare = p;
}

/* -- the way of a packet ------------------------------------------------------------------------------------------ */
/* Return when its last bit has passed this wire, if its first may go at `at`; -1 if the queue is full. */
static ns pass(wire *w, int size, ns at) {
    ns begins = w->free_at > at ? w->free_at : at;
    double room = w->bytes_ns * queue_ns > LEAST_QUEUE ? w->bytes_ns * queue_ns : LEAST_QUEUE;
    if ((double)(begins - at) * w->bytes_ns + size > room) return -1;
    return w->free_at = begins + (ns)(size / w->bytes_ns);
}

static void enter(packet *p, int from, ns at) {
    /* Only IPv4 to 10.78.0.k+1: other packets of a kernel (IPv6, multicast) are dropped. */
    int to = p->size >= 20 && p->bytes[0] >> 4 == 4 && p->bytes[16] == 10 && p->bytes[17] == 78 ? p->bytes[19] - 1 : -1;
    if (to < 0 || to >= nodes || to == from) { drop(p, 0); return; }
    counts[from].sent++;
    counts[from].sent_bytes += p->size;
    path *way = &paths[from][to];
    if (way->cut) { drop(p, &severed); return; }
    ns left = on_way < MOST_PACKETS ? pass(&uplinks[from], p->size, at) : -1;
    if (left < 0) { drop(p, &full); return; }
    if (draw(&way->luck) < way->loss) { drop(p, &lost); return; }
    static uint64_t numbers;
    p->from = from; p->to = to; p->on_downlink = 0; p->number = numbers++;
    p->due = left + way->latency;
    put(p);
}

static void deliver(ns at) {
    while (on_way && heap[0]->due <= at) {
        packet *p = take();
        if (paths[p->from][p->to].cut) { drop(p, &severed); continue; } /* A cut drops packets in flight too. */
        if (!p->on_downlink) {
            ns passed = pass(&downlinks[p->to], p->size, p->due);
            if (passed < 0) { drop(p, &full); continue; }
            p->on_downlink = 1;
            p->due = passed;
            put(p);
            continue;
        }
        ns behind = at - p->due;
        delivered++;
        late += behind > LATE_NS;
        if (behind > latest) latest = behind;
        /* The kernel's TCP answers inside this write: most of a router's time is spent here. */
        if (write(devices[p->to], p->bytes, p->size) == p->size) {
            counts[p->to].got++;
            counts[p->to].got_bytes += p->size;
        }
        drop(p, 0);
    }
}

/* -- commands ----------------------------------------------------------------------------------------------------- */
#define EACH(k, given) for (int k = (given) < 0 ? 0 : (given); k < ((given) < 0 ? nodes : (given) + 1); k++)
#define EACH_PAIR(i, j, a, b) EACH(i, a) EACH(j, b) for (path *way = &paths[i][j]; way; way = way == &paths[i][j] && i != j ? &paths[j][i] : 0)

static int known(int node) { return node >= -1 && node < nodes; }

static void stats(void) {
    printf("{\"delivered\": %lu, \"late\": %lu, \"latest_ms\": %.3f, \"lost\": %lu, \"full\": %lu, \"severed\": %lu, \"nodes\": [",
           delivered, late, (double)latest / 1e6, lost, full, severed);
    for (int k = 0; k < nodes; k++)
        printf("%s[%lu, %lu, %lu, %lu]", k ? ", " : "", counts[k].sent, counts[k].sent_bytes, counts[k].got, counts[k].got_bytes);
    printf("]}\n");
}

static void obey(const char *line) {
    int i, j;
    double a, b;
    const char *answer = "ok";
    if (sscanf(line, "rate %d %lf %lf", &i, &a, &b) == 3 && known(i) && a > 0 && b > 0)
        EACH(k, i) { uplinks[k].bytes_ns = a / 8000.0; downlinks[k].bytes_ns = b / 8000.0; }
    else if (sscanf(line, "latency %d %d %lf", &i, &j, &a) == 3 && known(i) && known(j) && a >= 0)
        EACH_PAIR(m, n, i, j) way->latency = (ns)(a * 1e6);
    else if (sscanf(line, "loss %d %d %lf", &i, &j, &a) == 3 && known(i) && known(j) && a >= 0 && a < 1)
        EACH_PAIR(m, n, i, j) way->loss = a;
    else if (sscanf(line, "cut %d %d", &i, &j) == 2 && known(i) && known(j))
        EACH_PAIR(m, n, i, j) way->cut = 1;
    else if (sscanf(line, "heal %d %d", &i, &j) == 2 && known(i) && known(j))
        EACH_PAIR(m, n, i, j) way->cut = 0;
    else if (!strcmp(line, "stats")) { stats(); answer = 0; }
    else if (!strcmp(line, "quit")) exit(0);
    else answer = "not understood";
    if (answer) puts(answer);
    fflush(stdout);
}

static void listen_to_commands(void) {
    static char text[4096];
    static size_t filled;
    ssize_t size = read(0, text + filled, sizeof text - 1 - filled);
    if (size <= 0) exit(0); /* The parent is gone; or a line of 4 KB, which it never sends. */
    filled += size;
    text[filled] = 0;
    char *begin = text, *end;
    while ((end = strchr(begin, '\n'))) { *end = 0; obey(begin); begin = end + 1; }
    filled = strlen(begin);
    memmove(text, begin, filled + 1);
}

/* -- beginning ---------------------------------------------------------------------------------------------------- */
static void make_namespace(int k) {
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(request.ifr_name, "eth0");
    if (unshare(CLONE_NEWNET)) { perror("a network namespace cannot be made"); exit(1); }
    if ((spaces[k] = open("/proc/self/ns/net", O_RDONLY)) < 0) { perror("/proc/self/ns/net"); exit(1); }
    if ((devices[k] = open("/dev/net/tun", O_RDWR | O_NONBLOCK)) < 0) { perror("/dev/net/tun"); exit(1); }
    if (ioctl(devices[k], TUNSETIFF, &request) < 0) { perror("a TUN device cannot be made"); exit(1); }
    uplinks[k].bytes_ns = downlinks[k].bytes_ns = 0.125; /* 1 Gbit/s by default. */
}

int main(int argc, char **argv) {
    nodes = argc == 4 ? atoi(argv[3]) : 0;
    if (nodes < 1 || nodes > MOST_NODES) { fprintf(stderr, "usage: router SEED QUEUE_MS NODES (1 to %d)\n", MOST_NODES); return 2; }
    uint64_t seed = strtoull(argv[1], 0, 10);
    queue_ns = atof(argv[2]) * 1e6;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1000);
    for (int k = 0; k < nodes; k++) make_namespace(k);
    for (int i = 0; i < nodes; i++)
        for (int j = 0; j < nodes; j++) {
            uint64_t state = seed * 1024 + i * MOST_NODES + j;
            draw(&state);
            paths[i][j].luck = state * 0xD1B54A32D192ED03ULL;
        }
    /* A short slice: it is woken soon even with busy neighbours, for the same share of the processor (EEVDF, Linux
     * 6.12). Older kernels ignore it. */
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; }
        slice = {.size = 48, .runtime = 100000};
    syscall(SYS_sched_setattr, 0, &slice, 0);
    printf("ready");
    for (int k = 0; k < nodes; k++) printf(" %d", spaces[k]);
    printf("\n");
    fflush(stdout);

    struct pollfd watched[MOST_NODES + 1];
    for (int k = 0; k < nodes; k++) watched[k] = (struct pollfd){devices[k], POLLIN, 0};
    watched[nodes] = (struct pollfd){0, POLLIN, 0};
    ns flowed_at = 0;
    for (;;) {
        ns at = now(), wait = on_way ? heap[0]->due - at : 1000000000LL;
        if (at - flowed_at < FLOWING_NS) {
            nanosleep(&(struct timespec){0, LOOK_NS}, 0);
            wait = 0;
        }
        if (wait < 0) wait = 0;
        int ready = ppoll(watched, nodes + 1, &(struct timespec){wait / 1000000000LL, wait % 1000000000LL}, 0);
        at = now();
        for (int k = 0; ready > 0 && k < nodes; k++)
            if (watched[k].revents & POLLIN)
                for (int turn = 0; turn < TURN; turn++) {
                    packet *p = obtain();
                    ssize_t size = read(devices[k], p->bytes, LARGEST);
                    if (size <= 0) { drop(p, 0); break; }
                    flowed_at = at;
                    p->size = size;
                    enter(p, k, at);
                }
        if (ready > 0 && watched[nodes].revents) listen_to_commands();
        deliver(now());
    }
}
