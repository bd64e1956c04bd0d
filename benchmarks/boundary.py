"""What a large model's mixes cost its training loop: the longest ``step()``, and the memory beside the model.

    python benchmarks/boundary.py [--megabytes 400] [--rounds 5] [--seconds 12] [--json]

Two processes on loopback train a vector of so many megabytes, each step one pass over it, and want a mix at every step.
Timed is every call of ``step()``, the first one included; memory is the most that a process held, less what it held
with the model and no node; a copy is one of the model, in the same process before it begins.
"""

import argparse
import json
import os
import resource
import select
import statistics
import subprocess
import sys
import time

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def trainer(megabytes, seed, seconds):
    """Trains for so many seconds; prints what its steps took."""
    import numpy as np

    from node import Config, Node

    vector = np.full(int(megabytes * 1e6) // 4, 1.0, np.float32)
    copy_s = one_copy(vector)
    reset_most()
    before = held()
    with Node({"x": vector}, seeds=[seed] if seed else (), config=Config(mix_every_steps=1)) as me:
        vector.fill(1.0 if seed else 0.0)  # after joining, which took the first node's weights
        print(me.address, flush=True)
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            me._training.visit()
        sys.stdin.readline()
        took, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds:
            vector *= np.float32(0.999)
            started = time.perf_counter()
            me.step(samples=1)
            took.append(time.perf_counter() - started)
        mixes = me.metrics().exchanges_done
        took.sort()
        print(json.dumps({
            "longest_s": took[-1], "median_s": statistics.median(took), "steps": len(took), "mixes": mixes,
            "copy_s": copy_s, "vectors": (most_held() - before) / vector.nbytes, "seconds": seconds,
        }), flush=True)  # fmt: skip
        sys.stdin.readline()


def one_copy(vector):
    """Seconds, into memory that was touched before."""
    import numpy as np

    out = np.zeros_like(vector)
    out[:] = 1.0
    begin = time.perf_counter()
    out[:] = vector
    return time.perf_counter() - begin


def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def reset_most():
    """The copy above counts no more."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def most_held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def pair(megabytes, seconds):
    processes, seed = [], []
    for _ in range(2):
        command = [sys.executable, __file__, "trainer", "--megabytes", str(megabytes), "--seconds", str(seconds), *seed]
        alone = os.environ | {"GOSSIP_SHARED_MEMORY": "off"}  # a neighbour's memory would be counted as its own
        processes.append(subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=alone))
        seed = ["--seed", processes[-1].stdout.readline().strip()]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    rows = [json.loads(process.stdout.readline()) for process in processes]
    for process in processes:
        process.stdin.close()
        process.wait(30)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "trainer":
        trainer(args.megabytes, args.seed, args.seconds)
        return
    rounds = [pair(args.megabytes, args.seconds) for _ in range(args.rounds)]
    if args.json:
        print(json.dumps(rounds))
        return
    rows = [row for found in rounds for row in found]

    def median(name):
        return statistics.median(row[name] for row in rows)

    print(f"\n{args.megabytes:g} MB, a mix wanted at every step, two processes (medians of {args.rounds} rounds)\n")
    print(f"longest step()      {1e3 * median('longest_s'):8.0f} ms")
    print(f"median step()       {1e3 * median('median_s'):8.0f} ms")
    print(f"one copy            {1e3 * median('copy_s'):8.0f} ms")
    print(f"mixes a second      {statistics.median(row['mixes'] / row['seconds'] for row in rows):8.2f}")
    print(f"memory beside it    {median('vectors'):8.1f} vectors")


if __name__ == "__main__":
    main()
