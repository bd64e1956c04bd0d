"""A loop that trains and never calls `node.step`: it would end as an ordinary run, and have mixed with nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from node import running
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.model.optimizers import Optimizers

__all__ = ["FORGOTTEN", "StepWatch"]

WRITES = 8  # Writes to the weights before a loop is told: loading weights by hand takes one or two.
CHANGES = 3  # Draws of a batch before which the weights had changed.
MAX_DRAWS = 64  # Draws at which weights are read, which waits for a device. Longer accumulation is seen by the writes.
MAX_WEIGHTS = 8  # Tensors that are watched, spread over the model.
MAX_ELEMENTS = 4  # Elements of each that are read.

FORGOTTEN = (
    "This loop trains the weights and never calls node.step(), so that nothing is mixed and no sample counts: call "
    "node.step(loss) after each optimizer.step()."
)


class StepWatch:
    """The watch over one node's loop until its first step.

    It counts writes to the weights, of which torch keeps count. Fused optimizers write behind its back: so the watch
    also reads some elements at each batch that the loop draws.

    Args:
        live: The model, of which only tensors of torch are watched, and its optimizers.
        run: The counts of the loop.
        notify: Tells the user of an event of a kind in a sentence.
    """

    def __init__(self, live: LiveModel, run: HeldRun, notify: Callable[[str, str], None]) -> None:
        weights = weights_of(live.model, live.optimizers)
        self.weights = weights[:: -(-len(weights) // MAX_WEIGHTS) or 1]
        self.run, self.notify = run, notify
        self.versions: list[int] = []  # When this node itself last changed the weights; empty before it has started.
        self.elements: list[float] = []  # At the last draw; empty before the first.
        self.draws = self.changes = 0
        self.is_told = self.is_closed = False

    def begin(self) -> None:
        """Watch from here on: the node itself has made the weights what they are."""
        if not self.run.steps:
            self.versions, self.elements = [weight._version for weight in self.weights], []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what the node itself writes in this block out of the watch."""
        self.check()
        yield
        self.begin()

    def on_draw(self) -> None:
        """Handle a batch that the loop draws."""
        if self.is_told or self.run.steps:
            return
        self.draws += 1
        if self.versions and self.draws <= MAX_DRAWS:
            elements = [value for weight in self.weights for value in elements_of(weight)]
            self.changes += bool(self.elements) and elements != self.elements
            self.elements = elements
        self.check()

    def check(self) -> None:
        """Tell once if the loop forgets its steps."""
        if self.is_told or self.run.steps:
            return
        writes = [weight._version - before for weight, before in zip(self.weights, self.versions, strict=False)]
        if max(writes, default=0) >= WRITES or self.changes >= CHANGES:
            self.is_told = True
            self.notify("unstepped", FORGOTTEN)

    def close(self) -> None:
        """Note for the exit code of `gossip run` that the loop ends without a step."""
        if self.is_closed:  # The program may close a node again, and train the model elsewhere meanwhile.
            return
        self.check()
        self.is_closed = True
        if self.is_told and not self.run.steps:
            running.note_unstepped()


def elements_of(weight: Tensor) -> list[float]:
    """Return some elements of a tensor; none of one that is divided over processes."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_sparse or not weight.numel():
        return []
    places = range(0, weight.numel(), -(-weight.numel() // MAX_ELEMENTS))
    return [float(weight.detach().reshape(-1)[place]) for place in places]


def weights_of(model: Any, optimizers: Optimizers) -> list[Tensor]:
    """Return the tensors that a loop trains, as far as they are torch's and count their writes."""
    if optimizers.all:
        weights: list[Any] = [
            weight for one in optimizers.all for group in one.param_groups for weight in group["params"]
        ]
    elif isinstance(model, nn.Module):
        weights = [weight for weight in model.parameters() if weight.requires_grad]
    else:
        weights = list(model.values()) if isinstance(model, Mapping) else []
    return [weight for weight in weights if isinstance(weight, torch.Tensor) and not weight.is_inference()]
