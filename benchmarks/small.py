"""What a small exchange and an idle node cost: calls of Python functions, and CPU.

    python benchmarks/small.py                       100,000 elements, a mix at every step, of two nodes in one process
    python benchmarks/small.py --idle 2 8 50         so many nodes, a process each, that do not train
    python benchmarks/small.py --together 50 500     so many of them in one process, where there is no room for more

Calls are those of Python functions in the network's thread and inside ``step()``, by an exchange of one side; a second
run without counting has the CPU. An idle node has joined, and its loop stands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time

ELEMENTS = 100_000
SETTLE_S = 5.0  # after everybody knows everybody, before the CPU is read


def small(count: bool, seconds: float, elements: int = ELEMENTS) -> dict[str, float]:
    """One run of two nodes: their calls, or their CPU, for each exchange of one side."""
    import numpy as np

    from node import Config, Node

    calls = {"network": 0, "step": 0}

    def profiled(frame: object, event: str, argument: object) -> None:
        if event == "call":
            calls["network"] += 1

    config = Config(mix_every_steps=1, filter="none", outer_momentum=0.0)
    nodes: list[Node] = []
    if count:
        threading.setprofile(profiled)  # of the network's threads, which are started next
    done = threading.Event()
    steps_s = [0.0, 0.0]  # of CPU inside step()

    def train(index: int) -> None:
        sys.setprofile(None)  # of this thread
        seeds = [nodes[0].address] if index else []
        with Node({"x": np.zeros(elements, np.float32)}, None, seeds=seeds, config=config) as node:
            nodes.append(node)
            node.step()
            while len(node.members) < 2 and not done.is_set():
                time.sleep(0.02)
                node.step()

            def stepped(frame: object, event: str, argument: object) -> None:
                if event == "call":
                    calls["step"] += 1

            while not done.is_set():
                time.sleep(0.002)
                if count:
                    sys.setprofile(stepped)
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

    clocks = [time.pthread_getcpuclockid(one.ident) for one in threading.enumerate() if one.name == "gossip-network"]

    def read() -> tuple[dict[str, int], float, float, float, int]:
        network_s = sum(map(time.clock_gettime, clocks))
        done = sum(node.metrics().exchanges_done for node in nodes)
        return dict(calls), time.process_time(), network_s, sum(steps_s), done

    before = read()
    time.sleep(seconds)
    after = read()
    done.set()
    for thread in threads:
        thread.join()
    threading.setprofile(None)
    exchanges = max(1, after[4] - before[4])
    return {
        "exchanges": exchanges,
        "calls_network": (after[0]["network"] - before[0]["network"]) / exchanges,
        "calls_step": (after[0]["step"] - before[0]["step"]) / exchanges,
        "cpu_ms": 1e3 * (after[1] - before[1]) / exchanges,
        "cpu_network_ms": 1e3 * (after[2] - before[2]) / exchanges,
        "cpu_step_ms": 1e3 * (after[3] - before[3]) / exchanges,
    }


CHILD = """
import os, sys, time, numpy as np
from node import Node
seeds, members = sys.argv[1].split(",") if sys.argv[1] else [], int(sys.argv[2])
with Node({"x": np.zeros(1000, np.float32)}, None, seeds=seeds) as node:
    print(node.address, flush=True)
    while len(node.members) < members:
        time.sleep(0.2)
        node.step()
    print("met", flush=True)
    for line in sys.stdin:
        if line.strip() == "cpu":
            print(time.process_time(), flush=True)
        else:
            break
"""


def idle(count: int, seconds: float) -> float:
    """The mean share of a core that one of so many idle nodes takes."""
    nodes: list[subprocess.Popen[str]] = []
    first = ""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(count):
        node = subprocess.Popen(
            [sys.executable, "-c", CHILD, first, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        nodes.append(node)
        assert node.stdout is not None
        first = first or node.stdout.readline().strip()

    def read(node: subprocess.Popen[str]) -> float:
        assert node.stdin is not None
        assert node.stdout is not None
        node.stdin.write("cpu\n")
        node.stdin.flush()
        return float(node.stdout.readline())

    try:
        for index, node in enumerate(nodes):
            assert node.stdout is not None
            if index:
                node.stdout.readline()  # its address
            assert node.stdout.readline().strip() == "met"
        time.sleep(SETTLE_S)
        began, before = time.monotonic(), [read(node) for node in nodes]
        time.sleep(seconds)
        after, took_s = [read(node) for node in nodes], time.monotonic() - began
    finally:
        for node in nodes:
            node.communicate("end\n")
    return statistics.mean(a - b for a, b in zip(after, before, strict=True)) / took_s


def together(count: int, seconds: float) -> float:
    """The same of so many nodes in one process, whose threads take turns: a lower bound of what each would take."""
    import numpy as np

    from node import Node

    with contextlib.ExitStack() as stack:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        nodes: list[Node] = []
        for _ in range(count):
            seeds = [node.address for node in nodes[:3]]
            nodes.append(stack.enter_context(Node({"x": np.zeros(1000, np.float32)}, None, seeds=seeds)))
        while any(len(node.members) < count for node in nodes):
            for node in nodes:
                node.step()
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        began, before = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / (time.monotonic() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, nargs="+", default=[], help="how many idle nodes")
    parser.add_argument("--together", type=int, nargs="+", default=[], help="how many, in one process")
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    if asked.idle or asked.together:
        taken = {str(count): round(100 * idle(count, asked.seconds), 2) for count in asked.idle}
        for count in asked.together:
            taken[f"{count} together"] = round(100 * together(count, asked.seconds), 3)
        print(json.dumps(taken))
        return
    counted, timed = small(True, asked.seconds), small(False, asked.seconds)
    print(json.dumps({
        "exchanges_a_side": timed["exchanges"],
        "calls_network": round(counted["calls_network"]), "calls_step": round(counted["calls_step"]),
        **{name: round(timed[name], 2) for name in ("cpu_ms", "cpu_network_ms", "cpu_step_ms")},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
