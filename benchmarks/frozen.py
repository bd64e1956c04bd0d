"""The cost of a join with and without the run's frozen base: bytes and seconds of two nodes over loopback.

    python benchmarks/frozen.py [--base-mb 100] [--adapter-mb 1] [--repeats 3]

A donor trains an adapter on a frozen base. Newcomers join it one after the other, each in a process of its own: some
with the same base and some with another. Times count from ``with Node(...)`` to its first line. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

MOST_S = 60.0  # seconds that a hash or a join may take
MB = 1_000_000


def make(base_mb: float, adapter_mb: float, seed: int):
    """Return a model with a frozen base of this seed, and its optimizer."""
    import torch
    from torch import nn

    model = nn.Module()
    random = torch.Generator().manual_seed(seed)
    model.base = nn.Parameter(torch.randn(int(base_mb * MB / 4), generator=random), requires_grad=False)
    model.adapter = nn.Parameter(torch.zeros(int(adapter_mb * MB / 4)))
    return model, torch.optim.SGD([model.adapter], lr=0.01, momentum=0.9)


def donate(options: argparse.Namespace) -> None:
    """Train until standard input ends; print the address once the hash of the base is known."""
    import threading

    from node import Config, Node

    began = time.perf_counter()
    model, optimizer = make(options.base_mb, options.adapter_mb, 0)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with Node(model, optimizer, listen="127.0.0.1:0", config=Config(mix_every_steps=1_000_000)) as node:
        began, is_reported = time.perf_counter(), False
        local = node._training.network.peer.local
        while not ended.is_set():
            optimizer.zero_grad()
            model.adapter.sum().backward()
            optimizer.step()
            node.step(samples=1)
            time.sleep(0.01)
            waited_s = time.perf_counter() - began
            if not is_reported and (getattr(local, "frozen_hash", True) or waited_s > MOST_S):
                is_reported = True
                print(json.dumps({"address": node.address, "hash_s": waited_s}), flush=True)


def join(options: argparse.Namespace) -> None:
    """Join the donor with the base of this seed; print what that took."""
    import torch

    from node import Config, Node

    model, optimizer = make(options.base_mb, options.adapter_mb, options.seed)
    expected, _ = make(options.base_mb, options.adapter_mb, 0)
    began = time.perf_counter()
    with Node(
        model, optimizer, seeds=[options.join], config=Config(mix_every_steps=1_000_000), join_or_fail_s=MOST_S
    ) as node:
        seconds = time.perf_counter() - began
        received = sum(link.bytes_received for link in node._training.network.runtime.links.all())
        assert torch.equal(model.base, expected.base), "it has the run's base"
        print(json.dumps({"bytes": received, "seconds": seconds}), flush=True)


def child(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *sys.argv[1:], *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str]) -> dict[str, float | str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"A process ended with code {process.wait()}.")
    figures: dict[str, float | str] = json.loads(line)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base-mb", type=float, default=100.0)
    parser.add_argument("--adapter-mb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--donor", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.donor or options.join:
        (donate if options.donor else join)(options)
        return
    donor = child("--donor")
    try:
        started = read(donor)
        print(f"base {options.base_mb:g} MB, adapter {options.adapter_mb:g} MB, hashed in {started['hash_s']:.2f} s")
        for name, seed in (("the same base", "0"), ("another base", "1")):
            rows = []
            for _ in range(options.repeats):
                newcomer = child("--join", str(started["address"]), "--seed", seed)
                rows.append(read(newcomer))
                newcomer.communicate()
            received, seconds = (statistics.median(float(row[key]) for row in rows) for key in ("bytes", "seconds"))
            print(f"{name:14s} {received:13,.0f} bytes received  {seconds:6.2f} s", flush=True)
    finally:
        donor.communicate()


if __name__ == "__main__":
    main()
