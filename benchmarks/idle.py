"""The cost of an idle node in a process of its own, among others like it or among a crowd; part of small.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
LOOK_S = 1.0  # polling interval until all have met all
Process = subprocess.Popen  # with text


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
