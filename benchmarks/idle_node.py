"""A node that has joined and whose training loop is idle; it reports its CPU time and messages on request.

    python benchmarks/idle_node.py 8 127.0.0.1:40213      it steps until it knows 8 members, and is then idle

It prints its address and its run, and then "met" once it knows that many members. After that each input line is a
query. "look" returns the CPU seconds used, and the messages sent and received by kind. "met" returns how many members
it has met, including itself, and how often one was not ALIVE to it. Any other line ends the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import numpy as np

from node import Config, Node
from node.links.link import Link
from node.links.pool import Links
from node.network.link_life import LinkLife

counts: Counter[str] = Counter()  # calls of the counted methods


def count(owner: type, method: str, name: str) -> None:
    """Count the calls of a method from now on under ``name``, by the type of the argument."""
    usual = getattr(owner, method)

    def call(self, argument):
        counts[f"{name} {type(argument).__name__}"] += 1
        return usual(self, argument)

    setattr(owner, method, call)


def main(members: int, seeds: list[str]) -> None:
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
            match line.strip():
                case "look":
                    print(json.dumps({"cpu": time.process_time(), **counts}), flush=True)
                case "met":
                    print(node.metrics().members_alive, doubts.total() - doubts["alive"], flush=True)
                case _:
                    break


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
