"""The memory of a node, in bytes a parameter, beyond the model itself.

    python benchmarks/memory.py [--parameters 100000000] [--mixes 3]

Two nodes of one process each mix with the default settings; the model is one tensor without an optimizer. The figure is
the growth of ``RssAnon`` from before the Node is made until after the mixes, as /proc has it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gossip.config import Config
from node import Node

WAIT_S = 600.0  # The most that the mixes may take.


def resident() -> int:
    """Return the bytes of this process that are in memory and in no file."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    return 1024 * int(kib)


def hold(parameters: int, mixes: int, seeds: list[str]) -> None:
    """Be one node: print the address and then the bytes taken by mixes, and go on until killed."""
    torch.set_num_threads(1)
    weights = torch.full((parameters,), float(len(seeds)))
    before, until = resident(), time.monotonic() + WAIT_S
    with Node({"weights": weights}, seeds=seeds, config=Config()) as node:
        print(json.dumps(node.address), flush=True)
        while node.metrics().exchanges_done < mixes:
            node.step(samples=1)
            time.sleep(0.05)
            if time.monotonic() > until:
                raise SystemExit(f"fewer than {mixes} mixes within {WAIT_S:g} s")
        print(json.dumps(resident() - before), flush=True)
        while time.monotonic() < until:  # The other one may need this node for its mixes, until both are killed.
            node.step(samples=1)
            time.sleep(0.05)


def play(parameters: int, mixes: int) -> list[int]:
    """Run both nodes, and return what each has taken."""
    started: list[subprocess.Popen[str]] = []
    seeds: list[str] = []
    try:
        for _ in range(2):
            arguments = json.dumps([parameters, mixes, seeds])
            started.append(subprocess.Popen([sys.executable, __file__, "--node", arguments], stdout=-1, text=True))
            seeds = [answer(started[-1])]
        return [answer(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"A node ended with code {process.wait()}.")
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--mixes", type=int, default=3)
    parser.add_argument("--node", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node:
        hold(*args.node)
        return
    grown = play(args.parameters, args.mixes)
    print("bytes a parameter:", ", ".join(f"{node / args.parameters:.2f}" for node in grown))


if __name__ == "__main__":
    main()
