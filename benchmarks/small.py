"""What a small exchange and an idle node cost: calls of Python functions, and CPU.

    python benchmarks/small.py                       100,000 elements, a mix at every step, of two nodes in one process
    python benchmarks/small.py --idle 2 8 50         so many nodes, a process each, that do not train
    python benchmarks/small.py --together 50 500     so many of them in one process, where there is no room for more
    python benchmarks/small.py --among 100 500       one in a process of its own, the others 50 in each

Calls are those of Python functions in the network's thread and inside ``step()``, by an exchange of one side; a second
run without counting has the CPU. An idle node has joined, and its loop stands. Nodes have a hundred files open each
while hundreds join: where a process may not have so many, "Too many open files" ends it; ``ulimit -n`` says how many.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node import Node

ELEMENTS = 100_000
CROWD = 50  # nodes of a process, which has 10,000 files open with them
JOIN_AT_ONCE = 4
PR_SET_PDEATHSIG = 1


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
from node import Config, Node
seeds, members = sys.argv[1].split(",") if sys.argv[1] else [], int(sys.argv[2])
with Node({"x": np.zeros(1000, np.float32)}, None, seeds=seeds, config=Config(swarm="small")) as node:
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


def child(seeds: str, count: int) -> subprocess.Popen[str]:
    """A node that says its address, then "met" once it knows so many, and then its CPU whenever it is asked."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, seeds, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def read(node: subprocess.Popen[str]) -> float:
    assert node.stdin is not None
    assert node.stdout is not None
    node.stdin.write("cpu\n")
    node.stdin.flush()
    return float(node.stdout.readline())


def idle(count: int, seconds: float, settle_s: float) -> float:
    """The mean share of a core that one of so many idle nodes takes."""
    nodes: list[subprocess.Popen[str]] = []
    first = ""
    for _ in range(count):
        node = child(first, count)
        nodes.append(node)
        assert node.stdout is not None
        first = first or node.stdout.readline().strip()

    try:
        for index, node in enumerate(nodes):
            assert node.stdout is not None
            if index:
                node.stdout.readline()  # its address
            assert node.stdout.readline().strip() == "met"
        time.sleep(settle_s)
        began, before = time.monotonic(), [read(node) for node in nodes]
        time.sleep(seconds)
        after, took_s = [read(node) for node in nodes], time.monotonic() - began
    finally:
        for node in nodes:
            node.communicate("end\n")
    return statistics.mean(a - b for a, b in zip(after, before, strict=True)) / took_s


@contextlib.contextmanager
def crowd(count: int, seeds: list[str]) -> Iterator[list[Node]]:
    """So many nodes in this process."""
    import numpy as np

    from node import Config, Node

    config = Config(swarm="small")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    nodes: list[Node] = []

    def join(number: int) -> None:
        found = [*seeds, *(each.address for each in nodes[:3])]
        node = Node({"x": np.zeros(1000, np.float32)}, None, seeds=found, config=config)
        nodes.append(node.__enter__())

    try:
        join(0)
        with ThreadPoolExecutor(JOIN_AT_ONCE) as pool:
            list(pool.map(join, range(1, count)))
        yield nodes
    finally:
        for node in nodes:
            node.close()


def together(count: int, seconds: float, settle_s: float) -> float:
    """The same of so many nodes in one process, whose threads take turns: a lower bound of what each would take."""
    with crowd(count, []) as nodes:
        meet(nodes, count)
        time.sleep(settle_s)
        began, before = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / (time.monotonic() - began) / count


def meet(nodes: list[Node], count: int) -> None:
    for node in nodes:
        while len(node.members) < count:
            node.step()
            time.sleep(0.1)


def stand(count: int, members: int, seeds: list[str]) -> None:
    """A process of a crowd: says three of its addresses, and "met" once all its nodes know all members."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody stands for a benchmark that is gone
    with crowd(count, seeds) as nodes:
        print(*(node.address for node in nodes[:3]), flush=True)
        meet(nodes, members)
        print("met", flush=True)
        sys.stdin.read()


def among(count: int, seconds: float, settle_s: float) -> float:
    """Of one in a process of its own, among as many others as make ``count``."""
    crowds: list[subprocess.Popen[str]] = []
    seeds: list[str] = []
    left = count - 1
    try:
        while left:
            here = min(left, CROWD)
            left -= here
            command = [sys.executable, __file__, "--crowd", str(here), str(count), *seeds]
            crowds.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            addresses = heard(crowds[-1]).split()  # one process after the other: all at once would stand still
            seeds = seeds or addresses
        node = child(",".join(seeds), count)
        crowds.append(node)
        heard(node)  # its address
        for each in crowds:
            assert heard(each) == "met", "a process of the crowd ended: it says why above"
        time.sleep(settle_s)
        began, before = time.monotonic(), read(node)
        time.sleep(seconds)
        return (read(node) - before) / (time.monotonic() - began)
    finally:
        for each in crowds:
            each.kill()
            each.wait()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, nargs="+", default=[], help="how many idle nodes")
    parser.add_argument("--together", type=int, nargs="+", default=[], help="how many, in one process")
    parser.add_argument("--among", type=int, nargs="+", default=[], help="how many, one of them by itself")
    parser.add_argument(
        "--settle-s", type=float, default=5.0, help="from when all know all to the first look at the CPU"
    )
    parser.add_argument("--crowd", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    if asked.crowd:
        stand(int(asked.crowd[0]), int(asked.crowd[1]), asked.crowd[2:])
        return
    if asked.idle or asked.together or asked.among:
        taken = {str(count): round(100 * idle(count, asked.seconds, asked.settle_s), 2) for count in asked.idle}
        for count in asked.together:
            taken[f"{count} together"] = round(100 * together(count, asked.seconds, asked.settle_s), 3)
        for count in asked.among:
            taken[f"among {count}"] = round(100 * among(count, asked.seconds, asked.settle_s), 3)
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
