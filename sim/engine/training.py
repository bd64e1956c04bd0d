"""The training loops of all hosts: when steps end in virtual time, and when they are computed (lazy evaluation).

A step depends only on its own model and batch. Its result is needed only when the model is sent or a mix is added to
it. The virtual clock therefore counts steps and leaves them pending. When the first of them is needed, **all steps that
have begun by then are computed in one batched call**. This is exact: mixes change a model only at a step boundary, so
nothing can change a step in progress.

A *boundary* is the end of a step. A host *visits* it when its mix is due, when its averager asks for it, or to report
progress. The boundaries between these visits cost nothing. A loop that is too far ahead of others is *held*: it pauses
at a boundary (``max_version_gap`` of :class:`gossip.Config`).
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

import numpy as np

from gossip.arithmetic.mixing import is_finite
from gossip.averaging.visit import Visit
from gossip.config import Config
from gossip.effects import Effect
from sim.arrays import F64, I64
from sim.engine.events import Events
from sim.engine.host import Floats, Host

REPORT_S = 10.0  # Interval of progress reports; a node reports at 4 Hz, but only for people who watch it.
POLL_S = 0.1  # Interval at which a loop that waits at a boundary looks whether it may go on.
ENDS_AT_ONCE = 32  # Step end times that are drawn in one call: 1 KiB a host.


class Trainer(Protocol):
    """The computation of training steps. Each model is a row of a matrix.

    A trainer that ``is_lazy`` also accepts steps that have begun but not ended, for many rows at once.
    """

    is_lazy: bool

    def train(self, rows: I64, counts: I64) -> None:
        """Take the next ``counts[i]`` steps of row ``rows[i]``, in place; both arrays have shape (n,)."""

    def reset(self, row: int) -> None:
        """Forget the optimizer's state of a row whose loop restarts."""

    def on_weights_replaced(self, row: int) -> None:
        """Handle the replacement of a row's weights by those of another run."""

    def learn_correction(
        self, rows: I64, shifts: Floats, credits: F64, own_sq: F64,
        interval_steps: I64 | None = None,
    ) -> None:  # fmt: skip
        """Update the drift correction with what exchanges taught.

        Args:
            rows: Rows of the models, shape (n,).
            shifts: What the exchanges added to the models, shape (n, parameters).
            credits: Weight of each shift in the correction, shape (n,).
            own_sq: Squared norm of each peer's snapshot, shape (n,).
            interval_steps: Local steps in an interval from then on, shape (n,); 0 or None keeps the old number.
        """


class OneByOne:
    """A trainer that calls ``on_step(index, vector, step)`` for each step that has ended, and keeps no state.

    It is the reference that batched trainers must match.
    """

    is_lazy = False

    def __init__(self, hosts: list[Host], on_step: Callable[[int, Floats, int], None]) -> None:
        self.hosts, self.on_step = hosts, on_step

    def train(self, rows: I64, counts: I64) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            host = self.hosts[row]
            for step in range(host.computed_steps - count + 1, host.computed_steps + 1):
                self.on_step(row, host.vector, step)

    def ignore(self, *_: object, **__: object) -> None:
        """Do nothing."""

    reset = on_weights_replaced = learn_correction = ignore


class Training:
    """The training loops of all hosts. Without a trainer, models change only through mixes.

    ``perform(host, effects)`` and ``arm_timer(host)`` are the swarm's methods.
    """

    def __init__(
        self, events: Events, hosts: list[Host], config: Config, perform: Callable[[Host, list[Effect]], None],
        arm_timer: Callable[[Host], None], trainer: Trainer | None,
    ) -> None:  # fmt: skip
        self.events, self.hosts, self.perform, self.arm_timer = events, hosts, perform, arm_timer
        self.trainer = trainer
        self.mixes_by_steps = config.interval_steps is not None
        self.can_pause = config.max_version_gap is not None  # Only this setting holds loops.
        # A due mix of a pair takes its snapshot before it is requested. A push cannot, since its snapshot takes mass.
        self.copies_ahead = config.paired
        self.steps = 0  # Counted steps of all peers.

    def begin_loop(self, host: Host, first_end: float) -> None:
        """Start the host's training loop, whose first step ends at ``first_end``."""
        host.step_ends.append(first_end)
        host.reported_at = self.events.now
        self.schedule_next_visit(host)

    def end_loop(self, host: Host) -> None:
        """End the loop in the middle of a step, but compute this step.

        A lazy trainer may have computed it already. If it is always computed, the next life's batches are
        reproducible.
        """
        self.count_steps(host, self.events.now)
        if self.trainer is not None and host.is_training and host.pause is None:
            host.steps += 1
            self.compute_counted_steps(host)

    def halt(self, host: Host) -> None:
        """End the loop of a peer that leaves, and keep it at a boundary, where its last mixes find it."""
        self.end_loop(host)
        host.is_leaving = True
        if host.pause is None:
            host.pause = self.events.now, []
            del host.step_ends[host.cursor :]
            host.step_ends.append(math.inf)
        self.schedule_poll(host)

    # -- the clock of steps --------------------------------------------------------------------------------------
    def draw_step_ends(self, host: Host) -> None:
        """Draw the end times of further steps, and drop past ones except the last."""
        if host.cursor > ENDS_AT_ONCE:
            del host.step_ends[: host.cursor - 1]
            host.cursor = 1
        ends, when = host.step_ends, host.step_ends[-1]
        for step_s in host.setup.draw_durations(ENDS_AT_ONCE).tolist():
            when += step_s
            ends.append(when)

    def uncounted_steps(self, host: Host, when: float) -> int:
        """Return how many steps have ended by ``when`` and are not counted yet."""
        while host.step_ends[-1] <= when:
            self.draw_step_ends(host)
        return bisect_right(host.step_ends, when, host.cursor) - host.cursor

    def count_steps(self, host: Host, when: float) -> None:
        """Count the steps that have ended by ``when``, if the loop trains."""
        ended = self.uncounted_steps(host, when)
        host.cursor += ended
        if host.is_training or has_weights(host):
            host.steps += ended
            self.steps += ended
            if host.timeline is not None:
                ends = host.step_ends[host.cursor - ended : host.cursor]
                for step, end_s in enumerate(ends, host.steps - ended + 1):
                    host.timeline.record_step(step, end_s, end_s)

    def report_steps(self, host: Host) -> None:
        """Tell the peer its step count and when its loop was last at a boundary; its answers to partners need both."""
        self.count_steps(host, self.events.now)
        if host.cursor:
            host.peer.note_boundary(host.step_ends[host.cursor - 1] if host.pause is None else self.events.now)
        host.peer.update_counts(host.steps, host.steps * host.setup.samples_per_step)

    # -- when to visit a boundary --------------------------------------------------------------------------------
    def schedule_next_visit(self, host: Host) -> None:
        """Schedule the next boundary at which there is work; this voids a visit scheduled for later."""
        if host.pause is not None:
            self.schedule_poll(host)
            return
        ends = host.step_ends
        if host.cursor >= len(ends):
            self.draw_step_ends(host)
        if host.boundary.has_requests or not host.is_training:
            when = ends[host.cursor]
        else:
            report_at = host.reported_at + REPORT_S
            while ends[-1] <= report_at:
                self.draw_step_ends(host)
            when = ends[bisect_right(ends, report_at, host.cursor)]
            if self.mixes_by_steps and not host.peer.initiator.is_blocked:
                due_index = host.cursor + max(host.peer.initiator.due_steps - host.steps - 1, 0)  # Index in `ends`.
                if due_index < len(ends):
                    when = min(when, ends[due_index])
        if when < host.visit_at or host.visit_at <= self.events.now:
            self.schedule_visit(host, when)

    def schedule_poll(self, host: Host) -> None:
        """Schedule the next poll of a paused loop: at once if there is work, else after the polling interval."""
        assert host.pause is not None
        now = self.events.now
        is_held = host.is_leaving or host.peer.view.is_held
        when = now if host.boundary.has_requests or not is_held else next_poll(host.pause[0], now)
        if when < host.visit_at or host.visit_at <= now:
            self.schedule_visit(host, when)

    def request_visit(self, host: Host) -> None:
        """Schedule a visit to the next boundary, at the averager's request."""
        if host.pause is not None:
            self.schedule_poll(host)
            return
        when = host.step_ends[host.cursor + self.uncounted_steps(host, self.events.now)]
        if when < host.visit_at:
            self.schedule_visit(host, when)

    def on_slot_freed(self, host: Host) -> None:
        """Bring the next visit forward if the end of an exchange makes the next mix due before it."""
        peer, now = host.peer, self.events.now
        if host.pause is not None:
            self.schedule_poll(host)
        elif self.mixes_by_steps and host.is_training and not peer.initiator.is_blocked and host.visit_at > now:
            ended = self.uncounted_steps(host, now)
            due_index = host.cursor + max(peer.initiator.due_steps - host.steps - 1, ended)  # Index in `step_ends`.
            if due_index < len(host.step_ends) and host.step_ends[due_index] < host.visit_at:
                self.schedule_visit(host, host.step_ends[due_index])

    def schedule_visit(self, host: Host, when: float) -> None:
        host.visit_at = when
        self.events.push(when, self.on_boundary, host, when)

    # -- a visit to a boundary -----------------------------------------------------------------------------------
    def on_boundary(self, host: Host, when: float) -> None:
        """Visit a step boundary as a node's training loop does: take snapshots, add mixes and report progress."""
        if when != host.visit_at or host.gone:  # A visit at another time has replaced this one, or the host is dead.
            return
        peer, now, boundary = host.peer, self.events.now, host.boundary
        self.count_steps(host, now)
        is_ready, host.is_training = peer.view.ready, has_weights(host)
        is_due = (
            self.mixes_by_steps
            and is_ready
            and not peer.initiator.is_blocked
            and host.steps >= peer.initiator.due_steps
        )
        reports = is_due or now - host.reported_at > REPORT_S or not is_ready
        takes_spare = is_due and self.copies_ahead and peer.initiator.mix_at <= now
        host.is_visiting = True
        visit = self.visit_boundary(host, takes_spare) if boundary.has_requests or takes_spare else None
        if reports or (visit is not None and not visit.has_only_updates):
            host.reported_at = now
            host.averager.on_visit(visit, host.steps, host.steps * host.setup.samples_per_step, None)
            if not peer.view.sound and not boundary.has_requests:  # The weights were not finite when last looked at.
                self.check_recovery(host)
            host.is_training = has_weights(host)
        elif visit is not None:
            host.averager.use_copies(visit)
        if self.can_pause:
            self.pause_or_resume(host)
        self.schedule_next_visit(host)
        host.is_visiting = False
        self.arm_timer(host)

    def visit_boundary(self, host: Host, takes_spare: bool) -> Visit:
        """Take the requested snapshots, and add mixes or adopt other weights.

        With ``takes_spare`` it also takes the spare copy: the snapshot of a due mix, before the peer requests it.
        """
        # Adopted weights need the pending steps too, so that batches and optimizer continue from here.
        self.compute_pending_steps(host)
        if takes_spare:
            host.averager.prepare_next_part(host.peer.exchanges.next_part)
        visit = host.boundary.visit(host.averager.on_weights_replaced, takes_spare)
        if self.trainer is not None:
            if visit.updates:
                row = np.array([host.row])
                for shift, (credit, own_sq, interval_steps) in host.take_lessons():
                    self.trainer.learn_correction(
                        row, shift[None], np.array([credit]), np.array([own_sq]), np.array([interval_steps])
                    )
            if visit.restored or visit.adopted:
                self.trainer.on_weights_replaced(host.row)
        if host.timeline is not None:
            copies, updates = len(visit.snapshots) + (visit.spare_copy is not None), len(visit.updates)
            host.timeline.record_visit(self.events.now, copies=copies, updates=updates, adopted=visit.adopted)
        return visit

    def check_recovery(self, host: Host) -> None:
        """Report to the peer if its weights, which were not finite, have become finite again."""
        self.compute_pending_steps(host)
        if is_finite(host.vector):
            self.perform(host, host.peer.on_mended(self.events.now))

    def pause_or_resume(self, host: Host) -> None:
        """Pause the loop at this boundary while it is held; afterwards postpone its step ends by the pause."""
        now, is_held = self.events.now, host.is_leaving or host.peer.view.is_held
        if host.pause is None and is_held:
            host.pause = now, host.step_ends[host.cursor :]
            del host.step_ends[host.cursor :]
            host.step_ends.append(math.inf)
        elif host.pause is not None and not is_held:
            since, ends = host.pause
            host.pause = None
            if host.timeline is not None:
                host.timeline.record_time("waits for a mix", since, now)
            host.step_ends[host.cursor :] = [end + (now - since) for end in ends]

    def prepare_copy(self, host: Host) -> bool:
        """Bring the vector to the last boundary, so that it can be copied during a step; return False if it is ahead.

        If the step in progress was computed already, the copy must wait for the next boundary.
        """
        self.report_steps(host)
        if host.computed_steps > host.steps:
            return False
        self.compute_counted_steps(host)
        return True

    # -- the computation of steps --------------------------------------------------------------------------------
    def compute_pending_steps(self, host: Host) -> None:
        """Bring the vector up to date; a lazy trainer also computes all other hosts' steps that have begun."""
        if self.trainer is None or host.computed_steps >= host.steps:
            return
        if self.trainer.is_lazy:
            self.compute_begun_steps(self.events.now)
        else:
            self.compute_counted_steps(host)
        assert host.computed_steps == host.steps, "a step that has not ended was computed for a model that changes"

    def compute_counted_steps(self, host: Host) -> None:
        missing = host.steps - host.computed_steps
        if missing > 0 and self.trainer is not None:
            host.computed_steps = host.steps
            self.trainer.train(np.array([host.row]), np.array([missing]))

    def compute_begun_steps(self, now: float) -> None:
        """Compute all steps that have begun, except for a host that is at a boundary.

        The visit to the boundary may change that host's model before its next step.
        """
        assert self.trainer is not None
        rows: list[int] = []
        counts: list[int] = []
        for host in self.hosts:
            if host.gone or not host.is_training:
                continue
            ends = host.step_ends
            if ends[-1] <= now:
                self.uncounted_steps(host, now)  # Draws the missing end times.
            if host.pause is not None:
                begun = host.steps
            elif host.visit_at <= now:
                begun = host.steps + bisect_right(ends, host.visit_at, host.cursor) - host.cursor
            else:
                begun = host.steps + bisect_right(ends, now, host.cursor) - host.cursor + 1
            missing = begun - host.computed_steps
            if missing > 0:
                rows.append(host.row)
                counts.append(missing)
                host.computed_steps = begun
        if rows:
            self.trainer.train(np.array(rows), np.array(counts))

    def update_models(self, now: float) -> None:
        """Bring all vectors up to date for measurement; a lazy trainer adds the steps in progress."""
        for host in self.hosts:
            if not host.gone:
                self.count_steps(host, now)
        if self.trainer is not None and self.trainer.is_lazy:
            self.compute_begun_steps(now)
        elif self.trainer is not None:
            for host in self.hosts:
                if not host.gone:
                    self.compute_counted_steps(host)


def has_weights(host: Host) -> bool:
    """Return True if the loop takes steps: it has weights, even if they are not finite, which it cannot see."""
    return host.peer.view.ready or not host.peer.view.sound


def next_poll(since: float, now: float) -> float:
    """Return the next poll time, after ``now``, of a loop that has waited at a boundary from ``since`` on."""
    poll_at = since + POLL_S * (math.floor((now - since) / POLL_S) + 1)
    return poll_at if poll_at > now else poll_at + POLL_S  # If now is a poll time, rounding may give now again.
