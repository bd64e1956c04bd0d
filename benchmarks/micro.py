"""Microbenchmarks of the parts of an exchange, in CPU microseconds, compared with a stored baseline.

    python benchmarks/micro.py [--rounds 7] [--seconds 4] [--only WORD] [--json] [--save]

The rows are frames, codecs, a vector's transfer in memory, a boundary, a step of a node alone, its batches, and whole
exchanges of two nodes in one process.
Rows are measured alternately, round by round. The best time of a row counts, because other work only adds time.
Machines differ, so each round also times two fixed jobs, one limited by the interpreter and one by memory. The second
ratio compares a row with the baseline after both were divided by the job that limits them. A second ratio of 1 means no
change; one that stays above 1.2 in a repeated run deserves attention. No ratio makes the program fail.

``--save`` makes this run the baseline. Use it together with the change that explains it, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
import torch
import xxhash
from small import small
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossip import kernel
from gossip.averaging.boundary import Boundary
from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.averaging.visit import Update
from gossip.codecs import get_codec
from gossip.wire.frames import PREFIX_BYTES, decode, encode, read_prefix
from gossip.wire.messages import Chunk, Commit, Offer
from node import Node
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState

BASELINE = Path(__file__).with_suffix(".json")
CHUNK = 131_072  # elements, as in the default configuration
LARGE = 1_000_000  # elements of a vector that does not stay in cache
SMALL = (5_000, 100_000)  # elements of whole exchanges
AT_ONCE_S = 0.02  # CPU time of a row in a round: a thousand times the clock's resolution
PYTHON, MEMORY = "python", "memory"  # the limits of rows

Work = Callable[[], object]


def frames() -> dict[str, tuple[Work, str]]:
    messages = {
        "chunk": (Chunk(2**60, 131_072, CHUNK, 2**63), 4 * CHUNK),
        "offer": (Offer(2**60, "f" * 32, b"g" * 16, 12.5, 0.5, "fp32"), 0),
        "commit": (Commit(2**60), 0),
    }

    def there_and_back(message, body):
        def work():
            frame = encode(message, body)
            read_prefix(frame[:PREFIX_BYTES])
            decode(frame[PREFIX_BYTES:], body)

        return work

    return {f"frame {name}": (there_and_back(*arguments), PYTHON) for name, arguments in messages.items()}


def codecs() -> dict[str, tuple[Work, str]]:
    """Return the rows of codecs: encode a chunk, then subtract from it as on arrival."""
    rng = np.random.default_rng(0)
    theirs, ours = (rng.standard_normal(CHUNK, dtype=np.float32) for _ in range(2))
    rows: dict[str, tuple[Work, str]] = {}
    for name in ("fp32", "bf16", "int8", "int4"):
        codec = get_codec(name)
        body, out, own = bytearray(codec.encoded_bytes(CHUNK)), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)

        def both(codec=codec, body=body, out=out, own=own):
            codec.encode(theirs, body, 1, 0)
            codec.subtract(body, ours, out, own, 1, 0)

        rows[f"codec {name}, a chunk"] = both, MEMORY
    return rows


def transfers() -> dict[str, tuple[Work, str]]:
    """Return the rows of transfers: a vector is framed, checked and subtracted, without a link."""
    rng = np.random.default_rng(1)
    rows: dict[str, tuple[Work, str]] = {}
    for elements, name in ((SMALL[0], "fp32"), (LARGE, "fp32"), (LARGE, "int8")):
        theirs, ours = (rng.standard_normal(elements, dtype=np.float32) for _ in range(2))
        out, codec = np.empty_like(ours), get_codec(name)

        def across(theirs=theirs, ours=ours, out=out, codec=codec):
            sender, receiver = Sender(1, theirs, codec, CHUNK), DifferenceReceiver(1, ours, out, codec)
            while not sender.done:
                start = sender.position
                _, body = sender.next_frame()
                chunk = Chunk(1, start, sender.position - start, xxhash.xxh3_64_intdigest(body))
                receiver.begin_chunk(chunk, len(body))[:] = body
                assert receiver.finish_chunk(chunk)

        rows[f"transfer {name}, {elements:,}"] = across, MEMORY if elements == LARGE else PYTHON
    return rows


def boundaries() -> dict[str, tuple[Work, str]]:
    """Return the rows of the training thread's work in a mix: a snapshot at one visit, the addition at the next."""
    rows: dict[str, tuple[Work, str]] = {}
    for elements in (SMALL[0], LARGE):
        state = ModelState({f"w{number}": np.zeros(elements // 10, np.float32) for number in range(10)})
        pool = VectorPool(state)
        boundary = Boundary(state, pool, KeptWeights(state))

        def mix(boundary=boundary, pool=pool):
            boundary.request_snapshot(1)
            [(_, snapshot, _)] = boundary.visit(lambda vector: None).snapshots
            boundary.begin_update()
            boundary.deliver_update(Update(snapshot))
            for update in boundary.visit(lambda vector: None).updates:
                pool.give(update.vector)

        rows[f"boundary, {elements:,}"] = mix, MEMORY if elements == LARGE else PYTHON
    return rows


def steps() -> dict[str, tuple[Work, str]]:
    """Return the rows of a step without a mix, and of a batch of 32 rows with and without the node's loader."""
    loader = DataLoader(TensorDataset(torch.zeros(3_200, 8)), 32, shuffle=True)
    node, other = (Node(nn.Linear(8, 2)).start() for _ in range(2))
    for one in (node, other):
        atexit.register(one.close)
    plain = (batch for _ in itertools.count() for batch in loader)
    shared = (batch for _ in node.epochs(10**9, loader) for batch in node.loader(loader))

    def step_after_draw() -> None:
        node._share.draws.give(32)
        node.step()

    def batch_and_step() -> None:
        next(shared)
        node.step()

    next(shared)
    return {
        "step, samples stated": (lambda: other.step(samples=32), PYTHON),
        "step, samples drawn": (step_after_draw, PYTHON),
        "batch, of a DataLoader": (lambda: next(plain), PYTHON),
        "batch, of node.loader, and step": (batch_and_step, PYTHON),
    }  # fmt: skip


def paces() -> dict[str, Work]:
    """Return the fixed jobs that measure the machine's current speed."""
    vector, other = np.ones(LARGE, np.float32), np.ones(LARGE, np.float32)
    table = {number: number for number in range(64)}

    def interpreter():
        total = 0
        for number in range(2_000):
            total += table[number & 63]
            table[number & 63] = number
        return total

    return {PYTHON: interpreter, MEMORY: lambda: np.add(vector, other, out=other)}


def time_us(work: Work, times: int) -> float:
    """Return the CPU microseconds of one call."""
    begin = time.thread_time()
    for _ in range(times):
        work()
    return 1e6 * (time.thread_time() - begin) / times


def measured(rows: dict[str, Work], rounds: int) -> dict[str, float]:
    """Return the best time of each row, in microseconds."""
    best, times = {}, {}
    for name, work in rows.items():
        work()
        times[name] = max(1, round(1e6 * AT_ONCE_S / max(time_us(work, 3), 0.1)))
    gc.disable()  # a collection would be charged to a random row
    for _ in range(rounds):
        for name, work in rows.items():
            best[name] = min(best.get(name, float("inf")), time_us(work, times[name]))
        gc.collect()
    gc.enable()
    return best


def exchanges(seconds: float, runs: int, wanted: Callable[[str], bool]) -> dict[str, float]:
    """Measure one side of a whole exchange: the CPU time of its threads, and of step(); the best run counts."""
    best: dict[str, float] = {}
    for _ in range(runs):
        for elements in SMALL:
            name = f"exchange, {elements:,}"
            if wanted(name):
                row = small(False, seconds / runs, elements)
                for row_name, ms in ((name, row["cpu_ms"]), (f"{name}, in step()", row["cpu_step_ms"])):
                    best[row_name] = min(best.get(row_name, float("inf")), 1e3 * ms)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each size of whole exchanges")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="as the baseline")
    arguments = parser.parse_args()
    if arguments.save and arguments.only:
        parser.error("--save takes all rows: leave --only out")
    rows = {name: row for part in (frames, codecs, transfers, boundaries, steps) for name, row in part().items()}
    limits = {name: limit for name, (_, limit) in rows.items()}
    works = {name: work for name, (work, _) in rows.items() if arguments.only in name}
    found = measured(paces() | works, arguments.rounds)
    found |= exchanges(arguments.seconds, min(3, arguments.rounds), lambda name: arguments.only in name)
    machine = {"python": platform.python_version(), "numpy": np.__version__, "kernel": kernel.implementation()}
    if arguments.save:
        BASELINE.write_text(
            json.dumps({"with": machine, "us": {k: round(v, 2) for k, v in found.items()}}, indent=1) + "\n"
        )
    if arguments.json:
        print(json.dumps({"with": machine, "us": found}))
        return
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"with": {}, "us": {}}
    show(found, baseline["us"], limits)
    for name, value in machine.items():
        if baseline["with"].get(name) != value:
            print(f"The baseline is of {name} {baseline['with'].get(name)}, this of {value}.")


def show(found: dict[str, float], before: dict[str, float], limits: dict[str, str]) -> None:
    print(f"{'microseconds of CPU':32}{'now':>10}{'baseline':>10}{'times':>8}{'by pace':>9}")
    for name, us in found.items():
        if name not in before:
            print(f"{name:32}{us:10.1f}{'-':>10}")
            continue
        times, limit = us / before[name], limits.get(name, PYTHON)
        pace = found[limit] / before[limit] if limit in before else 1.0
        print(f"{name:32}{us:10.1f}{before[name]:10.1f}{times:8.2f}{times / pace:9.2f}")


if __name__ == "__main__":
    main()
