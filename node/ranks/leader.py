"""Rank 0 of a node: the training thread's side, whose changes to the model all ranks make together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from gossip.averaging.boundary import Update
from gossip.errors import LocalError
from node.held_run import check_state
from node.model.optimizers import Optimizers
from node.model.state import State
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced
from node.ranks.boundary import RanksBoundary
from node.ranks.mirror import Mirror
from node.ranks.ranks import LONGEST_GAP, Call, Ranks, StepSummary
from node.ranks.report import Known, SwarmReport
from node.settings import Settings
from node.training import TrainingSide

__all__ = ["Leader"]

T = TypeVar("T")
SUM_S = 0.01  # Seconds between two all-reduces, each of which costs the loop some 0.3 ms.
# The age that members and metrics may reach while they are read: each refresh stops all ranks at a boundary.
NEWS_S = 1.0


class Leader(TrainingSide):
    """The training side on rank 0.

    Each all-reduce says whether all ranks are to stop at the boundary where they read it, because a change of the model
    waits there. So no rank waits for another at a step without a change.
    """

    boundary: RanksBoundary

    def __init__(
        self, model: nn.Module | Mapping[str, Any] | State, optimizers: Optimizers, settings: Settings, ranks: Ranks,
        frozen: bool = False, keep_average: bool = False,
    ) -> None:  # fmt: skip
        self.ranks, self.size, self.known = ranks, ranks.size, Known(ranks)
        self.swapped = False  # Other weights have replaced those of this node.
        self.news_at = 0.0
        self.announced_at = (0.0, 0)  # when, and at which step
        self.asked = False  # by some rank, for what is not said at each step
        super().__init__(model, optimizers, settings, frozen, keep_average)
        self.mirror = Mirror(self.state, optimizers, ranks)

    def make_boundary(self, *parts: Any) -> RanksBoundary:
        return RanksBoundary(self.ranks, *parts)

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.ranks.open()
        try:
            self.together(Call.START, self.begin)
        except BaseException as error:
            self.close(error)  # Another rank may have refused to start.
            raise

    def begin(self) -> None:
        keys = [type(one).__name__ for one in self.optimizers.all]
        self.ranks.tell("hello", (self.state.layout.fingerprint, keys, self.lockstep))
        super().start()
        self.swapped = True  # The ranks' models may differ before the start.

    def close(self, error: BaseException | None = None) -> None:
        try:
            self.ranks.leave(error)
        finally:
            self.stop()

    @property
    def lockstep(self) -> bool:
        return self.config.max_version_gap is not None

    # -- what is looked at: what all ranks know, but where this one speaks for them ----------------------------------
    @property
    def view(self) -> SwarmView:
        return self.service.view if self.ranks.standing else self.known.view

    @property
    def finished(self) -> bool:
        return super().finished if self.ranks.standing else self.known.finished

    @property
    def swarm_samples(self) -> int:
        return super().swarm_samples if self.ranks.standing else self.known.swarm_samples

    @property
    def trained_on(self) -> int:
        return self.samples + self.known.ahead

    def members(self) -> tuple[Member, ...]:
        return self.known.members()

    def metrics(self) -> Metrics:
        return self.known.metrics()

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        start, known = time.perf_counter(), self.known
        self.steps += 1
        known.trained(samples)
        if loss is not None:
            self.loss.give(loss)
        visit: Callable[[], None] = partial(self.loop.step, self.steps, start + self.service.clock_s)
        if self.lockstep:
            visit()
            self.heard()
            known.say(Call.STEP, self.announced(self.loop.waits(self.loop.lands)))
            visit = self.hold
        told = self.look()
        if told is not None and told.stop:
            self.stand(visit)
        elif not self.lockstep:
            visit()
        if not self.lockstep and known.rested():
            known.say(Call.STEP, self.announced())
        self.overheads.append(time.perf_counter() - start)

    def look(self) -> StepSummary | None:
        told = self.known.look()
        self.samples = self.known.samples
        self.asked |= told is not None and told.asked
        return told

    def announced(self, waits: bool = False) -> StepSummary:
        view, known, now = self.service.view, self.known.view, time.perf_counter()
        stop = waits or bool(self.boundary.waiting) or view.changes != known.changes or self.news_due
        (before, steps), self.announced_at = self.announced_at, (now, self.steps)
        gap = int(SUM_S * (self.steps - steps) / (now - before)) if before else 1
        return StepSummary(
            stop=stop, swarm_samples=view.swarm_samples, own_samples=view.own_samples, sharers=view.sharers,
            finished=super().finished, gap=min(max(gap, 1), LONGEST_GAP),
        )  # fmt: skip

    def together(self, call: Call, do: Callable[[], T]) -> T:
        """Run ``do`` at a boundary at which all ranks stand; its result or exception goes to all of them."""
        self.known.meet(call)
        self.samples = self.known.samples
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
            if self.swapped:
                ranks.tell("mirror")
                self.mirror.give()
                self.average.forget()  # that of a checkpoint is not on the other ranks
                self.swapped = False
            ranks.tell("done", (result, portable(error), self.fresh()))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def visit(self) -> None:
        self.ranks.beat()
        super().visit()

    @property
    def news_due(self) -> bool:
        return self.asked and time.monotonic() - self.news_at > NEWS_S

    def fresh(self) -> SwarmReport | None:
        """Return a report for the other ranks; None if this node could not start."""
        if self.service.runtime is None:
            return None
        latest = self.known.latest
        if latest is None or not self.news_at or self.news_due:
            self.news_at = time.monotonic()
            members, metrics = super().members(), super().metrics()
        else:
            members, metrics = latest.members, latest.metrics
        news = SwarmReport(
            self.me, self.address, self.service.view, self.finished, self.passes, super().state_dict(), members, metrics
        )
        self.known.hear(news)
        return news

    # -- the loop's owner ------------------------------------------------------------------------------------------
    def mixed(self, updates: Sequence[Update]) -> None:
        super().mixed(updates)
        self.ranks.tell("mixed")

    def replaced(self, vector: Any) -> None:
        super().replaced(vector)
        self.swapped = True

    # -- calls that all ranks make ---------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        return self.together(Call.SETTLE, partial(super().settle, seconds, wait_s))

    def finish(self, seconds: float) -> None:
        self.together(Call.FINISH, partial(super().finish, seconds))

    def merge(self, run: str) -> None:
        self.together(Call.MERGE, partial(super().merge, run))

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        return self.together(Call.REDUCE, partial(super().reduce, figures))

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        return self.together(Call.LOAD, partial(super().load, path))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.service.runtime is None:
            super().load_state_dict(state)
        else:
            check_state(state, self.state)
            self.together(Call.LOAD, partial(super().load_state_dict, state))

    def go_on(self, meta: Mapping[str, Any], origin: str, put: Callable[[], None]) -> None:
        def put_everywhere() -> None:
            put()
            self.swapped = True

        super().go_on(meta, origin, put_everywhere)

    def state_dict(self) -> dict[str, Any]:
        state, ahead = super().state_dict(), self.known.ahead
        more = self.view.sharers * ahead
        return state | {"samples": state["samples"] + ahead, "swarm_samples": state["swarm_samples"] + more}


def portable(error: BaseException | None) -> LocalError | None:
    """Return the exception that the other ranks raise."""
    if error is None:
        return None
    if isinstance(error, LocalError):
        return type(error)(str(error))
    return LocalError(
        f"Rank 0 of this node's group has ended ({type(error).__name__}: {error}), and this rank with it."
    )
