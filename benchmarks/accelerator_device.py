"""The common parts of the accelerator's benchmarks: the device, a model to train on it, and a count of waits for it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sim.learning.models import ByteGPT

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("node", "gossip"))


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT over bytes, and the windows of a training step."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int


LARGE = {"1 B": Shape(20, 16, 2048, 512, 8), "100 M": Shape(8, 16, 1024, 512, 8)}
SMALL = {"large": Shape(2, 2, 32, 8, 1), "small": Shape(1, 2, 16, 8, 1)}  # On a simulated device.


@contextlib.contextmanager
def accelerator(simulated: bool, seed: int = 0) -> Iterator[Any]:
    """Yield None for a real device, otherwise a simulated one."""
    if not simulated:
        yield None
        return
    from tests.device.cuda import simulated as begin

    with begin(seed=seed) as device:
        yield device


def trainee(
    shape: Shape, optimize: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """Return a GPT on the device, its optimizer, and a training step, none of whose operations waits for the device."""
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = ByteGPT(shape.layers, shape.heads, shape.width, shape.context).to(dtype)
    optimizer = optimize(model.parameters(), lr=1e-4, fused=True)
    windows = torch.randint(0, 256, (shape.batch, shape.context + 1)).to("cuda")
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].flatten()

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        train()
    torch.cuda.synchronize()
    return model, optimizer, train


def elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def seconds(work: Callable[[], object]) -> float:
    """Return the time of some work on a device that was idle, until it is idle again."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@contextlib.contextmanager
def waits(device: Any) -> Iterator[list[str]]:
    """Yield a list of the lines of node and gossip at which the host waits for the device.

    On a real device torch warns of its own operations that wait; waits for an event, a stream or the device are counted
    by their calls. A real device may also wait where memory is allocated, which neither shows.

    Args:
        device: The simulated device, or None.
    """
    found: list[str] = []
    if device is not None:
        before = len(device.waits)
        yield found
        found += [wait.ours for wait in device.waits[before:] if wait.ours]
        return

    def note() -> None:
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
        found.extend([line for line in lines if line.startswith(OURS)][-1:])

    def warned(message: Warning | str, *args: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            note()

    def noted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return plain(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = warned
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            stack.enter_context(mock.patch.object(owner, "synchronize", noted(owner.synchronize)))
        torch.cuda.set_sync_debug_mode("warn")
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield found


def say(figure: str, **values: Any) -> None:
    """Print a figure as a line of JSON, at once: a part that hangs later does not lose it."""
    print(json.dumps({"figure": figure, **values}), flush=True)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
