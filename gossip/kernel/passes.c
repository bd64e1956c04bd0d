/* Single passes over a chunk where numpy takes several: each block is read once, and stays in the L1 cache for all steps.
 * A chunk is the range of a vector that one message carries, and its body is the chunk as encoded bytes.
 *
 * The results equal those of gossip/codecs with numpy, bit for bit, since two peers must agree whichever they use. So the
 * operations on float32 are the same, in the same order, not contracted or reordered (setup.py sets the compiler's flags).
 * Sums of squares have the order that gossip/kernel/squares.py defines.
 *
 * This is plain C99 over blocks, in loops that compilers vectorise. On x86-64 each pass is compiled a second time for
 * AVX2, and the choice is made at run time. Only the last part uses Python's API, and no pass touches the interpreter.
 */
#define Py_LIMITED_API 0x030B0000 /* One build for 3.11 and all later versions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if FLT_EVAL_METHOD != 0 || (defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__)
#error "float32 is not computed as float32 here, or bytes are in another order: numpy does it all"
#endif

/* A pass is inlined into two functions, one for AVX2 and one for any processor. */
#define PASS static inline __attribute__((always_inline)) void
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#else
#define AVX2
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)") /* The next loop's iterations are: vectorise it. */
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define EACH(i, n) INDEPENDENT for (int i = 0; i < (n); i++)

#define EDITION 5           /* Change it with a pass's arguments or results, and in gossip/kernel/__init__.py too. */
#define ROW 256             /* Values at a time, and the most that share a scale: ALIGN in values.py. */
#define LANES 64            /* From squares.py: the number of partial sums that a row of squares is added to. */
#define BLOCK 4096          /* From squares.py: values whose squares are summed in float32. */
#define SEGMENT 32768       /* TABLE_ELEMENTS in dither.py, and the length of its pieces, BLOCK_ELEMENTS in values.py. */
#define SHIFT 21            /* From grid.py: shifts a float32's bits to its exponent and two bits of mantissa. */
#define BIAS 323            /* From grid.py. */
#define NOT_FINITE 255      /* From grid.py. */
#define INFINITE 0x7F800000 /* As float32 bits. */
#define QUIET_NAN 0x7FC00000
#define ROUNDER 12582912.0f /* 3 * 2**22, where floats are 1 apart: adding it rounds to integers, ties to even. */
#define MIN_STREAMED 65536  /* Elements: larger outputs leave the cache before they are read. */
#define MIN_WITHOUT_GIL 4096 /* Elements: a pass then takes a microsecond, as much as releasing the GIL. */

typedef uint16_t __attribute__((may_alias, aligned(1))) half; /* In a body, perhaps unaligned. */
typedef uint32_t __attribute__((may_alias)) bits;             /* The bits of a float32. */

static inline float float_of(uint32_t pattern) {
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t pattern;
    memcpy(&pattern, &value, sizeof pattern);
    return pattern;
}

/* -- sums of squares: squares.py -- */

struct sum {
    _Alignas(64) float lanes[LANES];
    double total;
    int filled; /* Values of the current block that have been added. */
};

PASS end_block(struct sum *sum) {
    for (int k = 0; k < LANES; k++) sum->total += sum->lanes[k];
    memset(sum->lanes, 0, sizeof sum->lanes);
    sum->filled = 0;
}

/* Add the squares of n more values. All earlier calls added whole rows of LANES, and the values end within the block. */
PASS add_squares(struct sum *sum, const float *values, int n) {
    float *lanes = sum->lanes;
    int row = 0;
    for (; row + 4 * LANES <= n; row += 4 * LANES) {
        const float *v = values + row;
        EACH(k, LANES) {
            float lane = lanes[k];
            lane += v[k] * v[k];
            lane += v[k + LANES] * v[k + LANES];
            lane += v[k + 2 * LANES] * v[k + 2 * LANES];
            lanes[k] = lane + v[k + 3 * LANES] * v[k + 3 * LANES];
        }
    }
    for (; row < n; row += LANES) {
        const float *v = values + row;
        const int width = n - row < LANES ? n - row : LANES;
        EACH(k, width) lanes[k] += v[k] * v[k];
    }
    sum->filled += n;
    if (sum->filled == BLOCK) end_block(sum);
}

struct sums { /* Sums of squares of the differences (out), and of the quantised or subtracted values (own). */
    struct sum out, own;
};

/* The buffers of a pass; NULL ones are not wanted. A pass does one of these:
 *
 *     values -> encoded             encode
 *     data -> out                   decode
 *     values -> own                 what other peers decode of values; own may be values
 *     values, data -> own, out      the same, and out = decoded data - own
 */
struct chunk {
    Py_ssize_t elements;
    const float *values;
    const uint8_t *data;
    uint8_t *encoded;
    float *own, *out;
    struct sums *sums; /* Of out and own, if both are wanted. */
};

struct blockwise {
    struct chunk chunk;
    Py_ssize_t start, block;     /* The chunk's position in its vector; values that share a scale. */
    int width;                   /* Bits of a code, 8 or 4. */
    float share;                 /* A scale is the largest magnitude times this, rounded up. */
    const float *scales, *inverses, *noise; /* (256,), (256,), (2 * SEGMENT,). */
    const int32_t *offsets;      /* Where each segment's noise begins in the table. */
};

/* -- bf16: floats.py -- */

/* Return the bits of a float32 rounded to bfloat16: those of the upper half are valid. */
static inline uint32_t rounded(uint32_t x) {
    return (x & 0x7FFFFFFF) > INFINITE ? x | 0x400000 : x + 0x7FFF + (x >> 16 & 1);
}

/* Process values first to first + n of a chunk: one of the four combinations of its buffers. */
PASS bf16_row(const struct chunk *c, Py_ssize_t first, int n) {
    bits *own = (bits *)(c->own + first);
    if (c->values) {
        const bits *values = (const bits *)(c->values + first);
        if (c->encoded) {
            half *encoded = (half *)c->encoded + first;
            EACH(i, n) encoded[i] = (uint16_t)(rounded(values[i]) >> 16);
            return;
        }
        EACH(i, n) own[i] = rounded(values[i]) & 0xFFFF0000;
    }
    if (c->data) {
        const half *data = (const half *)c->data + first;
        float *out = c->out + first;
        if (c->own) {
            EACH(i, n) out[i] = float_of((uint32_t)data[i] << 16) - float_of(own[i]);
            add_squares(&c->sums->out, out, n);
            add_squares(&c->sums->own, c->own + first, n);
        } else EACH(i, n) out[i] = float_of((uint32_t)data[i] << 16);
    }
}

PASS bf16(const struct chunk *c) {
    const Py_ssize_t whole = c->elements / ROW * ROW;
    for (Py_ssize_t first = 0; first < whole; first += ROW) bf16_row(c, first, ROW);
    if (whole < c->elements) bf16_row(c, whole, (int)(c->elements - whole));
}

/* -- int8 and int4: blockwise.py -- */

/* Return the byte of the scale of n values; `share` is that of struct blockwise. */
static inline __attribute__((always_inline)) int choose_scale(const float *values, int n, float share) {
    const bits *patterns = (const bits *)values;
    int32_t largest = 0;
    EACH(i, n) {
        const int32_t size = (int32_t)(patterns[i] & 0x7FFFFFFF); /* Magnitudes have the order of their bits. */
        largest = size > largest ? size : largest;
    }
    if (largest == 0) return 0;
    const int32_t scale = (int32_t)bits_of(float_of(largest > INFINITE ? QUIET_NAN : (uint32_t)largest) * share);
    const int32_t ceiling = (scale >> SHIFT) + ((scale & ((1 << SHIFT) - 1)) != 0) - BIAS;
    return ceiling < 1 ? 1 : ceiling > NOT_FINITE ? NOT_FINITE : ceiling;
}

/* Pack codes i to i + n of a piece of `bytes` bytes. Byte j holds code j and, above it, code j + bytes: packing.py.
 * The first `low` of them go to the lower half of their byte, and the others to the upper half.
 */
PASS pack(const uint8_t *codes, Py_ssize_t i, int n, uint8_t *body, Py_ssize_t bytes) {
    const int low = i >= bytes ? 0 : bytes - i < n ? (int)(bytes - i) : n;
    EACH(k, low) body[i + k] = codes[k];
    body += i + low - bytes;
    EACH(k, n - low) body[k] |= (uint8_t)(codes[low + k] << 4);
}

/* Reverse pack. */
PASS unpack(uint8_t *codes, Py_ssize_t i, int n, const uint8_t *body, Py_ssize_t bytes) {
    const int low = i >= bytes ? 0 : bytes - i < n ? (int)(bytes - i) : n;
    EACH(k, low) codes[k] = body[i + k] & 15;
    body += i + low - bytes;
    EACH(k, n - low) codes[low + k] = body[k] >> 4;
}

/* Process values first to first + n of the chunk, which share the scale number `row`.
 *
 * They belong to a piece, as long as the same noise runs on. i is the place of the first one in the piece, whose codes
 * have `bytes` bytes from `position` of the body on.
 */
PASS blockwise_row(
    const struct blockwise *b, int width, Py_ssize_t row, Py_ssize_t first, Py_ssize_t i, int n, const float *noise,
    Py_ssize_t position, Py_ssize_t bytes
) {
    const struct chunk *c = &b->chunk;
    uint8_t unpacked[ROW]; /* Codes of 4 bits, one in each byte. */
    float *own = c->own + first;
    if (c->values) {
        const float *values = c->values + first;
        const int scale = choose_scale(values, n, b->share);
        const float inverse = b->inverses[scale], step = b->scales[scale];
        if (c->encoded) {
            uint8_t *codes = width == 8 ? c->encoded + position + i : unpacked;
            EACH(k, n) codes[k] = (uint8_t)bits_of(values[k] * inverse + noise[k] + ROUNDER);
            if (scale == NOT_FINITE) memset(codes, 0, n);
            c->encoded[row] = (uint8_t)scale;
            if (width == 4) pack(codes, i, n, c->encoded + position, bytes);
            return;
        }
        EACH(k, n) own[k] = (values[k] * inverse + noise[k] + ROUNDER - ROUNDER - noise[k]) * step;
        if (scale == NOT_FINITE) EACH(k, n) own[k] = step;
    }
    if (c->data) {
        const uint8_t *codes = width == 8 ? c->data + position + i : unpacked;
        const float step = b->scales[c->data[row]];
        float *out = c->out + first;
        if (width == 4) unpack(unpacked, i, n, c->data + position, bytes);
        if (c->own) {
            EACH(k, n) out[k] = ((float)codes[k] - noise[k]) * step - own[k];
            add_squares(&c->sums->out, out, n);
            add_squares(&c->sums->own, own, n);
        } else EACH(k, n) out[k] = ((float)codes[k] - noise[k]) * step;
    }
}

/* Process a whole chunk. Block and width are known at compile time. Rows have a known length, except for the last one of a piece. */
PASS blockwise(const struct blockwise *b, int block, int width) {
    const struct chunk *c = &b->chunk;
    Py_ssize_t row = 0, position = (c->elements + block - 1) / block; /* Of the codes in the body, after the scales. */
    int piece = 0;
    for (Py_ssize_t from = 0; from < c->elements; piece++) {
        const Py_ssize_t inside = (b->start + from) % SEGMENT;
        const Py_ssize_t count = SEGMENT - inside < c->elements - from ? SEGMENT - inside : c->elements - from;
        const Py_ssize_t bytes = width == 8 ? count : (count + 1) / 2, whole = count / block * block;
        const float *noise = b->noise + (b->offsets[piece] + inside) % SEGMENT;
        for (Py_ssize_t i = 0; i < whole; i += block, row++)
            blockwise_row(b, width, row, from + i, i, block, noise + i, position, bytes);
        if (whole < count)
            blockwise_row(b, width, row, from + whole, whole, (int)(count - whole), noise + whole, position, bytes);
        position += bytes;
        from += count;
    }
}

/* -- fp32: arithmetic/mixing.py -- */

/* Write past the cache, which would first read what is overwritten: a quarter of all memory traffic. */
PASS stream(float *out, const float *values, int n) {
#if defined(__x86_64__)
    for (int i = 0; i < n; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(values + i));
#else
    memcpy(out, values, n * sizeof *out);
#endif
}

struct difference {
    Py_ssize_t elements;
    const float *theirs, *ours;
    float *out; /* May be theirs. */
    struct sums *sums;
};

/* Another process may write to theirs. So each value is read once, and the sums are of the values that were read. */
PASS difference_row(const struct difference *d, Py_ssize_t first, int n, int streams) {
    const float *theirs = d->theirs + first, *ours = d->ours + first;
    float row[ROW], *out = streams ? row : d->out + first; /* streams: written past the cache. */
    EACH(i, n) out[i] = theirs[i] - ours[i];
    __asm__ volatile("" ::: "memory"); /* Keep the compiler from computing that a second time. */
    if (streams) stream(d->out + first, row, ROW);
    add_squares(&d->sums->out, out, n);
    add_squares(&d->sums->own, ours, n);
}

PASS difference(const struct difference *d) {
    const Py_ssize_t whole = d->elements / ROW * ROW;
    if (d->out != d->theirs && d->elements >= MIN_STREAMED && (uintptr_t)d->out % 16 == 0) {
        for (Py_ssize_t first = 0; first < whole; first += ROW) difference_row(d, first, ROW, 1);
#if defined(__x86_64__)
        _mm_sfence(); /* Otherwise a thread that is told of the end may read old values. */
#endif
    } else {
        for (Py_ssize_t first = 0; first < whole; first += ROW) difference_row(d, first, ROW, 0);
    }
    if (whole < d->elements) difference_row(d, whole, (int)(d->elements - whole), 0);
}

/* -- the outer step and the correction's lesson: arithmetic/mixing.py, arithmetic/correction.py -- */

struct mix {
    Py_ssize_t elements;
    float *difference;
    const float *snapshot;  /* NULL: no outer step, and phi and momentum are NULL too. */
    float *phi, *momentum;
    float *pull;            /* NULL: no lesson. */
    float weight, alpha, beta, scale, share;
    struct sums *sums;      /* Of the difference and the new pull. */
};

PASS mix(const struct mix *m) {
    const float weight = m->weight, alpha = m->alpha, beta = m->beta, scale = m->scale, share = m->share;
    for (Py_ssize_t first = 0; first < m->elements; first += ROW) {
        const int n = m->elements - first < ROW ? (int)(m->elements - first) : ROW;
        float *difference = m->difference + first;
        if (m->pull) {
            float *pull = m->pull + first;
            EACH(i, n) pull[i] = pull[i] * scale + difference[i] * share;
            add_squares(&m->sums->out, difference, n);
            add_squares(&m->sums->own, pull, n);
        }
        if (!m->snapshot) continue;
        const float *snapshot = m->snapshot + first;
        float *phi = m->phi + first, *momentum = m->momentum + first;
        EACH(i, n) {
            const float mean = difference[i] * weight + snapshot[i];
            momentum[i] = momentum[i] * alpha + (mean - phi[i]) * beta;
            phi[i] += momentum[i];
            difference[i] = phi[i] - snapshot[i];
        }
    }
}

/* -- the addition and copy of a step boundary: arithmetic/live.py -- */

struct add_read {
    Py_ssize_t elements;
    float *live;
    const float *shift; /* NULL: nothing is added. */
    float *out;         /* NULL: nothing is read. May be shift. */
    float weight;       /* The factor of shift. */
    int32_t *largest;   /* The largest magnitude that was read, as float32 bits, which have the same order. */
};

PASS add_read_row(const struct add_read *a, Py_ssize_t first, int n, int streams) {
    float *live = a->live + first;
    if (a->shift) {
        const float *shift = a->shift + first, weight = a->weight;
        EACH(i, n) live[i] += shift[i] * weight;
    }
    if (!a->out) return;
    const bits *patterns = (const bits *)live;
    int32_t largest = *a->largest;
    EACH(i, n) {
        const int32_t size = (int32_t)(patterns[i] & 0x7FFFFFFF);
        largest = size > largest ? size : largest;
    }
    *a->largest = largest;
    if (streams) stream(a->out + first, live, n);
    else memcpy(a->out + first, live, n * sizeof *live);
}

PASS add_read(const struct add_read *a) {
    Py_ssize_t first = 0;
    if (a->out && a->out != a->shift && a->elements >= MIN_STREAMED) {
        const int before = (int)(-((uintptr_t)a->out / sizeof(float)) % 4); /* Elements before out's first aligned 16 bytes. */
        if (before) add_read_row(a, 0, before, 0);
        for (first = before; first + ROW <= a->elements; first += ROW) add_read_row(a, first, ROW, 1);
#if defined(__x86_64__)
        _mm_sfence();
#endif
    }
    for (; first + ROW <= a->elements; first += ROW) add_read_row(a, first, ROW, 0);
    if (first < a->elements) add_read_row(a, first, (int)(a->elements - first), 0);
}

struct squares {
    Py_ssize_t elements;
    const float *values;
    struct sum *sum;
};

PASS squares(const struct squares *s) {
    const Py_ssize_t whole = s->elements / ROW * ROW;
    for (Py_ssize_t first = 0; first < whole; first += ROW) add_squares(s->sum, s->values + first, ROW);
    if (whole < s->elements) add_squares(s->sum, s->values + whole, (int)(s->elements - whole));
}

/* -- each pass for AVX2 and for any processor -- */

PASS blockwise_known(const struct blockwise *b) {
    if (b->width == 8) blockwise(b, 256, 8);
    else blockwise(b, 64, 4);
}

#define VERSIONS(pass, kind)                                        \
    AVX2 static void pass##_avx2(const struct kind *k) { pass(k); } \
    static void pass##_any(const struct kind *k) { pass(k); }

VERSIONS(bf16, chunk)
VERSIONS(blockwise_known, blockwise)
VERSIONS(difference, difference)
VERSIONS(squares, squares)
VERSIONS(mix, mix)
VERSIONS(add_read, add_read)

static int has_avx2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

/* -- Python's interface -- */

enum { MAX_BUFFERS = 9 }; /* Of one call: five of its chunk and four tables. */

struct views {
    Py_buffer buffers[MAX_BUFFERS];
    int count;
};

static void release(struct views *views) {
    while (views->count) PyBuffer_Release(&views->buffers[--views->count]);
}

/* Store a buffer's address in *place, NULL for None. Return 0 with an exception unless it has exactly `bytes` bytes. */
static int take(struct views *views, PyObject *object, Py_ssize_t bytes, int writable, void *place) {
    void *address = NULL;
    if (object != Py_None) {
        Py_buffer *view = &views->buffers[views->count];
        if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return 0;
        views->count++;
        if (view->len != bytes) {
            PyErr_Format(PyExc_AssertionError, "%zd bytes of values or encoded elements where %zd belong", view->len, bytes);
            return 0;
        }
        address = view->buf;
    }
    memcpy(place, &address, sizeof address);
    return 1;
}

/* Return 0 with an exception: the buffers of a call belong to no pass. */
static int refuse(void) {
    PyErr_SetString(PyExc_AssertionError, "these buffers are of no pass");
    return 0;
}

static int take_table(struct views *views, PyObject *object, Py_ssize_t bytes, void *place) {
    if (object != Py_None) return take(views, object, bytes, 0, place);
    PyErr_SetString(PyExc_AssertionError, "a table is missing");
    return 0;
}

/* Take the five buffers of a chunk, whose bodies have `body` bytes. */
static int take_chunk(struct views *views, PyObject *const *arguments, Py_ssize_t body, struct chunk *c) {
    const Py_ssize_t floats = c->elements * (Py_ssize_t)sizeof(float);
    if (!take(views, arguments[0], floats, 0, &c->values) || !take(views, arguments[1], body, 0, &c->data) ||
        !take(views, arguments[2], body, 1, &c->encoded) || !take(views, arguments[3], floats, 1, &c->own) ||
        !take(views, arguments[4], floats, 1, &c->out))
        return 0;
    /* Refuse all but the four combinations that struct chunk names. */
    if ((c->values ? !c->encoded == !c->own : c->encoded || c->own || !c->data) || !c->data != !c->out ||
        (c->data && c->encoded))
        return refuse();
    return 1;
}

/* Run a pass in the version for this processor, and if it is long without the interpreter's lock. */
#define RUN(pass, buffers, elements)                            \
    do {                                                        \
        PyThreadState *state = NULL;                            \
        if ((elements) >= MIN_WITHOUT_GIL) state = PyEval_SaveThread(); \
        if (has_avx2()) pass##_avx2(buffers);                   \
        else pass##_any(buffers);                               \
        if (state) PyEval_RestoreThread(state);                 \
    } while (0)

/* Begin both sums with their previous values. */
static void begin_sums(PyObject *const *before, struct sums *sums) {
    sums->out.total = PyFloat_AsDouble(before[0]);
    sums->own.total = PyFloat_AsDouble(before[1]);
}

static PyObject *end_sums(struct sums *sums) {
    end_block(&sums->out);
    end_block(&sums->own);
    return Py_BuildValue("(dd)", sums->out.total, sums->own.total);
}

static PyObject *call_bf16(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 8) return PyErr_Format(PyExc_TypeError, "8 arguments belong here, not %zd", count);
    struct views views = {.count = 0};
    struct sums sums = {{.filled = 0}, {.filled = 0}};
    struct chunk c = {.elements = PyLong_AsSsize_t(arguments[0]), .sums = &sums};
    begin_sums(arguments + 6, &sums);
    if (PyErr_Occurred()) return NULL;
    const int is_valid = take_chunk(&views, arguments + 1, c.elements * 2, &c);
    if (is_valid) RUN(bf16, &c, c.elements);
    release(&views);
    return is_valid ? end_sums(&sums) : NULL;
}

static PyObject *call_difference(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "6 arguments belong here, not %zd", count);
    struct views views = {.count = 0};
    struct sums sums = {{.filled = 0}, {.filled = 0}};
    struct difference d = {.elements = PyLong_AsSsize_t(arguments[0]), .sums = &sums};
    begin_sums(arguments + 4, &sums);
    if (PyErr_Occurred()) return NULL;
    const Py_ssize_t floats = d.elements * (Py_ssize_t)sizeof(float);
    int is_valid = take(&views, arguments[1], floats, 0, &d.theirs) && take(&views, arguments[2], floats, 0, &d.ours) &&
                   take(&views, arguments[3], floats, 1, &d.out);
    if (is_valid && !(d.theirs && d.ours && d.out)) is_valid = refuse();
    if (is_valid) RUN(difference, &d, d.elements);
    release(&views);
    return is_valid ? end_sums(&sums) : NULL;
}

static PyObject *call_mix(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 11) return PyErr_Format(PyExc_TypeError, "11 arguments belong here, not %zd", count);
    struct views views = {.count = 0};
    struct sums sums = {{.filled = 0}, {.filled = 0}};
    struct mix m = {
        .elements = PyLong_AsSsize_t(arguments[0]), .weight = (float)PyFloat_AsDouble(arguments[6]),
        .alpha = (float)PyFloat_AsDouble(arguments[7]), .beta = (float)PyFloat_AsDouble(arguments[8]),
        .scale = (float)PyFloat_AsDouble(arguments[9]), .share = (float)PyFloat_AsDouble(arguments[10]), .sums = &sums,
    };
    if (PyErr_Occurred()) return NULL;
    const Py_ssize_t floats = m.elements * (Py_ssize_t)sizeof(float);
    int is_valid = take(&views, arguments[1], floats, 1, &m.difference) &&
                   take(&views, arguments[2], floats, 0, &m.snapshot) && take(&views, arguments[3], floats, 1, &m.phi) &&
                   take(&views, arguments[4], floats, 1, &m.momentum) && take(&views, arguments[5], floats, 1, &m.pull);
    const int steps = m.snapshot && m.phi && m.momentum, learns = m.pull && !(m.snapshot || m.phi || m.momentum);
    if (is_valid && !(m.difference && (steps || learns))) is_valid = refuse();
    if (is_valid) RUN(mix, &m, m.elements);
    release(&views);
    return is_valid ? end_sums(&sums) : NULL;
}

static PyObject *call_add_read(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "5 arguments belong here, not %zd", count);
    struct views views = {.count = 0};
    int32_t largest = 0;
    struct add_read a = {
        .elements = PyLong_AsSsize_t(arguments[0]), .weight = (float)PyFloat_AsDouble(arguments[4]), .largest = &largest,
    };
    if (PyErr_Occurred()) return NULL;
    const Py_ssize_t floats = a.elements * (Py_ssize_t)sizeof(float);
    int is_valid = take(&views, arguments[1], floats, 1, &a.live) && take(&views, arguments[2], floats, 0, &a.shift) &&
                   take(&views, arguments[3], floats, 1, &a.out);
    if (is_valid && !(a.live && (a.shift || a.out))) is_valid = refuse();
    if (is_valid) RUN(add_read, &a, a.elements);
    release(&views);
    return is_valid ? PyBool_FromLong(largest < INFINITE) : NULL;
}

static PyObject *call_squares(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "3 arguments belong here, not %zd", count);
    struct views views = {.count = 0};
    struct sum sum = {.filled = 0, .total = PyFloat_AsDouble(arguments[2])};
    struct squares s = {.elements = PyLong_AsSsize_t(arguments[0]), .sum = &sum};
    if (PyErr_Occurred()) return NULL;
    const int is_valid = take_table(&views, arguments[1], s.elements * (Py_ssize_t)sizeof(float), &s.values);
    if (is_valid) RUN(squares, &s, s.elements);
    release(&views);
    if (!is_valid) return NULL;
    end_block(&sum);
    return PyFloat_FromDouble(sum.total);
}

static PyObject *call_blockwise(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 16) return PyErr_Format(PyExc_TypeError, "16 arguments belong here, not %zd", count);
    struct views views = {.count = 0};
    struct sums sums = {{.filled = 0}, {.filled = 0}};
    struct blockwise b = {.chunk = {.elements = PyLong_AsSsize_t(arguments[0]), .sums = &sums}};
    begin_sums(arguments + 14, &sums);
    struct chunk *c = &b.chunk;
    b.start = PyLong_AsSsize_t(arguments[6]);
    b.block = PyLong_AsSsize_t(arguments[7]);
    b.width = (int)PyLong_AsLong(arguments[8]);
    b.share = (float)PyFloat_AsDouble(arguments[9]);
    if (PyErr_Occurred()) return NULL;
    if ((b.width != 8 || b.block != 256) && (b.width != 4 || b.block != 64))
        return PyErr_Format(PyExc_AssertionError, "no codec has such blocks");
    if (b.start < 0 || b.start % ROW)
        return PyErr_Format(PyExc_AssertionError, "a chunk begins at %zd, which is no multiple of %d", b.start, ROW);
    Py_ssize_t codes = c->elements; /* In bytes: pieces before the last have an even number of values. */
    if (b.width == 4) codes = (codes + 1) / 2;
    const Py_ssize_t body = (c->elements + b.block - 1) / b.block + codes;
    const Py_ssize_t pieces = c->elements ? (b.start % SEGMENT + c->elements + SEGMENT - 1) / SEGMENT : 0;
    const Py_ssize_t floats = sizeof(float), offset_bytes = pieces * (Py_ssize_t)sizeof(int32_t);
    int is_valid = take_chunk(&views, arguments + 1, body, c) &&
                   take_table(&views, arguments[10], 256 * floats, &b.scales) &&
                   take_table(&views, arguments[11], 256 * floats, &b.inverses) &&
                   take_table(&views, arguments[12], 2 * SEGMENT * floats, &b.noise) &&
                   take_table(&views, arguments[13], offset_bytes, &b.offsets);
    for (Py_ssize_t i = 0; is_valid && i < pieces; i++) {
        is_valid = b.offsets[i] >= 0 && b.offsets[i] < SEGMENT;
        if (!is_valid) PyErr_SetString(PyExc_AssertionError, "a segment's noise begins outside its table");
    }
    if (is_valid) RUN(blockwise_known, &b, c->elements);
    release(&views);
    return is_valid ? end_sums(&sums) : NULL;
}

static PyMethodDef METHODS[] = {
    {"bf16", (PyCFunction)(void (*)(void))call_bf16, METH_FASTCALL, NULL},
    {"difference", (PyCFunction)(void (*)(void))call_difference, METH_FASTCALL, NULL},
    {"mix", (PyCFunction)(void (*)(void))call_mix, METH_FASTCALL, NULL},
    {"add_read", (PyCFunction)(void (*)(void))call_add_read, METH_FASTCALL, NULL},
    {"squares", (PyCFunction)(void (*)(void))call_squares, METH_FASTCALL, NULL},
    {"blockwise", (PyCFunction)(void (*)(void))call_blockwise, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_edition(PyObject *module) { return PyModule_AddIntConstant(module, "EDITION", EDITION); }

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, add_edition}, {0, NULL}};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_passes", NULL, 0, METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__passes(void) { return PyModuleDef_Init(&MODULE); }
