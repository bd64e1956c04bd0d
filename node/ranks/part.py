"""The part of each rank in rank 0's commands: one class for a model that each rank holds whole, one for a sharded one.

Rank 0 sends a command while all ranks stand at one boundary, and then the tensors that belong to it. ``commands`` is
the table of what the other ranks do.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from gossip.averaging.model import Pending
from gossip.averaging.vectors import Moments, Vector
from gossip.errors import ConfigError, LayoutError, LocalError
from node.loop.live import Trained
from node.model.device.uploads import UpdateUpload
from node.model.snapshot import ModelState
from node.model.state import State
from node.observe.notices import LOGGER
from node.ranks.boundary import MomentsTold, RanksBoundary, ShardedBoundary, UpdateTold
from node.ranks.optimizers import Described, RankOptimizers, host_copy
from node.ranks.plain import checked, register, unreadable_error
from node.ranks.ranks import Command, Ranks
from node.ranks.sharded.memory import MemoryName
from node.ranks.sharded.operation import Operation
from node.ranks.sharded.optimizers import ShardedOptimizers
from node.ranks.sharded.shards import ShardBox, ShardPlace, is_sharded_model
from node.ranks.sharded.state import ShardedState
from node.ranks.sharded.work import ShardWork

POLL_S = 1e-4  # Seconds between two checks whether a copy to the device has ended.

Hello = tuple[str, list[str], bool, bool, str]
"""The payload of "hello": the model's fingerprint, the kinds of its optimizers, is it in lockstep, is it sharded, and
``Config.mix_state``."""

Obey = Callable[[Any, Any], object]
"""Does a rank's part in a command. Arguments: the :class:`RankPart`, and the command's payload."""

register(MemoryName, Operation, ShardBox, ShardPlace)


class RankPart:
    """The model and the optimizers of one rank.

    Args:
        trained: What the program gives this rank's node to train.
        ranks: The ranks.
        state: The model's state.
        optimizers: The optimizers of this rank.
    """

    is_sharded: ClassVar[bool]
    boundary_class: ClassVar[type[RanksBoundary]]
    commands: ClassVar[dict[str, tuple[Any, Obey]]] = {
        "hello": (Hello, lambda part, hello: part.on_hello(hello)),
        "wait": (Any, lambda part, _: None),  # Rank 0 waits for its swarm.
        "optimizers": (Described, lambda part, described: part.optimizers.fill(described)),
    }
    """For each command the annotation of its payload, and what the other ranks do. These are of every model."""

    def __init__(self, trained: Trained, ranks: Ranks, state: State, optimizers: RankOptimizers) -> None:
        self.ranks, self.state, self.optimizers = ranks, state, optimizers
        self.trained = dataclasses.replace(trained, optimizers=optimizers, given_state=state)
        self.is_lockstep = False

    def obey(self, command: Command) -> None:
        """Carry out a command of rank 0. Raises LocalError if it is none for such a model."""
        if command.kind not in self.commands:
            raise unreadable_error(f"a command {command.kind[:20]!r}")
        hint, act = self.commands[command.kind]
        act(self, checked(command.payload, hint))

    def send_hello(self, is_lockstep: bool) -> None:
        """Let the other ranks check that they train the same model; called on rank 0."""
        self.is_lockstep = is_lockstep
        fingerprint, kinds = self.state.layout.fingerprint, self.optimizer_kinds()
        self.ranks.send_command("hello", (fingerprint, kinds, is_lockstep, self.is_sharded, self.state.mix_state))

    def on_hello(self, hello: Hello) -> None:
        """Check that this rank trains the same model with the same kinds of optimizers as rank 0."""
        fingerprint, kinds, self.is_lockstep, sharded, self.state.mix_state = hello
        own_kinds = self.optimizer_kinds()
        if fingerprint != self.state.layout.fingerprint:
            raise LayoutError(
                f"Rank {self.ranks.rank} holds another model than rank 0 of its group: make the same one on every rank."
            )
        if sharded != self.is_sharded:
            raise LayoutError(
                f"Rank {self.ranks.rank} holds a {'whole' if sharded else 'sharded'} model and rank 0 of its group a "
                f"{'sharded' if sharded else 'whole'} one: shard it on all of them, over the processes of group=."
            )
        if kinds != own_kinds:
            raise ConfigError(
                f"Rank {self.ranks.rank} gives Node the optimizers {own_kinds} and rank 0 of its group {kinds}: give "
                "every rank the same."
            )

    def optimizer_kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers.holders]

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Prepare the model for the start of rank 0's network thread, which runs in this block."""
        yield

    def send_all(self) -> None:
        """Send weights and optimizers from rank 0 to the others, after this rank's were replaced."""


class WholePart(RankPart):
    """A rank that holds the whole model. Rank 0 reads its own, and sends every change to the others."""

    is_sharded = False
    boundary_class = RanksBoundary

    def __init__(self, trained: Trained, ranks: Ranks) -> None:
        state = trained.make_state()
        super().__init__(trained, ranks, state, RankOptimizers(trained.optimizers, ranks, state.layout.size))
        # The values of the last change, which the next one overwrites, and of the last moments, which are shorter.
        self.received = self.received_moments = np.empty(0, np.float32)
        self.pending_copy: Pending | None = None  # The copy to the device that may still read either.

    def send_all(self) -> None:
        self.ranks.send_command("weights")
        self.copy_weights()
        self.optimizers.send()

    @torch.no_grad()
    def copy_weights(self, _: None = None) -> None:
        """Broadcast the weights in their own types, so that all ranks hold the same bits."""
        tensors = self.state.tensors()
        for name, tensor in tensors.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if self.ranks.leads:
                host = host_copy(tensor)
            else:
                tensors[name] = host
            self.ranks.broadcast(host)
        if not (self.ranks.leads and isinstance(self.state, ModelState)):
            self.state.load(tensors)  # Loading may fill more than `tensors` returns: rank 0 loads its own.

    def change(self, change: UpdateTold) -> None:
        """Receive an exchange's change, and apply it by the same arithmetic as rank 0."""
        self.wait_for_copy()
        if not change.fits(self.state.layout):
            raise unreadable_error(f"a change of {change.elements} elements")
        if change.portions:
            update = self.receive_relayed(change)
            self.pending_copy = update.add() if change.ratio is None else update.merge(change.ratio)
            return
        if self.received.size != change.elements:
            self.received = self.state.buffer(change.elements)
        self.ranks.broadcast_array(self.received)
        if change.has_positions:
            positions = np.empty(change.elements, np.int64)
            self.ranks.broadcast_array(positions)
            is_inside = positions.size == 0 or 0 <= positions[0] <= positions[-1] < self.state.layout.exchanged
            if not is_inside or (np.diff(positions) <= 0).any():
                raise unreadable_error("a change at positions outside the model")
            self.pending_copy = self.state.add_at(self.received, positions)
        elif change.ratio is not None:
            self.pending_copy = self.state.merge(self.received, change.ratio)
        else:
            self.pending_copy = self.state.add(self.received)

    def receive_relayed(self, change: UpdateTold) -> UpdateUpload:
        """Return an exchange's change whose values come from rank 0's device to this rank's."""
        update, rank = None, f"Rank {self.ranks.rank} of this node's group"
        if isinstance(self.state, ModelState):
            update = self.state.begin_relay(change.elements, change.ratio, self.ranks.relay)
        if update is None:
            raise LocalError(
                f"{rank} has no memory on its device for a portion of an update, 64 MB and for a merge another 64 MB: "
                "leave that much free."
            )
        if update.portions != change.portions:
            raise LayoutError(
                f"{rank} lays out its tensors in another way than rank 0: give all ranks the same memory format."
            )
        return update

    def mix_moments(self, told: MomentsTold) -> None:
        """Receive a partner's moments, and mix them by the same arithmetic as rank 0."""
        self.wait_for_copy()
        form = told.form(self.state.trained_elements)
        if form is None or not isinstance(self.state, ModelState):
            raise unreadable_error(f"moments {told.start} to {told.stop}")
        vector = Vector(np.empty(form.vector_elements(told.stop - told.start), np.float32))
        self.ranks.broadcast_array(vector.array)
        self.state.moments.use(form)
        self.received_moments = vector.array
        self.pending_copy = self.state.mix_moments(Moments(vector, form, told.start, told.stop))

    def wait_for_copy(self) -> None:
        """Wait until the values of the last change may be overwritten."""
        while self.pending_copy is not None and not self.pending_copy.done():
            time.sleep(POLL_S)  # The end of a copy can only be polled.

    commands = RankPart.commands | {
        "change": (UpdateTold, change),
        "moments": (MomentsTold, mix_moments),
        "weights": (Any, copy_weights),
    }


class ShardedPart(RankPart):
    """A rank that holds a part of each tensor. All ranks take part when rank 0 reads or changes their flat vector."""

    is_sharded = True
    boundary_class = ShardedBoundary

    def __init__(self, trained: Trained, ranks: Ranks) -> None:
        assert not isinstance(trained.model, State), "a State is not sharded"
        self.work = ShardWork(trained.model, trained.optimizers, trained.choices, ranks)
        self.sharded_state = ShardedState(self.work)
        optimizers = ShardedOptimizers(trained.optimizers, ranks, self.sharded_state)
        super().__init__(trained, ranks, self.sharded_state, optimizers)

    def on_hello(self, hello: Hello) -> None:
        super().on_hello(hello)
        self.work.begin()

    @contextmanager
    def starting(self) -> Iterator[None]:
        self.work.begin()
        with self.sharded_state.starting():
            if absent := self.sharded_state.absent_ranks:
                LOGGER.warning(
                    "Of this node's group, rank %s runs on another host, or in a container that does not see rank 0's "
                    "processes. Its part of each vector goes over the group's network, and all ranks wait for that.",
                    ", ".join(map(str, absent)),
                )  # fmt: skip
            yield

    def operate(self, operation: Operation) -> None:
        if not self.work.accepts(operation):
            raise unreadable_error(f"an operation {operation.kind[:20]!r} outside its memory")
        self.work.perform(operation)

    commands = RankPart.commands | {
        "operation": (Operation, operate),
        "map": (MemoryName, lambda part, name: part.work.map(name)),
        "unmap": (list[int], lambda part, numbers: part.work.unmap(numbers)),
    }


def part_of(trained: Trained, ranks: Ranks) -> RankPart:
    """Return this rank's part. Raises LayoutError if a tensor cannot be exchanged."""
    return ShardedPart(trained, ranks) if is_sharded_model(trained.model) else WholePart(trained, ranks)
