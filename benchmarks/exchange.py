"""The speed of a pairwise exchange and its cost for training, compared with other libraries in one run.

    python benchmarks/exchange.py [--megabytes 40] [--rounds 5] [--json FILE]
    python benchmarks/exchange.py --training cnn-100k mlp-5k [--rounds 5]     only what training of these models loses
    python benchmarks/exchange.py --alone [--megabytes 40] [--rounds 5]       only the exchange
    python benchmarks/exchange.py --four [--megabytes 40] [--rounds 5]        only four processes against gloo

An exchange is timed from the agreed start of the streams to both Commits: 2 x 40 MB at once between two processes on
loopback. Every chunk is checksummed, checked for finiteness and subtracted. The programs run alternately, several
times; medians and their ratios are printed. "A mix" is the time from the end of one mix to the end of the next, if one
is always wanted. "Of it" is the share of its stream. The rest is the snapshot, the addition, the outer step if any, and
messages. ``--json`` also writes every run to a file. Four processes are compared by the bytes of parameters that all of
them together average in a second. Gossip averages in changing pairs, gloo's all_reduce all four at once.
"""

import argparse
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from children import Child, finish, free_port, say, visit_until_told

ROUNDS, WARM_ROUNDS, PIECE_BYTES = 15, 2, 1 << 20  # For raw sockets and gloo.
STEP_S = 0.002  # Time that a step of the training loop sleeps.
EACH_STEP = {"codec": "fp32", "mix_every_steps": 1}
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0, "correction": 0.0, "filter": "none"}
KINDS = "mlp-10m", "cnn-100k", "mlp-5k"
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# -- one process of a pair ---------------------------------------------------------------------------------------
def averager(seeds, megabytes, seconds, secret=None, sealed=True, settings=None):
    """Mix in a training loop for some seconds, and print the durations.

    A step sleeps, as the loop does while a GPU computes, and then moves a 64th of the weights at random.
    """
    import torch

    import node.transport.sealed
    from node import Config, Node

    node.transport.sealed.IN_PLACE &= sealed
    torch.set_num_threads(1)
    weights = torch.randn(int(megabytes * 1e6) // 4)
    part = torch.randn(len(weights) // 64)
    with Node({"x": weights}, seeds=seeds, secret=secret, config=Config(**settings or {})) as member:
        durations_s = timed(member._training.network.runtime.streams)
        print(member.address, flush=True)
        visit_until_told(member)
        begin, cpu, before = time.perf_counter(), time.process_time(), member.metrics().exchanges_done
        while time.perf_counter() - begin < seconds:
            time.sleep(STEP_S)
            start = int(torch.randint(len(weights) - len(part), ()))
            weights[start : start + len(part)].add_(part, alpha=1e-3 * (-1) ** start)
            member.step()
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
        done = member.metrics().exchanges_done - before
        say([durations_s, elapsed / max(1, done), cpu / max(1, done), weights[:: len(weights) // 256].tolist()])
        sys.stdin.readline()


def timed(streams):
    """Return a list that receives the seconds of each exchange from the start of its streams.

    The other libraries are timed in the same way. A node's own figures start at the request for a snapshot.
    """
    began, durations_s = {}, []
    transfer, mix = streams.transfer, streams.mix

    def timed_transfer(effect):
        began[effect.session] = streams.now
        transfer(effect)

    def timed_mix(effect):
        durations_s.append(streams.now - began.pop(effect.session, streams.now))
        mix(effect)

    streams.transfer, streams.mix = timed_transfer, timed_mix
    return durations_s


def trainer(seeds, kind, seconds, settings):
    """Train for some seconds, and print the steps per second."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from node import Config, Node

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind == "mlp-10m":
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 3072), nn.ReLU(), nn.Linear(3072, 512))
        x, y = torch.randn(64, 1024), torch.randint(0, 512, (64,))
    elif kind == "cnn-100k":
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 80),
            nn.ReLU(), nn.Linear(80, 10),
        )  # fmt: skip
        x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    else:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(after_step):
        """Train for ``seconds``, and return the steps per second; ``after_step(loss)`` follows each step."""
        for _ in range(20):
            train_step()
        print("ready", flush=True)
        sys.stdin.readline()
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            loss = train_step()
            after_step(loss)
            steps += 1
        return steps / (time.perf_counter() - begin)

    def train_step():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    if settings is None:  # without Node
        say([train(lambda loss: None), 0, 0.0])
        return
    with Node(model, optimizer, seeds=seeds, config=Config(**settings)) as member:
        print(member.address, flush=True)
        visit_until_told(member)
        rate = train(lambda loss: member.step(loss=loss, samples=64))
        metrics = member.metrics()
        say([rate, metrics.exchanges_done / metrics.steps, metrics.step_overhead_seconds])
        sys.stdin.readline()


def raw(seeds, megabytes, rounds):
    """Move as many bytes both ways at once over blocking sockets, and print the seconds of each round.

    There is no framing, no checksum and no averaging: a program that does more cannot be faster on the same machine.
    """
    if seeds:
        host, port = seeds[0].split(":")
        sock = socket.create_connection((host, int(port)))
        print("connected", flush=True)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            print(f"127.0.0.1:{server.getsockname()[1]}", flush=True)
            sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    size = int(megabytes * 1e6)
    ours, theirs = memoryview(bytearray(b"\1") * size), memoryview(bytearray(b"\2") * size)  # touched: no page faults

    def send():
        for start in range(0, size, PIECE_BYTES):
            sock.sendall(ours[start : start + PIECE_BYTES])

    seconds = []
    for _ in range(rounds + WARM_ROUNDS):
        sock.sendall(b".")  # both begin together
        sock.recv(1)
        begin, filled = time.perf_counter(), 0
        sender = threading.Thread(target=send)
        sender.start()
        while filled < size:
            count = sock.recv_into(theirs[filled : filled + PIECE_BYTES])
            assert count, "the other side closed"
            filled += count
        sender.join()
        seconds.append(time.perf_counter() - begin)
    say(seconds[WARM_ROUNDS:])


def gloo(seeds, rank, count, port, megabytes, rounds):
    """Average with gloo's all_reduce, and print the seconds of each round."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    vector = torch.ones(int(megabytes * 1e6) // 4)
    seconds = []
    for _ in range(rounds + WARM_ROUNDS):
        vector.fill_(1.0)
        distributed.barrier()
        begin = time.perf_counter()
        distributed.all_reduce(vector)
        seconds.append(time.perf_counter() - begin)
        assert float(vector[-1]) == count
    say(seconds[WARM_ROUNDS:])
    distributed.barrier()
    distributed.destroy_process_group()


# -- control of the processes ------------------------------------------------------------------------------------
class Pair:
    """Two (or ``count``) processes of this file; if they are nodes, each has the previous one as its seed."""

    def __init__(self, role, nodes=True, count=2, **arguments):
        """Start the processes, each with a role of this file and its arguments."""
        self.processes, seeds = [], []
        for rank in range(count):
            given = {"seeds": seeds, **arguments} | ({"rank": rank, "count": count} if role == "gloo" else {})
            self.processes.append(Child(__file__, "--role", json.dumps([role, given])))
            if nodes:
                seeds = [self.processes[-1].line()]  # printed once it has joined

    def tell(self):
        """Let the processes go on: each waits for a line in turn."""
        for process in self.processes:
            process.tell()

    def results(self):
        """Return what all have found, once they have ended."""
        rows = [process.answer() for process in self.processes]
        finish(self.processes)
        return rows


def our_exchange(megabytes, seconds=4.0, **given):
    pair = Pair("averager", megabytes=megabytes, seconds=seconds, **given)
    pair.tell()
    rows = pair.results()
    durations = [value for row in rows for value in row[0]]
    check_alike(rows)
    return {
        "median_s": statistics.median(durations), "best_s": min(durations), "cycle_s": rows[0][1],
        "cpu_s": statistics.mean(row[2] for row in rows),
    }  # fmt: skip


def check_alike(rows):
    """Check that the models of all processes are near each other; weights drawn apart differ by more than 1."""
    apart = [math.dist(rows[0][3], row[3]) / math.sqrt(len(row[3])) for row in rows]
    assert max(apart) < 0.1, f"the models did not stay together: {apart}"


def four_averaging(megabytes, seconds=6.0):
    """Return the GB a second that four processes average together."""
    pair = Pair("averager", megabytes=megabytes, seconds=seconds, count=4, settings=EACH_STEP)
    pair.tell()
    rows = pair.results()
    check_alike(rows)
    return sum(megabytes / 1e3 / row[1] for row in rows)


def four_and_gloo(megabytes, rounds):
    """Measure gloo and gossip alternately, and return the GB a second of each run."""
    jobs = {
        "gloo all_reduce": lambda: 4 * megabytes / 1e3 / all_reduce(megabytes)["median_s"],
        "gossip": lambda: four_averaging(megabytes),
    }
    return alternately(jobs, rounds)


def alternately(jobs, rounds):
    """Run the jobs one after the other, several times, and return the results of each."""
    rows = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            rows[name].append(job())
    return rows


def raw_exchange(megabytes):
    seconds, _ = Pair("raw", megabytes=megabytes, rounds=ROUNDS).results()
    return {"median_s": statistics.median(seconds), "best_s": min(seconds)}


def all_reduce(megabytes):
    seconds, *_ = Pair("gloo", False, 4, port=free_port(), megabytes=megabytes, rounds=ROUNDS).results()
    return {"median_s": statistics.median(seconds), "best_s": min(seconds)}


def slowdown(kind, settings, seconds=6.0, pairs=3):
    """Compare the steps per second of two processes with a Node of these settings and without Node, alternately."""
    rates, mixes, overhead = {False: [], True: []}, [], []
    for _ in range(pairs):
        for with_node in (False, True):
            pair = Pair("trainer", with_node, kind=kind, seconds=seconds, settings=settings if with_node else None)
            if with_node:
                pair.tell()
            for process in pair.processes:
                assert process.line() == "ready"
            pair.tell()
            rows = pair.results()
            rates[with_node].append(statistics.mean(row[0] for row in rows))
            if with_node:
                mixes.append(statistics.mean(row[1] for row in rows))
                overhead.append(rows[0][2])
    ratios = [1 - together / alone for alone, together in zip(rates[False], rates[True], strict=True)]
    return {
        "step_ms": 1e3 / statistics.median(rates[False]), "slowed_percent": 100 * statistics.median(ratios),
        "mixes_per_8_steps": 8 * statistics.median(mixes), "inside_step_us": 1e6 * statistics.median(overhead),
    }  # fmt: skip


def slowdowns(kinds, pairs=3):
    """Return the slowdown of each kind by the default and by a mix every 8 steps."""
    return {
        f"{kind}, {name}": slowdown(kind, settings, pairs=pairs)
        for kind in kinds for name, settings in (("default", {}), ("every 8", {"mix_every_steps": 8}))
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="every run, beside the tables")
    parser.add_argument("--training", nargs="+", choices=KINDS, help="how these are slowed, and nothing else")
    parser.add_argument("--alone", action="store_true", help="the exchange, and nothing else")
    parser.add_argument("--four", action="store_true", help="four processes beside gloo, and nothing else")
    parser.add_argument("--role", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        name, arguments = args.role
        {"averager": averager, "trainer": trainer, "raw": raw, "gloo": gloo}[name](**arguments)
        return
    if args.training:
        slowed = slowdowns(args.training, args.rounds)
        show(slowed)
        save(args.json, {"training": slowed})
        return
    if args.four:
        four = four_and_gloo(args.megabytes, args.rounds)
        show_four(four)
        save(args.json, {"four_gb_s": four})
        return
    from node.identity.keys import new_secret

    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "swarm.secret"
        secret.write_text(new_secret())
        secret.chmod(0o600)
        jobs = {
            "raw sockets": lambda: raw_exchange(args.megabytes),
            "default": lambda: our_exchange(args.megabytes, seconds=10.0),
            **{
                name: lambda given=given: our_exchange(args.megabytes, **given)
                for name, given in {
                    "each step": {"settings": EACH_STEP},
                    "plain": {"settings": EACH_STEP | PLAIN},
                    "outer step": {"settings": EACH_STEP | {"correction": 0.0, "filter": "none"}},
                    "no filter": {"settings": EACH_STEP | {"filter": "none"}},
                    "bf16": {"settings": EACH_STEP | {"codec": "bf16"}},
                    "int8": {"settings": EACH_STEP | {"codec": "int8"}},
                    "sealed": {"settings": EACH_STEP, "secret": str(secret)},
                    "TLS": {"settings": EACH_STEP, "secret": str(secret), "sealed": False},
                }.items()
            },
        }
        rows = alternately(jobs, args.rounds)
    medians = {name: statistics.median(row["median_s"] for row in runs) for name, runs in rows.items()}
    found = {"exchange": rows, "median_s": medians}
    if not args.alone:
        slowed = slowdowns(KINDS)
        found |= {"training": slowed, "four_gb_s": four_and_gloo(args.megabytes, args.rounds)}
    save(args.json, found)
    print(f"\nOne exchange of {args.megabytes:g} MB each way, two processes on loopback (medians of {args.rounds})\n")
    print(f"{'':16}{'median ms':>10}{'best ms':>10}{'x raw':>8}{'CPU ms':>9}{'a mix, ms':>11}{'of it':>7}")
    for name, value in medians.items():
        best = min(row["best_s"] for row in rows[name])
        cpu = statistics.median(row.get("cpu_s", math.nan) for row in rows[name])  # CPU time of one process.
        # A cycle lasts from the end of a mix to the end of the next.
        cycle = statistics.median(row.get("cycle_s", math.nan) for row in rows[name])
        print(
            f"{name:16}{1e3 * value:10.1f}{1e3 * best:10.1f}{value / medians['raw sockets']:8.2f}{1e3 * cpu:9.1f}"
            f"{1e3 * cycle:11.1f}{value / cycle:7.2f}"
        )
    print(f"\nSealed, an exchange runs at {medians['each step'] / medians['sealed']:.2f} of plain ones' rate.")
    if not args.alone:
        show_four(found["four_gb_s"])
        show(found["training"])


def save(path, found):
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show_four(rows):
    print("\nFour processes on one host: parameters averaged in a second, all together\n")
    print(f"{'':16}{'median GB/s':>12}{'best GB/s':>10}{'x gloo':>8}")
    gloo = statistics.median(rows["gloo all_reduce"])
    for name, rates in rows.items():
        middle = statistics.median(rates)
        print(f"{name:16}{middle:12.2f}{max(rates):10.2f}{middle / gloo:8.2f}")


def show(slowed):
    print("\nTwo processes training side by side, against the same loop without Node\n")
    print(f"{'':20}{'step ms':>10}{'slowed %':>10}{'mixes/8':>9}{'in step us':>12}")
    for name, row in slowed.items():
        print(
            f"{name:20}{row['step_ms']:10.2f}{row['slowed_percent']:10.1f}{row['mixes_per_8_steps']:9.2f}"
            f"{row['inside_step_us']:12.1f}"
        )


if __name__ == "__main__":
    main()
