"""The cost of an idle node: in a process of its own among others like it, or many in one process.

    python benchmarks/idle.py 50 500 [seeds]      50 nodes in this process, which are idle once they know 500

``benchmarks/small.py`` calls :func:`alone`, :func:`together` and :func:`among`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node import Node

    Process = subprocess.Popen[str]

HERE = Path(__file__).parent
CROWD = 50  # nodes in a process, which then has 10,000 open files
JOIN_AT_ONCE = 4
LOOK_S = 1.0  # polling interval until all have met all
PR_SET_PDEATHSIG = 1


# -- processes ---------------------------------------------------------------------------------------------------------
def start(program: str, *arguments: object) -> Process:
    """Start a program of this folder, with one thread for arithmetic."""
    return subprocess.Popen(
        [sys.executable, str(HERE / program), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def read_line(process: Process) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"{process.args} ended: it says why above"
    return line


def ask(process: Process, question: str) -> str:
    assert process.stdin is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    return read_line(process)


def end(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def cost_of(nodes: list[Process], seconds: float) -> dict[str, float]:
    """Measure the nodes' average cost: percent of a core, and messages and new links a second."""

    def look() -> Counter[str]:
        return sum((Counter(json.loads(ask(node, "look"))) for node in nodes), Counter())

    began, before = time.monotonic(), look()
    time.sleep(seconds)
    after, took_s = look(), time.monotonic() - began
    after.subtract(before)
    rates = {name: count / took_s / len(nodes) for name, count in sorted(after.items())}  # per node and second
    totals = {
        group: round(sum(rates[name] for name in rates if name.startswith(group)), 2)
        for group in ("sent", "received", "new")
    }
    kinds = {name: round(rate, 2) for name, rate in rates.items() if rate and name != "cpu"}
    return {"percent": round(100 * rates["cpu"], 3), **totals, "kinds": kinds}


# -- a process each ----------------------------------------------------------------------------------------------------
def alone(count: int, seconds: float, settle_s: float, rounds: int) -> list[dict[str, float]]:
    """Measure the average cost of ``count`` idle nodes, each in a process of its own."""
    nodes: list[Process] = []
    seeds: list[str] = []
    try:
        for _ in range(count):
            nodes.append(start("idle_node.py", count, *seeds))
            seeds = seeds or read_line(nodes[0]).split()[:1]
        for index, node in enumerate(nodes):
            if index:
                read_line(node)  # its address
            assert read_line(node) == "met"
        time.sleep(settle_s)
        return [cost_of(nodes, seconds) for _ in range(rounds)]
    finally:
        for node in nodes:
            node.communicate("end\n")


def among(count: int, seconds: float, settle_s: float, rounds: int) -> list[dict[str, float]]:
    """Measure one idle node; the other members, of ``count``, are a crowd (``benchmarks/crowd.py``)."""
    node = start("idle_node.py", count)
    processes = [node]
    try:
        crowd = start("crowd.py", count - 1, *read_line(node).split())
        processes.append(crowd)
        assert read_line(node) == "met"
        while int(ask(node, "met").split()[0]) < count or int(ask(crowd, "met")) < count - 1:
            time.sleep(LOOK_S)
        time.sleep(settle_s)
        return [beside(node, crowd, seconds) for _ in range(rounds)]
    finally:
        end(processes)


def beside(node: Process, crowd: Process, seconds: float) -> dict[str, float]:
    """Measure the costs of the node and its crowd, the members that it has met, and how often one was not ALIVE."""
    doubts_before = int(ask(node, "met").split()[1])
    before, began = float(ask(crowd, "cpu")), time.monotonic()
    figures = cost_of([node], seconds)
    crowd_s, took_s = float(ask(crowd, "cpu")) - before, time.monotonic() - began
    met, doubts = map(int, ask(node, "met").split())
    figures |= {"met": met, "doubts": doubts - doubts_before, "doubts of the crowd": int(ask(crowd, "doubts"))}
    return figures | {"percent of the crowd": round(100 * crowd_s / took_s, 1)}


def among_nodes(count: int, seconds: float, settle_s: float, rounds: int) -> list[dict[str, float]]:
    """Measure one idle node; the other members are nodes too, 50 in each process."""
    processes: list[Process] = []
    seeds: list[str] = []
    left = count - 1
    try:
        while left:
            in_process = min(left, CROWD)
            left -= in_process
            processes.append(start("idle.py", in_process, count, *seeds))
            # Start one process after the other, as all at once would stall.
            addresses = read_line(processes[-1]).split()
            seeds = seeds or addresses
        node = start("idle_node.py", count, *seeds)
        processes.append(node)
        read_line(node)  # its address
        for process in processes:
            assert read_line(process) == "met"
        time.sleep(settle_s)
        return [cost_of([node], seconds) for _ in range(rounds)]
    finally:
        end(processes)


# -- many in this process ----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def crowd_of_nodes(count: int, seeds: list[str]) -> Iterator[list[Node]]:
    """Run ``count`` nodes in this process during the ``with`` block."""
    import numpy as np

    from node import Config, Node

    config = Config(swarm="small")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    nodes: list[Node] = []

    def join(number: int) -> None:
        known = [*seeds, *(other.address for other in nodes[:3])]
        node = Node({"x": np.zeros(1000, np.float32)}, None, seeds=known, config=config)
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
    """Return the share of a core that one of ``count`` nodes in one process takes.

    Their threads share the interpreter lock, so this is less than a node would take alone.
    """
    with crowd_of_nodes(count, []) as nodes:
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


def serve(count: int, members: int, seeds: list[str]) -> None:
    """Run ``count`` nodes; print three of their addresses, and "met" once all of them know all members."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end when the benchmark ends
    with crowd_of_nodes(count, seeds) as nodes:
        print(*(node.address for node in nodes[:3]), flush=True)
        meet(nodes, members)
        print("met", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
