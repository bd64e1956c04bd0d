"""Rank 0 of a node: the training thread's side, whose changes to the model all ranks make together."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from gossip.errors import LocalError
from gossip.ids import PeerId
from node.loop.held_run import OtherRanks
from node.loop.live import LiveModel, Trained
from node.loop.training import TrainingSide
from node.observe.members import SwarmView
from node.ranks.boundary import RanksBoundary
from node.ranks.ranks import MAX_GAP_STEPS, Call, Ranks, StepSummary
from node.ranks.report import SwarmReport
from node.ranks.side import RankSide
from node.settings import Settings

T = TypeVar("T")
SUM_S = 0.01  # Seconds between two all-reduces of counts (`Ranks`), each of which costs the loop some 0.3 ms.
REPORT_AGE_S = 1.0  # The age of members and metrics at which they are sent anew, which stops all ranks at a boundary.
WANTED_S = 10.0  # The time for which they are, after a rank has read them.


class Leader(RankSide, OtherRanks):
    """The training side on rank 0.

    Rank 0 announces in an all-reduce that a change of the model waits. All ranks read that at the same boundary, and
    stop there for the change. So no rank waits for another at a step without a change.
    """

    def __init__(self, trained: Trained, settings: Settings, ranks: Ranks) -> None:
        super().__init__(trained, ranks)
        self.has_replaced_weights = False  # Rank 0's weights were replaced, and the other ranks need a copy of them.
        self.reported_at = 0.0  # The time at which members and metrics were last sent; 0.0: the next report has them.
        self.summed_at = (0.0, 0)  # The time and the step count when the last all-reduce began; 0.0 before the first.
        self.wanted_until = 0.0  # Until when members and metrics are sent anew, since a rank has read them.
        make_boundary = partial(self.part.boundary_class, ranks)
        live = LiveModel(self.part.trained, settings.config, make_boundary, is_single_rank=False)
        assert isinstance(live.boundary, RanksBoundary)
        self.live, self.boundary = live, live.boundary
        self.side = TrainingSide(live, settings, self, self.samplers)
        self.side.owner = self
        self.network, self.run = self.side.network, self.side.run
        self.listeners = self.side.listeners

    # -- life ----------------------------------------------------------------------------------------------------
    def addresses(self) -> dict[int, str]:
        return self.side.addresses()

    def start_side(self) -> None:
        """Check that all ranks train the same model, and start the node while they stand at one boundary."""
        self.part.send_hello(self.side.config.max_version_gap is not None)
        with self.part.starting():
            self.side.start()
        self.has_replaced_weights = True  # The ranks' models may differ before the start.

    def enter(self) -> None:
        """Leave that to the training side, which enters when it starts."""

    def leave(self, error: BaseException | None) -> None:
        if self.network.forked:  # The parent runs the node.
            self.close(error)
        else:
            super().leave(error)

    def close(self, error: BaseException | None = None) -> None:
        try:
            self.ranks.leave(error)
        finally:
            self.side.close(is_handing_over=False)

    # -- readings: those that all ranks know, or, while all stand at a boundary, the newest of rank 0 ----------------
    @property
    def me(self) -> PeerId:
        return self.side.me

    @property
    def address(self) -> str:
        return self.side.address

    @property
    def view(self) -> SwarmView:
        return self.side.service.view if self.ranks.is_standing else super().view

    @property
    def finished(self) -> bool:
        return self.side.finished if self.ranks.is_standing else super().finished

    @property
    def swarm_samples(self) -> int:
        return self.side.swarm_samples if self.ranks.is_standing else super().swarm_samples

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        """Count a step, and visit the boundary with the other ranks if a summary has said so, else alone."""
        start, knowledge, is_lockstep = self.side.begin_step(loss, samples), self.knowledge, self.part.is_lockstep
        knowledge.count_step(samples)
        visit: Callable[[], None] = partial(self.side.loop.step, self.run.steps, start + self.side.service.clock_s)
        if is_lockstep:  # The all-reduce of this same step tells all ranks whether they wait here for a mix.
            visit()
            self.network.sync()
            must_wait = self.side.loop.must_wait(self.side.loop.must_apply_mix)
            knowledge.begin_summary(Call.STEP, self.make_summary(must_wait))
            visit = self.side.wait_for_mix
        summary = self.finish_summary()  # Outside lockstep an earlier step has begun it, so that it is long done.
        if summary is not None and summary.must_stop:
            self.run_at_boundary(self.visit_sharded if self.part.is_sharded else visit)
        elif not is_lockstep:
            visit()
        if not is_lockstep and knowledge.count_boundary():
            knowledge.begin_summary(Call.STEP, self.make_summary())
        self.side.end_step(start)

    def visit_sharded(self) -> None:
        """Visit the boundary, which is open now, without asking whether this step has a reason."""
        self.side.visit()
        if self.part.is_lockstep:
            self.side.wait_for_mix()

    def finish_summary(self) -> StepSummary | None:
        summary = self.knowledge.finish_summary()
        self.run.samples = self.knowledge.samples
        if summary is not None and summary.is_report_wanted:
            self.wanted_until = time.monotonic() + WANTED_S
        return summary

    def make_summary(self, must_wait: bool = False) -> StepSummary:
        """Return rank 0's part of the next all-reduce, which all ranks read about ``SUM_S`` after the last."""
        view, known_view, now = self.side.service.view, self.knowledge.view, time.perf_counter()
        must_stop = must_wait or self.boundary.needs_opening or view.changes != known_view.changes or self.is_report_due
        (last_at, last_steps), self.summed_at = self.summed_at, (now, self.run.steps)
        # As many steps as take SUM_S at the present pace.
        gap_steps = int(SUM_S * (self.run.steps - last_steps) / (now - last_at)) if last_at else 1
        return StepSummary(
            must_stop=must_stop, swarm_samples=view.swarm_samples, own_samples=view.own_samples, sharers=view.sharers,
            finished=self.side.finished, gap_steps=min(max(gap_steps, 1), MAX_GAP_STEPS),
        )  # fmt: skip

    def together(self, call: Call, *arguments: Any) -> Any:
        """Make a call of the training side once all ranks make it; its result or exception goes to all of them."""
        own: dict[Call, Any] = {Call.START: self.start_side, Call.LEAVE: partial(self.side.hand_over, None)}
        action = own.get(call) or getattr(self.side, call.name.lower())
        self.knowledge.wait_for_all(call)
        self.run.samples = self.knowledge.samples
        self.reported_at = 0.0  # The next report then contains members and metrics.
        return self.run_at_boundary(partial(action, *arguments))

    def run_at_boundary(self, action: Callable[[], T]) -> T:
        """Run ``action`` while all ranks stand at this boundary, which is open meanwhile; send them its outcome."""
        ranks, boundary = self.ranks, self.boundary
        result: T | None = None
        error: BaseException | None = None
        with ranks.at_one_boundary():
            boundary.open()
            try:
                result = action()
            except BaseException as raised:
                ranks.check_alive()  # If the channel has failed there is no rank to tell.
                error = raised
            boundary.shut()
            # An update is lost if the other ranks have added it and this rank found no memory for it.
            if self.has_replaced_weights or boundary.has_lost_update:
                self.part.send_all()
                self.has_replaced_weights = boundary.has_lost_update = False
            ranks.send_command("done", (result, portable_error(error), self.make_report()))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @property
    def is_report_due(self) -> bool:
        return self.reported_at + REPORT_AGE_S < time.monotonic() < self.wanted_until

    def make_report(self) -> SwarmReport | None:
        """Return a report for the other ranks, with members and metrics only if wanted; None if the node never ran."""
        if self.side.service.runtime is None:
            return None
        latest = self.knowledge.last_report
        metrics: Mapping[str, Any]
        if latest is None or not self.reported_at or self.is_report_due:
            self.reported_at = time.monotonic()
            members, metrics = self.side.members(), self.side.metrics()
        else:
            members, metrics = latest.members, latest.metrics
        report = SwarmReport(
            self.me, self.address, self.side.view, self.finished, self.run.state_dict(), members, metrics,
        )  # fmt: skip
        self.knowledge.on_report(report)
        return report

    # -- calls of the training side about the other ranks (OtherRanks) -----------------------------------------------
    def on_replaced(self) -> None:
        self.has_replaced_weights = True

    def send_heartbeat(self) -> None:
        self.ranks.send_heartbeat()

    @property
    def uncounted_samples(self) -> int:
        return self.knowledge.uncounted_samples

    # -- the run ---------------------------------------------------------------------------------------------------
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.knowledge.last_report is None:
            self.run.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        if self.part.is_sharded:
            super().save(path, keep)
        else:  # No rank waits for this one.
            self.run.save(path, self.state_dict(), keep)

    def export(self, path: str | os.PathLike[str]) -> None:
        if self.part.is_sharded:
            super().export(path)
        else:
            self.side.export(path)

    def state_dict(self) -> dict[str, Any]:
        state = self.run.state_dict()
        if self.ranks.is_standing:
            return state
        # Replace counts of rank 0 by those that all ranks know.
        uncounted = self.view.sharers * self.uncounted_samples
        return state | {"swarm_samples": self.swarm_samples + uncounted, "members": len(self.view.owners)}


def portable_error(error: BaseException | None) -> LocalError | None:
    """Return the exception that the other ranks raise."""
    if error is None:
        return None
    if isinstance(error, LocalError):
        return type(error)(str(error))
    return LocalError(
        f"Rank 0 of this node's group has ended ({type(error).__name__}: {error}), and this rank with it."
    )
