"""A rank of a node other than rank 0: it applies rank 0's changes to its weights, and learns of the swarm from it.

The *ranks* are the processes of torch.distributed that train one model and form one node.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from gossip.averaging.model import Pending
from gossip.averaging.vectors import Moments, Vector
from gossip.errors import ConfigError, GossipError, LayoutError, LocalError
from gossip.ids import PeerId
from node import running
from node.data.division import Sharers
from node.data.sampler import Samplers
from node.loop.held_run import check_state
from node.loop.live import Trained
from node.loop.ranks.boundary import MomentsTold, UpdateTold
from node.loop.ranks.mirror import Mirror
from node.loop.ranks.plain import checked, unreadable_error
from node.loop.ranks.ranks import Call, Ranks
from node.loop.ranks.report import SwarmKnowledge, SwarmReport
from node.loop.ranks.sharded import perform_command, with_shards
from node.model.device.updates import RelayedUpdate
from node.model.inventory.items import Inventory
from node.model.sharded.state import ShardedState
from node.model.snapshot import ModelState, device_of
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced

__all__ = ["Follower"]

POLL_S = 1e-4  # Seconds between two checks whether a copy to the device has ended.


Outcome = tuple[Any, LocalError | None, SwarmReport | None]
"""The payload of "done": the result of rank 0's call, its error, and a report unless rank 0 could not start."""

Hello = tuple[str, list[str], bool, bool, str]
"""The payload of "hello": the model's fingerprint, the kinds of its optimizers, is it in lockstep, is it sharded, and
``Config.mix_state``."""


class Follower:
    """The counterpart of :class:`node.loop.training.TrainingSide` on ranks other than 0.

    :class:`node.node.Node` holds it. It has no thread, identity or settings: those belong to rank 0.
    """

    learning_rate = math.nan  # As the loop passes it; not used, since a node of several ranks learns no correction.

    def __init__(self, trained: Trained, ranks: Ranks) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        trained = with_shards(trained, ranks)
        self.model, self.optimizers = trained.model, trained.optimizers
        self.state = trained.make_state()
        # This rank's part of a sharded model; None if it holds the whole.
        self.work = self.state.work if isinstance(self.state, ShardedState) else None
        self.mirror = Mirror(self.state, self.optimizers, ranks)
        ranks.channel.device = device_of(self.state)
        self.knowledge = SwarmKnowledge(ranks)
        self.is_lockstep = False
        self.listeners = Listeners(lambda: self.me.hex())  # It gets no events, since only rank 0 reports them.
        self.samplers = Samplers(Sharers.of(self))
        self.received = np.empty(0, np.float32)  # The values of the last change; the next change overwrites them.
        self.received_moments = np.empty(0, np.float32)  # Those of the last part; they are shorter, and allocated anew.
        self.pending_copy: Pending | None = None  # The copy to the device that may still read either.

    # -- life ----------------------------------------------------------------------------------------------------
    def addresses(self) -> dict[int, str]:
        return {}

    def start(self) -> None:
        self.ranks.open()
        running.enter(self)
        try:
            self.join_call(Call.START)
        except BaseException as error:
            self.close(error)
            raise

    def leave(self, error: BaseException | None) -> None:
        """Take part while rank 0 lets others take the last steps, then close."""
        if error is None and self.ranks.is_up:
            with contextlib.suppress(GossipError):
                self.join_call(Call.LEAVE)
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        running.leave(self)
        self.ranks.leave(error)

    # -- the loop ------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        """Count a step, and carry out rank 0's commands if a summary has said that they come."""
        knowledge = self.knowledge
        knowledge.count_step(samples)
        if self.is_lockstep:
            knowledge.begin_summary(Call.STEP)
        summary = knowledge.finish_summary()
        if summary is not None and summary.must_stop:
            self.obey()
        if not self.is_lockstep and knowledge.count_boundary():
            knowledge.begin_summary(Call.STEP)

    def join_call(self, call: Call, hint: Any = Any) -> Any:
        """Take part in a call that all ranks make and rank 0 carries out.

        Returns:
            Rank 0's result, which must fit ``hint``.

        Raises:
            LocalError: Rank 0 raised it, and so does every rank.
        """
        self.knowledge.wait_for_all(call)
        return self.obey(hint)

    def obey(self, hint: Any = Any) -> Any:
        """Carry out rank 0's commands at this boundary until "done", and return the result that comes with it."""
        ranks = self.ranks
        with ranks.at_one_boundary():
            while True:
                command = ranks.receive_command()
                match command.kind:
                    case "hello":
                        self.check_same_model(checked(command.payload, Hello))
                    case _ if self.work is not None and perform_command(command, self.work, self.optimizers):
                        continue
                    case "change" if self.work is None:
                        self.apply_change(checked(command.payload, UpdateTold))
                    case "moments" if isinstance(self.state, ModelState):
                        self.mix_moments(self.state, checked(command.payload, MomentsTold))
                    case "mixed":
                        self.optimizers.on_mixed()
                    case "mirror" if self.work is None:
                        self.mirror.receive()
                    case "done":
                        result, error, report = checked(command.payload, Outcome)
                        if report is not None:
                            self.knowledge.on_report(report)
                        break
                    case "wait":
                        continue  # Rank 0 waits for its swarm.
                    case _:
                        raise unreadable_error(f"a command {command.kind[:20]!r}")
        if error is not None:
            raise error
        return checked(result, hint)

    def check_same_model(self, hello: Hello) -> None:
        """Check that this rank trains the same model with the same kinds of optimizers as rank 0."""
        fingerprint, kinds, self.is_lockstep, sharded, self.state.mix_state = hello
        own_kinds = [type(optimizer).__name__ for optimizer in self.optimizers.holders]
        if fingerprint != self.state.layout.fingerprint:
            raise LayoutError(
                f"Rank {self.ranks.rank} holds another model than rank 0 of its group: make the same one on every rank."
            )
        if sharded != (self.work is not None):
            raise LayoutError(
                f"Rank {self.ranks.rank} holds a {'whole' if sharded else 'sharded'} model and rank 0 of its group a "
                f"{'sharded' if sharded else 'whole'} one: shard it on all of them, over the processes of group=."
            )
        if kinds != own_kinds:
            raise ConfigError(
                f"Rank {self.ranks.rank} gives Node the optimizers {own_kinds} and rank 0 of its group {kinds}: give "
                "every rank the same."
            )
        if self.work is not None:
            self.work.begin()

    def wait_for_copy(self) -> None:
        """Wait until the values of the last change may be overwritten."""
        while self.pending_copy is not None and not self.pending_copy.done():
            time.sleep(POLL_S)  # The end of a copy can only be polled.

    def mix_moments(self, state: ModelState, told: MomentsTold) -> None:
        """Receive a partner's moments, and mix them by the same arithmetic as rank 0."""
        self.wait_for_copy()
        form = told.form(state.trained_elements)
        if form is None:
            raise unreadable_error(f"moments {told.start} to {told.stop}")
        vector = Vector(np.empty(form.vector_elements(told.stop - told.start), np.float32))
        self.ranks.broadcast_array(vector.array)
        state.moments.use(form)
        self.received_moments = vector.array
        self.pending_copy = state.mix_moments(Moments(vector, form, told.start, told.stop))

    def apply_change(self, change: UpdateTold) -> None:
        """Receive an exchange's change, and apply it by the same arithmetic as rank 0."""
        self.wait_for_copy()
        if not change.fits(self.state.layout):
            raise unreadable_error(f"a change of {change.elements} elements")
        if change.portions:
            self.pending_copy = self.receive_relayed(change).add()
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
            return
        if change.ratio is not None:
            self.pending_copy = self.state.merge(self.received, change.ratio)
        else:
            self.pending_copy = self.state.add(self.received)

    def receive_relayed(self, change: UpdateTold) -> RelayedUpdate:
        """Return an exchange's change whose values come from rank 0's device to this rank's."""
        update = None
        if isinstance(self.state, ModelState):
            update = self.state.begin_relay(change.elements, change.ratio, self.ranks.relay)
        if update is None:
            raise LocalError(
                f"Rank {self.rank} of this node's group has no memory on its device for a portion of an update, 64 MB "
                "and for a merge another 64 MB: leave that much free."
            )
        if update.portions != change.portions:
            raise LayoutError(
                f"Rank {self.rank} of this node's group lays out its tensors in another way than rank 0: give all "
                "ranks the same memory format."
            )
        return update

    # -- calls that all ranks make ---------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        distance: float | None = self.join_call(Call.SETTLE, float | None)
        return distance

    def finish(self, seconds: float) -> None:
        self.join_call(Call.FINISH)

    def merge(self, run: str) -> None:
        self.join_call(Call.MERGE)

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Take part; rank 0 sends the figures."""
        reduced: dict[str, Reduced] = self.join_call(Call.REDUCE, dict[str, Reduced])
        return reduced

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take part; rank 0 reads the file."""
        figures: dict[str, Any] = self.join_call(Call.LOAD, dict[str, Any])
        self.samplers.load(figures.get("samplers"))
        return figures

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state)  # Every rank checks it before any of them waits for another.
        if self.knowledge.last_report is not None:
            self.join_call(Call.LOAD)
        self.samplers.load(state.get("samplers"))

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        """Take part if the model is sharded. Otherwise rank 0 writes the file, and no rank waits for it."""
        if self.work is not None:
            self.join_call(Call.SAVE)

    def export(self, path: str | os.PathLike[str]) -> None:
        self.save(path)

    # -- readings --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        knowledge = self.knowledge
        swarm_samples = knowledge.swarm_samples + knowledge.view.sharers * knowledge.uncounted_samples
        return {
            **knowledge.report.run, "steps": knowledge.steps, "samples": self.trained_on,
            "swarm_samples": swarm_samples, "samplers": self.samplers.state(),
            "finished": knowledge.finished,
        }  # fmt: skip

    @property
    def me(self) -> PeerId:
        return self.knowledge.report.me

    @property
    def address(self) -> str:
        return self.knowledge.report.address

    @property
    def view(self) -> SwarmView:
        return self.knowledge.view

    @property
    def trained_on(self) -> int:
        """Return the samples of all ranks."""
        return self.knowledge.samples + self.knowledge.uncounted_samples

    @property
    def swarm_samples(self) -> int:
        return self.knowledge.swarm_samples

    @property
    def finished(self) -> bool:
        return self.knowledge.finished

    def members(self) -> tuple[Member, ...]:
        return self.knowledge.members()

    def inventory(self) -> Inventory:
        return self.state.inventory()

    def metrics(self) -> Metrics:
        return self.knowledge.metrics()
