"""Rank 0 of a node: the training thread's side, whose changes to the model all ranks make together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from gossip.errors import LocalError
from gossip.ids import PeerId
from node.loop.held_run import check_state
from node.loop.live import LiveModel, Trained
from node.loop.ranks.boundary import RanksBoundary, ShardedBoundary
from node.loop.ranks.mirror import Mirror
from node.loop.ranks.ranks import LONGEST_GAP, Call, Ranks, StepSummary
from node.loop.ranks.report import Known, SwarmReport
from node.loop.ranks.sharded import trained_by_all
from node.loop.training import TrainingSide
from node.model.sharded.state import ShardedState
from node.model.snapshot import device_of
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced
from node.settings import Settings

__all__ = ["Leader"]

T = TypeVar("T")
SUM_S = 0.01  # Seconds between two all-reduces, each of which costs the loop some 0.3 ms.
# The age that members and metrics may reach while they are read: each refresh stops all ranks at a boundary.
NEWS_S = 1.0


class Leader:
    """The training side on rank 0.

    Each all-reduce says whether all ranks are to stop at the boundary where they read it, because a change of the model
    waits there. So no rank waits for another at a step without a change.
    """

    rank = 0
    rate = math.nan  # The learning rate that the loop reports. Nodes of several ranks learn no correction from it.

    def __init__(self, trained: Trained, settings: Settings, ranks: Ranks) -> None:
        self.ranks, self.size, self.known = ranks, ranks.size, Known(ranks)
        self.swapped = False  # Other weights have replaced those of this node.
        self.news_at = 0.0
        self.announced_at = (0.0, 0)  # time and step count of the last announcement
        self.asked = False  # True if a rank has read values that are not in the summary
        trained = trained_by_all(trained, ranks)
        # The state that all ranks change together; None if each holds the whole model.
        self.sharded = trained.brought if isinstance(trained.brought, ShardedState) else None
        if self.sharded is not None and settings.memory_dir is not None:
            raise LocalError(
                "memory_dir is for models that are not sharded: the ranks of a sharded model share its vectors in "
                "memory. Leave memory_dir out."
            )
        boundary = RanksBoundary if self.sharded is None else ShardedBoundary
        live = LiveModel(trained, settings.config, partial(boundary, ranks), False, settings.memory_dir)
        assert isinstance(live.boundary, RanksBoundary)
        self.boundary = live.boundary
        self.side = TrainingSide(live, settings, self, self)
        self.live, self.network, self.run = live, self.side.network, self.side.run
        self.average, self.samplers = live.average, self.side.samplers
        self.listeners = self.side.listeners
        self.mirror = Mirror(live.state, live.optimizers, ranks)
        ranks.channel.place = device_of(live.state)

    # -- life ----------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """Return the model, by which a second node over it is found."""
        return self.side.model

    def start(self) -> None:
        self.ranks.open()
        try:
            self.together(Call.START, self.begin)
        except BaseException as error:
            self.close(error)  # Another rank may have refused to start.
            raise

    def begin(self) -> None:
        keys = [type(one).__name__ for one in self.live.optimizers.all]
        sharded, fingerprint = self.sharded, self.live.state.layout.fingerprint
        self.ranks.tell("hello", (fingerprint, keys, self.lockstep, sharded is not None))
        if sharded is None:
            self.side.start(self)
        else:
            sharded.work.begin()
            with sharded.starting():
                self.side.start(self)
        self.swapped = True  # The ranks' models may differ before the start.

    def close(self, error: BaseException | None = None) -> None:
        try:
            self.ranks.leave(error)
        finally:
            self.side.stop()

    @property
    def lockstep(self) -> bool:
        return self.side.config.max_version_gap is not None

    # -- readings: the values that all ranks know, or at a boundary those of this rank -------------------------------
    @property
    def me(self) -> PeerId:
        return self.side.me

    @property
    def address(self) -> str:
        return self.side.address

    @property
    def view(self) -> SwarmView:
        return self.side.service.view if self.ranks.standing else self.known.view

    @property
    def finished(self) -> bool:
        return self.side.finished if self.ranks.standing else self.known.finished

    @property
    def swarm_samples(self) -> int:
        return self.side.swarm_samples if self.ranks.standing else self.known.swarm_samples

    @property
    def trained_on(self) -> int:
        return self.run.samples + self.ahead

    def members(self) -> tuple[Member, ...]:
        return self.known.members()

    def metrics(self) -> Metrics:
        return self.known.metrics()

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        start, known = time.perf_counter(), self.known
        self.run.steps += 1
        known.trained(samples)
        if loss is not None:
            self.side.loss.give(loss)
        visit: Callable[[], None] = partial(self.side.loop.step, self.run.steps, start + self.side.service.clock_s)
        if self.lockstep:
            visit()
            self.network.heard()
            known.say(Call.STEP, self.announced(self.side.loop.waits(self.side.loop.lands)))
            visit = self.side.hold
        summary = self.look()
        if summary is not None and summary.stop:
            self.stand(visit if self.sharded is None else self.visit_sharded)
        elif not self.lockstep:
            visit()
        if not self.lockstep and known.rested():
            known.say(Call.STEP, self.announced())
        self.side.overheads.append(time.perf_counter() - start)

    def visit_sharded(self) -> None:
        """Fulfil what waited for this boundary, whatever the step itself would do here."""
        self.side.visit()
        if self.lockstep:
            self.side.hold()

    def look(self) -> StepSummary | None:
        summary = self.known.look()
        self.run.samples = self.known.samples
        self.asked |= summary is not None and summary.asked
        return summary

    def announced(self, waits: bool = False) -> StepSummary:
        view, known, now = self.side.service.view, self.known.view, time.perf_counter()
        stop = waits or self.boundary.asks or view.changes != known.changes or self.news_due
        (before, steps), self.announced_at = self.announced_at, (now, self.run.steps)
        gap = int(SUM_S * (self.run.steps - steps) / (now - before)) if before else 1
        return StepSummary(
            stop=stop, swarm_samples=view.swarm_samples, own_samples=view.own_samples, sharers=view.sharers,
            finished=self.side.finished, gap=min(max(gap, 1), LONGEST_GAP),
        )  # fmt: skip

    def together(self, call: Call, do: Callable[[], T]) -> T:
        """Run ``do`` at a boundary at which all ranks stand; its result or exception goes to all of them."""
        self.known.meet(call)
        self.run.samples = self.known.samples
        self.news_at = 0.0  # So the next report contains members and metrics.
        return self.stand(do)

    def stand(self, do: Callable[[], T]) -> T:
        ranks, boundary = self.ranks, self.boundary
        result: T | None = None
        error: BaseException | None = None
        with ranks.stand():
            boundary.open()
            try:
                result = do()
            except BaseException as raised:
                ranks.check()  # If the channel has failed there is no rank to tell.
                error = raised
            boundary.shut()
            # If an update was lost, the others have it and this rank found no memory for it.
            if self.sharded is None and (self.swapped or boundary.lost):
                ranks.tell("mirror")
                self.mirror.give()
                self.average.forget()  # the other ranks lack the average of a checkpoint
                self.swapped = boundary.lost = False
            ranks.tell("done", (result, portable(error), self.fresh()))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @property
    def news_due(self) -> bool:
        return self.asked and time.monotonic() - self.news_at > NEWS_S

    def fresh(self) -> SwarmReport | None:
        """Return a report for the other ranks; None if this node could not start."""
        if self.side.service.runtime is None:
            return None
        latest = self.known.latest
        if latest is None or not self.news_at or self.news_due:
            self.news_at = time.monotonic()
            members, metrics = self.side.members(), self.side.metrics()
        else:
            members, metrics = latest.members, latest.metrics
        news = SwarmReport(
            self.me, self.address, self.side.view, self.finished, self.samplers.passes, self.run.state_dict(), members,
            metrics,
        )  # fmt: skip
        self.known.hear(news)
        return news

    # -- messages of the training side to the other ranks -----------------------------------------------------------
    def mixed(self) -> None:
        self.ranks.tell("mixed")

    def replaced(self) -> None:
        self.swapped = True

    def beat(self) -> None:
        self.ranks.beat()

    @property
    def ahead(self) -> int:
        return self.known.ahead

    # -- calls that all ranks make ---------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        return self.together(Call.SETTLE, partial(self.side.settle, seconds, wait_s))

    def finish(self, seconds: float) -> None:
        self.together(Call.FINISH, partial(self.side.finish, seconds))

    def merge(self, run: str) -> None:
        self.together(Call.MERGE, partial(self.side.merge, run))

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        return self.together(Call.REDUCE, partial(self.side.reduce, figures))

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        return self.together(Call.LOAD, partial(self.side.load, path))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.side.service.runtime is None:
            self.run.load_state_dict(state)
        else:
            check_state(state, self.live.state)
            self.together(Call.LOAD, partial(self.side.load_state_dict, state))

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        if self.sharded is None:
            self.run.save(path, self.state_dict(), keep)
        else:  # All ranks give their parts.
            self.together(Call.SAVE, partial(self.run.save, path, None, keep))

    def state_dict(self) -> dict[str, Any]:
        state = self.run.state_dict()
        if self.ranks.standing:
            return state
        # Figures that all ranks know, so that each returns the same state.
        ahead = self.view.sharers * self.ahead
        return state | {"swarm_samples": self.swarm_samples + ahead, "members": len(self.view.owners)}


def portable(error: BaseException | None) -> LocalError | None:
    """Return the exception that the other ranks raise."""
    if error is None:
        return None
    if isinstance(error, LocalError):
        return type(error)(str(error))
    return LocalError(
        f"Rank 0 of this node's group has ended ({type(error).__name__}: {error}), and this rank with it."
    )
