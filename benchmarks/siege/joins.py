"""Real joins of a swarm of four honest nodes and two members that serve the same noise.

Half of the newcomers meet liars that state a small version, and half liars that state the honest one. A join is
poisoned if the newcomer's accuracy is more than 5 points below the others' when it begins. Prints a line for each kind
of liar.
"""

from __future__ import annotations

import time

import numpy as np
import trio
from foe import Foe, Target
from fortress import Fortress
from pieces import serve, whole
from swarm_lab import Patient

HONEST, LIARS = 4, 2
POISONED = 0.05  # accuracy below the others'
JOIN_S = 30.0


def lie(target: Target, version: float | None) -> None:
    """Be two members that serve the same noise and state this version, or the one that honest donors state."""

    async def main() -> None:
        noise = np.random.default_rng(0).standard_normal(target.elements).astype(np.float32)
        async with trio.open_nursery() as nursery:
            for _ in range(LIARS):
                await serve(await Foe(target, nursery).member(), noise, whole, version)
            await trio.sleep_forever()

    trio.run(main)


def join(fortress: Fortress, honest: list[Patient]) -> tuple[float, float]:
    """Start a newcomer; return the seconds until it has joined, and how far its accuracy is below the others'."""
    began = time.monotonic()
    newcomer = fortress.start([honest[0].address])
    fortress.until(lambda: newcomer.event("joined") is not None and bool(newcomer.looks), JOIN_S, "a newcomer")
    seconds = newcomer.joined["t"] - began
    below = np.mean([node.now["accuracy"] for node in honest]) - newcomer.looks[0]["accuracy"]
    newcomer.process.kill()
    newcomer.process.wait()
    return seconds, float(below)


def play(count: int) -> None:
    """Let so many newcomers join, and print the table."""
    print(
        "| liars state | joins | poisoned | longest join | furthest below the others |\n|---|---|---|---|---|",
        flush=True,
    )
    for name, version in (("a small version", 1.0), ("the honest version", None)):
        with Fortress({}) as fortress:
            honest = fortress.raise_nodes(HONEST)
            time.sleep(3.0)
            target = fortress.target(honest)
            fortress.besieger(lambda target=target, version=version: lie(target, version))
            fortress.until(
                lambda nodes=honest: all(node.now["alive"] >= HONEST + LIARS for node in nodes), JOIN_S, "the liars"
            )
            joins = [join(fortress, honest) for _ in range(count // 2)]
        poisoned = sum(below > POISONED for _, below in joins)
        longest, furthest = (max(column) for column in zip(*joins, strict=True))
        print(f"| {name} | {len(joins)} | {poisoned} | {longest:.1f} s | {100 * furthest:.1f} points |", flush=True)
