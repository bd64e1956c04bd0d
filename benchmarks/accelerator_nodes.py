"""A node and its partner on one GPU: what mixes cost its training. Part of benchmarks/accelerator.py."""

from __future__ import annotations

import json
import math
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.accelerator_device import Shape, elements, progress, say, seconds, trainee, waits
from benchmarks.children import Child
from gossip.config import Config
from node import Node

ALONE_STEPS = 24  # Steps without a node, before and after each row.
ALONE_S = 3.0  # The most that they take; MIN_STEPS are taken in any case.
MIN_STEPS = 4
MEASURED_S = 18.0  # The most that a row's steps take on a GPU; those from one mix to the next in any case.
WAIT_S = 100.0  # The most that a join, or a mix, may take.


@dataclass(frozen=True, slots=True)
class Row:
    """A mix every so many steps, the most steps to measure, and settings other than the default ones."""

    every: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)


def measure(shapes: dict[str, Shape], rows: list[Row], simulated: Any) -> None:
    """Print a figure for each model and row, the largest model first: time may be short.

    ``simulated`` is the simulated device, or None. It takes all steps of a row, whose time means nothing.
    """
    measured_s = MEASURED_S if simulated is None else math.inf
    for name, shape in shapes.items():
        command = ["-m", "benchmarks.accelerator", "nodes", "--partner", name, *["--simulated"] * bool(simulated)]
        with Partner(*command) as other:
            loop = Loop(*trainee(shape))
            other.answers("ready")
            for row in rows:
                progress(f"two nodes of {name} parameters, a mix every {row.every} steps {row.settings or ''}")
                say(
                    "nodes",
                    model=name,
                    parameters=elements(loop.model),
                    **loop.measured(row, other, simulated, measured_s),
                )
        del loop
        torch.cuda.empty_cache()


class Loop:
    """The training loop that is measured."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, train: Callable[[], Tensor]) -> None:
        self.model, self.optimizer, self.train = model, optimizer, train
        self.longest_s = 0.0

    def measured(self, row: Row, other: Partner, simulated: Any, measured_s: float) -> dict[str, Any]:
        """Return the figures of one row."""
        before_s, peak, reserved = self.alone()
        with Node(self.model, self.optimizer, config=Config(mix_every_steps=row.every, **row.settings)) as node:
            torch.cuda.reset_peak_memory_stats()
            self.longest_s = 0.0
            settings = {"mix_every_steps": row.every, **row.settings}
            other.tell(json.dumps({"seed": node.address, "settings": settings, "pace_s": before_s}))
            self.until(node, other.has_answered)
            other.answers("joined")
            self.mix(node)  # The first one locks memory that later ones use again.
            done = exchanges(node)
            steps, took_s = timed(lambda: self.step(node), row.steps, row.every, measured_s)
            mixes = exchanges(node) - done
            memory = {"memory_bytes": torch.cuda.max_memory_allocated() - peak}
            memory["reserved_bytes"] = torch.cuda.max_memory_reserved() - reserved
            longest_s = self.longest_s
            with waits(simulated) as waited:
                self.mix(node)
            other.tell()
            other.answers("left")
        after_s, _, _ = self.alone()
        without_s = (before_s + after_s) / 2
        return {
            "every": row.every, "settings": row.settings, "steps": steps, "mixes": mixes,
            "step_s": took_s / steps, "step_without_s": [before_s, after_s],
            "lost": took_s / steps / without_s - 1,
            "lost_a_mix_s": (took_s - steps * without_s) / mixes if mixes else None,
            "longest_step_s": longest_s, "waits": len(waited), "waits_at": sorted(set(waited)), **memory,
        }  # fmt: skip

    def alone(self) -> tuple[float, int, int]:
        """Train without a node; return the seconds of a step, and the peaks of the device's memory."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        steps, took_s = timed(self.train, ALONE_STEPS, MIN_STEPS, ALONE_S)
        return took_s / steps, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def step(self, node: Node) -> None:
        loss = self.train()
        began = time.perf_counter()
        node.step(loss=loss)
        self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def mix(self, node: Node) -> None:
        """Train until one more exchange is done."""
        done = exchanges(node)
        self.until(node, lambda: exchanges(node) > done)

    def until(self, node: Node, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            self.step(node)
            if time.monotonic() > end:
                raise TimeoutError(f"no join or no mix within {WAIT_S:g} s")


def timed(step: Callable[[], object], most: int, every: int, limit_s: float) -> tuple[int, float]:
    """Take ``most`` steps, or fewer if another ``every`` of them would exceed the limit.

    The device is waited for once in ``every`` steps, in which a mix falls: a queue of work has no pace.

    Returns:
        The steps, a multiple of ``every``, and their seconds.
    """
    steps, took_s = 0, 0.0
    while steps < most and (not steps or took_s * (steps + every) <= limit_s * steps):
        took_s += seconds(lambda: [step() for _ in range(every)])
        steps += every
    return steps, took_s


class Partner(Child):
    """The other node, in a process that takes steps at our pace and computes nothing. Its block's end kills it."""

    def has_answered(self) -> bool:
        return bool(select.select([self.stdout], [], [], 0.0)[0])

    def answers(self, word: str) -> None:
        """Wait for its next line, which must be this word."""
        if (line := self.line()) != word:
            raise RuntimeError(f"the partner has said {line!r} in place of {word!r}")


def partner(shape: Shape) -> None:
    """Be the partner: join for each row that the measuring process writes to our input, until its next line."""
    model, optimizer, _ = trainee(shape)
    torch.cuda.empty_cache()
    print("ready", flush=True)
    while line := sys.stdin.readline():
        order = json.loads(line)
        with Node(model, optimizer, seeds=[order["seed"]], config=Config(**order["settings"])) as node:
            print("joined", flush=True)
            while not select.select([sys.stdin], [], [], order["pace_s"])[0]:
                node.step()
            sys.stdin.readline()
        print("left", flush=True)


def exchanges(node: Node) -> int:
    return int(node.metrics().exchanges_done)
