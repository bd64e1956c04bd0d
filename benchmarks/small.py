"""The cost of a small exchange: calls of Python functions, and CPU time.

    python benchmarks/small.py                       two nodes in one process: 100,000 elements, a mix at every step

Calls are those of Python functions in the network thread and inside ``step()``, for one side of an exchange. A second
run without counting measures the CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from node import Node

ELEMENTS = 100_000


class Reading(NamedTuple):
    """The counts and CPU seconds so far: of the process, of its network threads and inside step()."""

    calls: dict[str, int]
    cpu_s: float
    network_s: float
    step_s: float
    exchanges: int


def small(count: bool, seconds: float, elements: int = ELEMENTS) -> dict[str, float]:
    """Run two nodes, and return their calls and CPU time for one side of an exchange; ``count`` counts the calls."""
    import numpy as np

    from node import Config, Node

    calls = {"network": 0, "step": 0}

    def count_network(frame: object, event: str, argument: object) -> None:
        if event == "call":
            calls["network"] += 1

    config = Config(mix_every_steps=1, filter="none", outer_momentum=0.0)
    nodes: list[Node] = []
    if count:
        threading.setprofile(count_network)  # applies to the network threads, which start next
    done = threading.Event()
    steps_s = [0.0, 0.0]  # CPU seconds inside step()

    def train(index: int) -> None:
        sys.setprofile(None)  # do not count this thread
        seeds = [nodes[0].address] if index else []
        with Node({"x": np.zeros(elements, np.float32)}, None, seeds=seeds, config=config) as node:
            nodes.append(node)
            node.step()
            while len(node.members) < 2 and not done.is_set():
                time.sleep(0.02)
                node.step()

            def count_step(frame: object, event: str, argument: object) -> None:
                if event == "call":
                    calls["step"] += 1

            while not done.is_set():
                time.sleep(0.002)
                if count:
                    sys.setprofile(count_step)
                began = time.thread_time()
                node.step()
                steps_s[index] += time.thread_time() - began
                if count:
                    sys.setprofile(None)

    threads = []
    for index in range(2):
        threads.append(threading.Thread(target=train, args=(index,)))
        threads[-1].start()
        while len(nodes) <= index:
            time.sleep(0.01)
    while any(len(node.members) < 2 for node in nodes):
        time.sleep(0.05)

    network_threads = [thread for thread in threading.enumerate() if thread.name == "gossip-network"]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in network_threads]

    def read() -> Reading:
        network_s = sum(map(time.clock_gettime, clocks))
        exchanges = sum(node.metrics().exchanges_done for node in nodes)
        return Reading(dict(calls), time.process_time(), network_s, sum(steps_s), exchanges)

    before = read()
    time.sleep(seconds)
    after = read()
    done.set()
    for thread in threads:
        thread.join()
    threading.setprofile(None)
    exchanges = max(1, after.exchanges - before.exchanges)
    return {
        "exchanges": exchanges,
        "calls_network": (after.calls["network"] - before.calls["network"]) / exchanges,
        "calls_step": (after.calls["step"] - before.calls["step"]) / exchanges,
        "cpu_ms": 1e3 * (after.cpu_s - before.cpu_s) / exchanges,
        "cpu_network_ms": 1e3 * (after.network_s - before.network_s) / exchanges,
        "cpu_step_ms": 1e3 * (after.step_s - before.step_s) / exchanges,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    counted, timed = small(True, args.seconds), small(False, args.seconds)
    print(json.dumps({
        "exchanges_a_side": timed["exchanges"],
        "calls_network": round(counted["calls_network"]), "calls_step": round(counted["calls_step"]),
        **{name: round(timed[name], 2) for name in ("cpu_ms", "cpu_network_ms", "cpu_step_ms")},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
