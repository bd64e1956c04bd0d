"""The cost of copies and of mixes for a model on a GPU. `make accelerator` runs this and more.

    python -m benchmarks.accelerator copies [--simulated]
    python -m benchmarks.accelerator nodes [--simulated]

``copies`` measures the rates of page-locked copies, which are the limit, and the cost of a snapshot and of an addition
of a model. "Call" is the time inside the call in the training thread while the device is busy. "Stall" is the time by
which some training steps take longer with it. The rate is that of an idle device, from the call to the end of the last
copy. It counts 4 bytes a parameter, and 2 in snapshots of bfloat16 models, which cross in their own type. The host then
widens them, which is not timed. "Bytes a parameter" is the device's memory that it takes beyond the model's.

``nodes`` trains a node with a partner on the same device, which is a process of its own. The partner mixes and takes
steps at the same pace, and computes nothing: two processes that compute take turns on a device, and that would hide a
cost of 1 %. Steps without a node are timed before and after. Slow steps are fewer, so that the time suffices. The
optimizer is plain SGD, so that the partner joins quickly.

Figures are lines of JSON. Without a GPU, or with ``--simulated``, sizes are tiny and times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from benchmarks import accelerator_nodes
from benchmarks.accelerator_device import LARGE, SMALL, Shape, accelerator, elements, progress, say, seconds, trainee
from benchmarks.accelerator_nodes import Row
from gossip.kernel import implementation
from node.model.snapshot import ModelState

STEPS = 4  # Training steps in which a copy's stall shows: longer than the copy.
ROWS = [Row(64, 192), Row(8, 64), Row(8, 64, {"correction": 0.0})]
SHORT_ROWS = [Row(8, 16), Row(4, 8, {"correction": 0.0})]


def copies(shapes: dict[str, Shape], limit_bytes: int, rounds: int) -> None:
    """Print the limits of copies, and a snapshot and an addition of each model."""
    say("limits", **limits(limit_bytes, rounds))
    for name, shape in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            progress(f"snapshot and addition of {name} parameters, {dtype}")
            boundary(name, shape, dtype, rounds)
            torch.cuda.empty_cache()


def limits(size: int, rounds: int) -> dict[str, float]:
    """Return the rates of page-locked copies in each direction."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def rate(target: Tensor, source: Tensor) -> float:
        return size / min(seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(rounds)) / 1e9

    return {"down_gb_s": rate(host, device), "up_gb_s": rate(device, host)}


def boundary(name: str, shape: Shape, dtype: torch.dtype, rounds: int) -> None:
    """Print what a snapshot and an addition cost a training loop."""
    model, optimizer, train = trainee(shape, torch.optim.AdamW, dtype)
    state = ModelState(model, optimizer)
    vector, difference = state.buffer(state.size()), state.buffer(state.size())  # The difference is 0.
    state.read(vector)
    upload: Any = None

    def snapshot() -> Any:
        return state.begin_read(vector)

    def arrive() -> None:
        nonlocal upload
        upload = state.begin_upload(difference)

    def addition() -> Any:
        return upload.add()

    def arrive_and_add() -> Any:
        arrive()
        finish(upload)
        return upload.add()

    def nothing() -> None:
        """Have nothing to prepare."""

    for operation, prepare, call, whole, width in (
        ("snapshot", nothing, snapshot, snapshot, dtype.itemsize), ("addition", arrive, addition, arrive_and_add, 4),
    ):  # fmt: skip
        call_s, stall_s = cost(train, prepare, call, rounds)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        idle_s = min(seconds(lambda whole=whole: finish(whole())) for _ in range(rounds))
        taken = torch.cuda.max_memory_allocated() - before
        say(
            "boundary", operation=operation, model=name, parameters=elements(model), dtype=str(dtype)[len("torch.") :],
            call_s=call_s, stall_s=stall_s, rate_gb_s=width * state.size() / idle_s / 1e9,
            bytes_a_parameter=taken / elements(model),
        )  # fmt: skip


def finish(pending: Any) -> None:
    """Block until copies have finished, and do not widen what they have brought."""
    while not pending.done():
        time.sleep(1e-4)


def cost(
    train: Callable[[], object], prepare: Callable[[], object], call: Callable[[], Any], rounds: int
) -> tuple[float, float]:
    """Return the median seconds of the call, and those by which some training steps take longer with it."""
    calls, stalls = [], []

    def steps() -> None:
        for _ in range(STEPS):
            train()

    def steps_with() -> None:
        train()
        began = time.perf_counter()
        pending.append(call())
        calls.append(time.perf_counter() - began)
        for _ in range(STEPS - 1):
            train()

    for _ in range(rounds):
        pending: list[Any] = []
        without = seconds(steps)
        prepare()
        stalls.append(seconds(steps_with) - without)
        pending[0].wait()
    return statistics.median(calls), statistics.median(stalls)


def machine(simulated: bool) -> dict[str, Any]:
    return {
        "device": "simulated" if simulated else torch.cuda.get_device_name(), "cuda": torch.version.cuda,
        "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
        "kernel": implementation(), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["copies", "nodes"])
    parser.add_argument("--simulated", action="store_true", help="a simulated device, even where there is a real one")
    parser.add_argument("--partner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    simulated = arguments.simulated or not torch.cuda.is_available()
    shapes = SMALL if simulated else LARGE
    with accelerator(simulated) as device:
        if arguments.partner:
            accelerator_nodes.partner(shapes[arguments.partner])
        elif arguments.what == "nodes":
            accelerator_nodes.measure(shapes, SHORT_ROWS if simulated else ROWS, device)
        else:
            say("machine", **machine(simulated))
            copies(shapes, *((1 << 16, 2) if simulated else (1 << 30, 3)))


if __name__ == "__main__":
    main()
