"""The cost of an idle node: CPU time, and messages sent and received.

    python benchmarks/idle.py --alone 2 8 50         idle nodes, each in a process of its own
    python benchmarks/idle.py --among 100 500        one node in a process of its own, the others a crowd (crowd.py)

An idle node has joined, and its loop does not step. Its figures are percent of a core, messages sent and received by
kind, and new links a second. Links from the time of joining are closed after a minute without use; ``--settle-s 90``
waits for that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

from children import Child, say

CROWD = Path(__file__).with_name("crowd.py")
LOOK_S = 1.0  # polling interval until all have met all
counts: Counter[str] = Counter()  # calls of the counted methods of this process's node


# -- a node ------------------------------------------------------------------------------------------------------------
def count(owner: type, method: str, name: str) -> None:
    """Count the calls of a method from now on under ``name``, by the type of the argument."""
    usual = getattr(owner, method)

    def call(self, argument):
        counts[f"{name} {type(argument).__name__}"] += 1
        return usual(self, argument)

    setattr(owner, method, call)


def be_idle(members: int, seeds: list[str]) -> None:
    """Join; print the address and the run, and then "met" once this node knows that many members.

    After that each input line is a query. "look" returns the CPU seconds used, and the messages sent and received by
    kind. "met" returns how many members it has met, including itself, and how often one was not ALIVE to it.
    """
    import numpy as np

    from node import Config, Node
    from node.links.link import Link
    from node.links.pool import Links
    from node.network.link_life import LinkLife

    count(Link, "send", "sent")
    count(LinkLife, "on_message", "received")
    count(Links, "add", "new")
    doubts: Counter[str] = Counter()
    with Node({"x": np.zeros(1000, np.float32)}, None, seeds=seeds, config=Config(swarm="small")) as node:
        node.on("member", lambda event: doubts.update([event.after]))
        run = next((event.run for event in node.history() if event.kind in ("started", "joined")), "?")
        print(node.address, run, flush=True)
        while len(node.members) < members:
            time.sleep(0.2)
            node.step()
        print("met", flush=True)
        for line in sys.stdin:
            if line.strip() == "look":
                say({"cpu": time.process_time(), **counts})
            else:
                say([node.metrics().members_alive, doubts.total() - doubts["alive"]])


# -- all of them -------------------------------------------------------------------------------------------------------
def cost_of(nodes: list[Child], seconds: float) -> dict[str, float]:
    """Measure the nodes' average cost: percent of a core, and messages and new links a second."""

    def look() -> Counter[str]:
        return sum((Counter(node.answer("look")) for node in nodes), Counter())

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


def alone(count: int, seconds: float, settle_s: float, rounds: int) -> list[dict[str, float]]:
    """Measure the average cost of ``count`` idle nodes, each in a process of its own."""
    with contextlib.ExitStack() as stack:
        nodes: list[Child] = []
        seeds: list[str] = []
        for _ in range(count):
            nodes.append(stack.enter_context(Child(__file__, "--node", json.dumps([count, seeds]))))
            seeds = seeds or nodes[0].line().split()[:1]
        for index, node in enumerate(nodes):
            if index:
                node.line()  # The first line is its address.
            assert node.line() == "met"
        time.sleep(settle_s)
        return [cost_of(nodes, seconds) for _ in range(rounds)]


def among(count: int, seconds: float, settle_s: float, rounds: int) -> list[dict[str, float]]:
    """Measure one idle node; the other members, of ``count``, are a crowd."""
    with (
        Child(__file__, "--node", json.dumps([count, []])) as node,
        Child(CROWD, count - 1, *node.line().split()) as crowd,
    ):
        assert node.line() == "met"
        while node.answer("met")[0] < count or crowd.answer("met") < count - 1:
            time.sleep(LOOK_S)
        time.sleep(settle_s)
        return [beside(node, crowd, seconds) for _ in range(rounds)]


def beside(node: Child, crowd: Child, seconds: float) -> dict[str, float]:
    """Measure the costs of the node and its crowd, the members that it has met, and how often one was not ALIVE."""
    doubts_before = node.answer("met")[1]
    before, began = crowd.answer("cpu"), time.monotonic()
    figures = cost_of([node], seconds)
    crowd_s, took_s = crowd.answer("cpu") - before, time.monotonic() - began
    met, doubts = node.answer("met")
    figures |= {"met": met, "doubts": doubts - doubts_before, "doubts of the crowd": crowd.answer("doubts")}
    return figures | {"percent of the crowd": round(100 * crowd_s / took_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", type=int, nargs="+", default=[], help="how many idle nodes")
    parser.add_argument("--among", type=int, nargs="+", default=[], help="how many, one of them by itself")
    parser.add_argument("--settle-s", type=float, default=5.0, help="from when all know all to the first look")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1, help="of so many seconds each, one after the other")
    parser.add_argument("--node", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node:
        be_idle(*args.node)
        return
    times = args.seconds, args.settle_s, args.rounds
    figures = {f"{count} alone": alone(count, *times) for count in args.alone}
    print(json.dumps(figures | {f"among {count}": among(count, *times) for count in args.among}))


if __name__ == "__main__":
    main()
