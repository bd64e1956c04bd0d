"""The other ranks of a node: each applies rank 0's changes to its weights, and knows of the swarm what rank 0 sends."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from gossip.averaging.model import Pending
from gossip.errors import ConfigError, LayoutError, LocalError
from gossip.ids import PeerId
from node import running
from node.data.sampler import Samplers, Sharers
from node.loop.average import Average, Part
from node.loop.held_run import check_state
from node.loop.live import Trained
from node.loop.ranks.boundary import UpdateTold
from node.loop.ranks.mirror import Mirror
from node.loop.ranks.plain import fitting, unreadable
from node.loop.ranks.ranks import Call, Ranks
from node.loop.ranks.report import Known, SwarmReport
from node.loop.ranks.sharded import carry_out, trained_by_all
from node.model.sharded.state import ShardedState
from node.model.snapshot import device_of
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced

__all__ = ["Follower"]


class Follower:
    """The counterpart of :class:`node.loop.training.TrainingSide` on ranks other than 0.

    :class:`node.node.Node` holds it. It has no thread, identity or settings: those belong to rank 0.
    """

    rate = math.nan  # The learning rate that the loop reports. Nodes of several ranks learn no correction from it.

    def __init__(self, trained: Trained, ranks: Ranks) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        trained = trained_by_all(trained, ranks)
        self.model, self.optimizers = trained.model, trained.optimizers
        self.state = trained.state()
        # This rank's part of a sharded model; None if it holds the whole.
        self.work = self.state.work if isinstance(self.state, ShardedState) else None
        self.average = Average(self.state, trained.keep_average)
        self.mirror = Mirror(self.state, self.optimizers, ranks)
        ranks.channel.place = device_of(self.state)
        self.known = Known(ranks)
        self.lockstep = False
        self.listeners = Listeners(lambda: self.me.hex())  # Never called: events are reported on rank 0.
        self.samplers = Samplers(Sharers.of(self))
        self.vector = np.empty(0, np.float32)  # The vector of the last change.
        self.pending: Pending | None = None  # The copy of the last change, until it is done.
        self.changed: list[Part] = []  # The parts that have changed at this boundary.

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.ranks.open()
        running.enter(self)
        try:
            self.together(Call.START)
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        running.leave(self)
        self.ranks.leave(error)

    # -- the loop ------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        known = self.known
        known.trained(samples)
        if self.lockstep:
            known.say(Call.STEP)
        told = known.look()
        if told is not None and told.stop:
            self.follow()
        if not self.lockstep and known.rested():
            known.say(Call.STEP)

    def together(self, call: Call, hint: Any = Any) -> Any:
        """Take part in a call that rank 0 makes.

        Returns:
            Rank 0's result, which must fit ``hint``.

        Raises:
            LocalError: Rank 0 raised it, too.
        """
        self.known.meet(call)
        return self.follow(hint)

    def follow(self, hint: Any = Any) -> Any:
        """Carry out rank 0's commands until it ends the boundary."""
        ranks = self.ranks
        with ranks.stand():
            while True:
                word = ranks.hear()
                match word.kind:
                    case "hello":
                        self.compare(fitting(word.what, tuple[str, list[str], bool, bool]))
                    case _ if self.work is not None and carry_out(word, self.work, self.optimizers):
                        continue
                    case "change" if self.work is None:
                        self.change(fitting(word.what, UpdateTold))
                    case "mixed":
                        self.optimizers.mixed()
                        self.average.mixed(self.changed)
                        self.changed = []
                    case "mirror" if self.work is None:
                        self.mirror.take()
                        self.average.forget()
                        self.changed = []
                    case "done":
                        result, error, news = fitting(word.what, tuple[Any, LocalError | None, SwarmReport | None])
                        if news is not None:  # None if rank 0 could not start.
                            self.known.hear(news)
                            self.samplers.passes = news.passes
                        break
                    case "wait":
                        continue  # Rank 0 waits for its swarm.
                    case _:
                        raise unreadable(f"a command {word.kind[:20]!r}")
        if error is not None:
            raise error
        return fitting(result, hint)

    def compare(self, hello: tuple[str, list[str], bool, bool]) -> None:
        """Check that this rank trains the same model with the same kinds of optimizers as rank 0."""
        fingerprint, kinds, self.lockstep, sharded = hello
        ours = [type(one).__name__ for one in self.optimizers.all]
        if fingerprint != self.state.layout.fingerprint:
            raise LayoutError(
                f"Rank {self.ranks.rank} holds another model than rank 0 of its group: make the same one on every rank."
            )
        if sharded != (self.work is not None):
            raise LayoutError(
                f"Rank {self.ranks.rank} holds a {'whole' if sharded else 'sharded'} model and rank 0 of its group a "
                f"{'sharded' if sharded else 'whole'} one: shard it on all of them, over the processes of group=."
            )
        if kinds != ours:
            raise ConfigError(
                f"Rank {self.ranks.rank} gives Node the optimizers {ours} and rank 0 of its group {kinds}: give every "
                "rank the same."
            )
        if self.work is not None:
            self.work.begin()

    def change(self, change: UpdateTold) -> None:
        """Apply an exchange's change by the same arithmetic as rank 0."""
        while self.pending is not None and not self.pending.done():
            time.sleep(1e-4)
        if not change.fits(self.state.layout):
            raise unreadable(f"a change of {change.elements} elements")
        if self.vector.size != change.elements:
            self.vector = self.state.buffer(change.elements)
        self.ranks.send(self.vector)
        if change.at:
            positions = np.empty(change.elements, np.int64)
            self.ranks.send(positions)
            inside = positions.size == 0 or 0 <= positions[0] <= positions[-1] < self.state.layout.exchanged
            if not inside or (np.diff(positions) <= 0).any():
                raise unreadable("a change at positions outside the model")
            self.pending = self.state.add_at(self.vector, positions)
            self.changed.append(positions)
            return
        self.changed.append(None)
        if change.ratio is not None:
            self.pending = self.state.merge(self.vector, change.ratio)
        else:
            self.pending = self.state.add(self.vector)

    # -- calls that all ranks make ---------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        averaged = self.average.mixes
        distance: float | None = self.together(Call.SETTLE, float | None)
        self.average.settled(averaged)
        return distance

    def finish(self, seconds: float) -> None:
        self.together(Call.FINISH)

    def merge(self, run: str) -> None:
        self.together(Call.MERGE)

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Take part; rank 0 sends the figures."""
        reduced: dict[str, Reduced] = self.together(Call.REDUCE, dict[str, Reduced])
        return reduced

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take part; rank 0 reads the file."""
        figures: dict[str, Any] = self.together(Call.LOAD, dict[str, Any])
        self.samplers.load(figures.get("samplers"))
        return figures

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state)  # Checked on every rank alike, before any of them waits for another.
        if self.known.latest is not None:
            self.together(Call.LOAD)
        self.samplers.load(state.get("samplers"))

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        """Take part if the model is sharded. Otherwise rank 0 writes the file, and no rank waits for it."""
        if self.work is not None:
            self.together(Call.SAVE)

    # -- readings --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        known = self.known
        return {
            **known.news.run, "steps": known.steps, "samples": self.trained_on,
            "swarm_samples": known.swarm_samples + known.view.sharers * known.ahead, "passes": self.samplers.passes,
            "samplers": self.samplers.state(), "finished": known.finished,
        }  # fmt: skip

    @property
    def me(self) -> PeerId:
        return self.known.news.me

    @property
    def address(self) -> str:
        return self.known.news.address

    @property
    def view(self) -> SwarmView:
        return self.known.view

    @property
    def trained_on(self) -> int:
        """Return the samples of all ranks."""
        return self.known.samples + self.known.ahead

    @property
    def swarm_samples(self) -> int:
        return self.known.swarm_samples

    @property
    def finished(self) -> bool:
        return self.known.finished

    def members(self) -> tuple[Member, ...]:
        return self.known.members()

    def metrics(self) -> Metrics:
        return self.known.metrics()
