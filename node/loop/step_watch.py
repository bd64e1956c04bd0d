"""Two watches over the steps of torch's optimizers: over a loop without `node.step`, and over replaced optimizers.

A loop that never calls `node.step` would end like an ordinary run without a single mix. An optimizer that the program
makes anew after its Node has a state that no newcomer gets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import optimizer as hooks
from torch.optim.optimizer import Optimizer

from node import running
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.model.inventory.watch import sampled
from node.model.optimizers import Optimizers, with_inner
from node.model.scalars import HostCopy, beside

# Updates of the weights before a running loop is told: several may come before a first step, as those of a critic.
RUNNING_UPDATES = 16
ENDED_UPDATES = 8  # The same once the loop has ended: loading weights by hand takes one or two.
REPLACED_STEPS = 20  # Steps of the loop in which another optimizer trains the weights of one that takes no step.
MAX_WEIGHTS = 8  # Tensors whose writes are counted, spread over the model.

FORGOTTEN = (
    "This loop trains the weights and never calls node.step(), so that nothing is mixed and no sample counts: call "
    "node.step(loss) after each optimizer.step()."
)

REWRITTEN = (
    "The weights that this node took from the swarm were overwritten before its first step, and what is there now is "
    "mixed into the others: load or initialise weights before the Node is made, or resume by node.load."
)
REWRITTEN_PART = 0.1  # Of the weights' norm: projections and the modes of optimizers change less.
_watches: set[StepWatch | OptimizerWatch] = set()  # A StepWatch only until its loop has taken a step.
_is_hooked = False  # Never undone: other threads may be reading torch's hooks just then.
os.register_at_fork(after_in_child=_watches.clear)


class StepWatch:
    """The watch over one node's loop until its first step.

    It counts the steps of all optimizers over the model's weights. torch also counts writes to a tensor, which reveals
    loops without its optimizers; fused optimizers write without raising that count. Nor do writes through ``.data`` or
    by another process, so that at the end some elements of the weights are compared too.

    Args:
        live: The model, of which only tensors of torch are watched, and its optimizers.
        run: The counts of the loop.
        notify: Tells the user of an event of a kind in a sentence.
    """

    def __init__(self, live: LiveModel, run: HeldRun, notify: Callable[[str, str], None]) -> None:
        weights = weights_of(live.model, live.optimizers)
        self.ids = {id(weight) for weight in weights}
        self.weights = weights[:: -(-len(weights) // MAX_WEIGHTS) or 1]
        self.run, self.notify = run, notify
        self.versions: list[int] = []  # When this node itself last changed the weights; empty before it has started.
        self.bits: list[Tensor] = []  # Some elements of the weights, then.
        self.has_changed = False  # These have changed since, and torch counted no write.
        self.taken: list[Tensor] | None = None  # Some of the weights that others have trained, until the first step.
        self.rewritten: HostCopy | None = None  # Whether the program has overwritten them, on its way from the device.
        self.optimizer_steps = 0
        self.is_told = self.is_closed = False

    def begin(self) -> None:
        """Watch from here on: the node itself has made the weights what they are."""
        if not self.run.steps:
            self.versions = [weight._version for weight in self.weights]
            self.bits = self.sampled_bits()
            if self.ids:
                self.taken = self.sample() if self.run.swarm_samples else None
                _watches.add(self)
                hook_optimizers()

    def before_optimizer_step(self) -> None:
        """Tell if the program has overwritten weights that others have trained, as its first step shows."""
        taken, self.taken = self.taken, None
        if taken is not None and not self.run.steps:
            self.rewritten = HostCopy(is_rewritten(taken, self.sample()))
        if self.rewritten is not None and self.rewritten.done():
            rewritten, self.rewritten = self.rewritten, None
            if rewritten.values > 0:
                self.notify("replaced", REWRITTEN)

    def sample(self) -> list[Tensor]:
        return [sampled(weight).float() for weight in self.weights]

    def sampled_bits(self) -> list[Tensor]:
        return [sampled(weight).cpu().view(torch.uint8) for weight in self.weights]

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Handle the step of any optimizer of the program."""
        if self.run.steps:
            _watches.discard(self)
        elif any(id(weight) in self.ids for group in optimizer.param_groups for weight in group["params"]):
            self.optimizer_steps += 1
            self.check(RUNNING_UPDATES)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what the node itself writes in this block out of the watch."""
        self.check()
        self.compare()
        yield
        if self.versions:
            self.begin()

    def on_draw(self) -> None:
        """Handle a batch that the loop draws."""
        self.check(RUNNING_UPDATES)

    def check(self, least: int = ENDED_UPDATES) -> None:
        """Tell once if the loop has made at least so many updates and forgets its steps."""
        if not (self.is_told or self.run.steps) and self.updates >= least:
            self.is_told = True
            self.notify("unstepped", FORGOTTEN)

    @property
    def updates(self) -> int:
        writes = [weight._version - before for weight, before in zip(self.weights, self.versions, strict=False)]
        return self.optimizer_steps or max(writes, default=0)  # One step of LBFGS writes many times.

    def compare(self) -> None:
        """Note if the weights have changed although torch counted no write."""
        if not (self.run.steps or self.updates or self.has_changed):
            with contextlib.suppress(RuntimeError):  # The program may have moved the model to the meta device.
                pairs = zip(self.bits, self.sampled_bits(), strict=False)  # None before the node has started.
                self.has_changed = any(old.shape == new.shape and not torch.equal(old, new) for old, new in pairs)

    def close(self, could_step: bool = True) -> None:
        """Note for the exit code of `gossip run` that the loop ends without a step that it could take."""
        if self.is_closed:  # The program may close a node again, and train the model elsewhere meanwhile.
            return
        if could_step:
            self.compare()
        self.check(0 if could_step and self.has_changed else ENDED_UPDATES)
        _watches.discard(self)
        self.is_closed = True
        if self.is_told and not self.run.steps:
            running.note_unstepped()


class OptimizerWatch:
    """The watch over the optimizers that a program gave its node: others may take their place later.

    An optimizer may pause, as one of two that alternate, or take no step because a gradient scaler skips it. So the
    user is told only once another optimizer trains the weights of one that takes no step meanwhile.

    Args:
        optimizers: The optimizers that the node was given.
        run: The counts of the loop.
        notify: Tells the user of an event of a kind in a sentence.
    """

    def __init__(self, optimizers: Optimizers, run: HeldRun, notify: Callable[[str, str], None]) -> None:
        # Keys are each optimizer and the ones inside it. A class without torch's constructor hides its steps, and is
        # not watched.
        self.given = {
            holder: optimizer for optimizer in optimizers.all for holder in with_inner(optimizer)
            if getattr(type(optimizer).step, "hooked", False)
        }  # fmt: skip
        self.run, self.notify = run, notify
        self.stepped_at: dict[Optimizer, int] = {}  # The loop's count of steps at the last step of each.
        # Other optimizers of the program, and the count of steps from which on each was looked at.
        self.others: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def begin(self) -> None:
        if self.given:
            _watches.add(self)
            hook_optimizers()

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Handle the step of any optimizer of the program."""
        given, steps = self.given.get(optimizer), self.run.steps
        if given is not None:
            self.stepped_at[given] = steps
        elif steps - (since := self.others.setdefault(optimizer, steps)) >= REPLACED_STEPS:
            self.others[optimizer] = steps
            idle = [one for one in self.given.values() if self.stepped_at.get(one, -1) < since]
            if replaced := [one for one in idle if ids_of(one) & ids_of(optimizer)]:
                self.close()
                self.notify("optimizer", (
                    f"{type(optimizer).__name__} trains the weights of this Node, which was not given it, and the "
                    f"{type(replaced[0]).__name__} that it was given has taken no step for {REPLACED_STEPS} steps: "
                    "newcomers get the state of that one. Make every optimizer before the Node and give it a list of "
                    "them, or change the groups of the one given."
                ))  # fmt: skip

    def close(self) -> None:
        _watches.discard(self)


def ids_of(optimizer: Optimizer) -> set[int]:
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}


def hook_optimizers() -> None:
    """Let torch call the watches after each step of an optimizer."""
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        hooks.register_optimizer_step_pre_hook(before_any_step)
        hooks.register_optimizer_step_post_hook(on_any_step)


def is_rewritten(then: Sequence[Tensor], now: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if these tensors are other ones by now, on the device of the first, else 0.0."""

    def square(parts: Iterable[Tensor]) -> Tensor:
        return torch.stack([part.square().sum().to(then[0].device) for part in parts]).sum()

    then = beside(then, now)
    moved = square(after - before for before, after in zip(then, now, strict=True))
    return (moved > REWRITTEN_PART**2 * square(then)).float()


def before_any_step(optimizer: Optimizer, arguments: Any, named: Any) -> None:
    for watch in [watch for watch in tuple(_watches) if isinstance(watch, StepWatch)]:
        watch.before_optimizer_step()


def on_any_step(optimizer: Optimizer, arguments: Any, named: Any) -> None:
    for watch in tuple(_watches):
        watch.on_optimizer_step(optimizer)


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
    return [weight for weight in weights if isinstance(weight, Tensor) and not weight.is_inference()]
