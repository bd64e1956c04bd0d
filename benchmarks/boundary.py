"""The cost of a large model's mixes for its training loop: the longest ``step()``, and the extra memory.

    python benchmarks/boundary.py [--megabytes 400] [--optimizer sgd adamw] [--rounds 5] [--seconds 12] [--json]

Two processes on loopback train a vector of this size, with one pass over it per step, and request a mix at every step.
After a third of the time a newcomer joins, which also fetches the state of AdamW. Every call of ``step()`` is timed,
including the first, by wall clock and by the CPU time of its thread, because three processes share the cores. Memory is
the peak during training and during joining, minus the memory with model, gradient and optimizer state but no node.
"One copy" is a copy of the model in the same process before the run.
"""

import argparse
import json
import resource
import statistics
import sys
import time

from children import Child, finish, say, visit_until_told


def trainer(seeds, megabytes, optimizer, seconds):
    """Train for some seconds, and print the times of the steps."""
    from node import Config, Node

    model, vector, train = training(megabytes, optimizer)
    copy_s = one_copy(vector)
    reset_peak()
    before = resident_bytes()
    with Node(*model, seeds=seeds, config=Config(mix_every_steps=1)) as member:
        vector.fill(1.0 if seeds else 0.0)  # joining has overwritten it with the first node's weights
        print(member.address, flush=True)
        visit_until_told(member)
        joining = peak_bytes() - before
        reset_peak()
        times, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds:
            train()
            started, cpu = time.perf_counter(), time.thread_time()
            member.step(samples=1)
            times.append((time.perf_counter() - started, time.thread_time() - cpu))
        mixes = member.metrics().exchanges_done
        times.sort()
        say({
            "longest_s": times[-1][0], "longest_cpu_s": max(cpu for _, cpu in times),
            "median_s": statistics.median(wall for wall, _ in times), "steps": len(times), "mixes": mixes,
            "copy_s": copy_s, "vectors": (peak_bytes() - before) / vector.nbytes, "seconds": seconds,
            "joining_vectors": joining / vector.nbytes if seeds else None,
        })  # fmt: skip
        sys.stdin.readline()


def training(megabytes, optimizer):
    """Return the arguments of a node, its weights as one vector, and a function that takes a training step."""
    import numpy as np
    import torch

    elements = int(megabytes * 1e6) // 4
    if optimizer == "sgd":
        vector = np.full(elements, 1.0, np.float32)
        return ({"x": vector},), vector, lambda: np.multiply(vector, np.float32(0.999), out=vector)
    torch.set_num_threads(1)
    module = torch.nn.Module()
    module.x = torch.nn.Parameter(torch.ones(elements))
    module.x.grad = torch.full((elements,), 1e-3)
    adamw = torch.optim.AdamW([module.x], lr=1e-4, fused=True)
    adamw.step()
    return (module, adamw), module.x.detach().numpy(), adamw.step


def newcomer(seeds, megabytes, optimizer):
    """Join, and print how long that took."""
    from node import Config, Node

    model, _, _ = training(megabytes, optimizer)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    with Node(*model, seeds=seeds, config=Config(mix_every_steps=1)):
        say(time.perf_counter() - begin)
        sys.stdin.readline()


def one_copy(vector):
    """Return the seconds of a copy into memory that is mapped already."""
    import numpy as np

    out = np.zeros_like(vector)
    out[:] = 1.0
    begin = time.perf_counter()
    out[:] = vector
    return time.perf_counter() - begin


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def reset_peak():
    """Reset the peak of the resident memory, so that the copy above does not count."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def pair(megabytes, seconds, optimizer):
    processes, seeds = [], []
    for _ in range(2):
        job = json.dumps(["trainer", seeds, megabytes, optimizer, seconds])
        processes.append(Child(__file__, "--role", job))
        seeds = [processes[-1].line()]
    joining = Child(__file__, "--role", json.dumps(["newcomer", seeds, megabytes, optimizer]))
    joining.line()
    for process in processes:
        process.tell()
    time.sleep(seconds / 3)
    joined_s = joining.answer("")
    finish([joining])
    rows = [process.answer() | {"joined_s": joined_s} for process in processes]
    finish(processes)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400.0)
    parser.add_argument("--optimizer", nargs="+", choices=["sgd", "adamw"], default=["sgd", "adamw"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        name, *arguments = args.role
        {"trainer": trainer, "newcomer": newcomer}[name](*arguments)
        return
    found = {name: [pair(args.megabytes, args.seconds, name) for _ in range(args.rounds)] for name in args.optimizer}
    if args.json:
        print(json.dumps(found))
        return
    for name, rounds in found.items():
        show(name, [row for both in rounds for row in both], args)


def show(name, rows, args):
    def median(name):
        return statistics.median(row[name] for row in rows)

    print(f"\n{args.megabytes:g} MB, {name}, a mix wanted at every step (medians of {args.rounds} rounds)\n")
    print(f"longest step()      {1e3 * median('longest_s'):8.0f} ms")
    print(f"longest by CPU      {1e3 * median('longest_cpu_s'):8.0f} ms, as others wait for cores too")
    print(f"median step()       {1e3 * median('median_s'):8.0f} ms")
    print(f"one copy            {1e3 * median('copy_s'):8.0f} ms")
    print(f"mixes a second      {statistics.median(row['mixes'] / row['seconds'] for row in rows):8.2f}")
    print(f"a newcomer joins in {median('joined_s'):8.2f} s")
    print(f"memory beside it    {median('vectors'):8.2f} vectors")
    joined = statistics.median(row["joining_vectors"] for row in rows if row["joining_vectors"] is not None)
    print(f"  while it joined   {joined:8.2f}")


if __name__ == "__main__":
    main()
