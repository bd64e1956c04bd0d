"""The training loops of all hosts: when steps end in virtual time, and when they are computed (lazy evaluation).

A step depends only on its own model and batch. Its result is needed only when the model is sent or a mix is added to
it. The virtual clock therefore counts steps and leaves them pending. When the first of them is needed, **all steps that
have begun by then are computed in one batched call**. This is exact: mixes change a model only at a step boundary, so
nothing can change a step in progress.

A host visits a boundary when its mix is due, when the network side asks for it, or to report progress. The boundaries
between these visits cost nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import finite
from gossip.averaging.boundary import Visit
from gossip.config import Config
from gossip.effects import Effect
from sim.engine.events import Events
from sim.engine.host import Floats, Host

__all__ = ["REPORT_S", "OneByOne", "Trainer", "Training"]

REPORT_S = 10.0  # interval of progress reports; a node reports at 4 Hz, but only for people who watch it
LOOK_S = 0.1  # polling interval of a loop that waits at a boundary
AHEAD = 32  # step end times drawn at once: 1 KiB a host


class Trainer(Protocol):
    """A trainer that computes steps. If ``lazy``, it accepts steps that have begun but not ended, for many rows."""

    lazy: bool

    def train(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Take the next ``counts[i]`` steps of row ``rows[i]``, in place; both arrays have shape (n,)."""

    def reset(self, row: int) -> None:
        """Forget the optimizer's state of a row whose loop restarts."""

    def mixed(self, row: int) -> None:
        """Note that the shifts of exchanges were added to a row, all of whose steps so far were taken."""

    def joined(self, row: int) -> None:
        """Note that the weights of a row were replaced by those of another run."""

    def learn(
        self, rows: NDArray[np.int64], shifts: Floats, credits: NDArray[np.float64], own_sq: NDArray[np.float64],
        every: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """Update the drift correction with what exchanges taught.

        Args:
            rows: Rows of the models, shape (n,).
            shifts: What the exchanges added to the models, shape (n, parameters).
            credits: Weight of each shift in the correction, shape (n,).
            own_sq: Squared norm of each peer's snapshot, shape (n,).
            every: Local steps in an interval from then on, shape (n,); 0 or None keeps the old number.
        """


class OneByOne:
    """A trainer that calls a function of (index, vector, step) for each step that has ended.

    It is the reference that batched trainers must match.
    """

    lazy = False

    def __init__(self, hosts: list[Host], on_step: Callable[[int, Floats, int], None]) -> None:
        self.hosts, self.on_step = hosts, on_step

    def train(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            host = self.hosts[row]
            for step in range(host.taken - count + 1, host.taken + 1):
                self.on_step(row, host.vector, step)

    def reset(self, row: int) -> None:
        """Do nothing: this trainer has no state."""

    def mixed(self, row: int) -> None:
        """Do nothing: this trainer has no state."""

    def joined(self, row: int) -> None:
        """Do nothing: this trainer has no state."""

    def learn(
        self, rows: NDArray[np.int64], shifts: Floats, credits: NDArray[np.float64], own_sq: NDArray[np.float64],
        every: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """Do nothing: this trainer has no state."""


class Training:
    """The training loops of all hosts. Without a trainer, models change only through mixes.

    ``perform(host, effects)`` is the swarm's method.
    """

    def __init__(
        self, events: Events, hosts: list[Host], config: Config, perform: Callable[[Host, list[Effect]], None],
        trainer: Trainer | None,
    ) -> None:  # fmt: skip
        self.events, self.hosts, self.perform, self.trainer = events, hosts, perform, trainer
        self.by_steps = config.interval_steps is not None
        self.lockstep = config.max_version_gap is not None
        # A due mix of a pair takes its snapshot before it is requested. A push cannot, since its snapshot takes mass.
        self.ahead = config.paired
        self.steps = 0  # steps of all peers that have been counted
        self.arm: Callable[[Host], None]  # arms a host's timer; set by the swarm

    # -- the clock -----------------------------------------------------------------------------------------------
    def begin(self, host: Host, first_end: float) -> None:
        """Start the host's training loop, whose first step ends at ``first_end``."""
        host.ends.append(first_end)
        host.reported_at = self.events.now
        self.plan(host)

    def extend(self, host: Host) -> None:
        """Draw the end times of further steps, and drop past ones except the last."""
        if host.cursor > AHEAD:
            del host.ends[: host.cursor - 1]
            host.cursor = 1
        ends, when = host.ends, host.ends[-1]
        for step_s in host.times(AHEAD).tolist():
            when += step_s
            ends.append(when)

    def passed(self, host: Host, when: float) -> int:
        """Return how many steps have ended since the cursor."""
        while host.ends[-1] <= when:
            self.extend(host)
        return bisect_right(host.ends, when, host.cursor) - host.cursor

    def plan(self, host: Host) -> None:
        """Schedule the next boundary at which there is work; this voids a visit scheduled for later."""
        if host.waiting is not None:
            self.stand(host)
            return
        ends, at = host.ends, host.cursor
        if at >= len(ends):
            self.extend(host)
            ends, at = host.ends, host.cursor
        if host.boundary.wanted or not host.ready:
            when = ends[at]
        else:
            when = host.reported_at + REPORT_S
            while ends[-1] <= when:
                self.extend(host)
            at = host.cursor
            when = ends[bisect_right(ends, when, at)]
            peer = host.peer
            if self.by_steps and not peer.initiator.is_blocked:
                due = at + max(peer.initiator.due_steps - host.steps - 1, 0)
                if due < len(ends) and ends[due] < when:
                    when = ends[due]
        if when < host.visit_at or host.visit_at <= self.events.now:
            self.visit(host, when)

    def stand(self, host: Host) -> None:
        """Schedule the next poll of a waiting loop: at once if there is work, else after the polling interval."""
        assert host.waiting is not None
        now = self.events.now
        when = now if host.boundary.wanted or not host.peer.view.is_held else next_look(host.waiting[0], now)
        if when < host.visit_at or host.visit_at <= now:
            self.visit(host, when)

    def visit(self, host: Host, when: float) -> None:
        host.visit_at = when
        self.events.push(when, self.on_boundary, host, when)

    def wish(self, host: Host) -> None:
        """Schedule a visit to the next boundary, at the network side's request."""
        if host.waiting is not None:
            self.stand(host)
            return
        when = host.ends[host.cursor + self.passed(host, self.events.now)]
        if when < host.visit_at:
            self.visit(host, when)

    def released(self, host: Host) -> None:
        """Bring the next visit forward if the end of an exchange makes the next mix due before it."""
        peer = host.peer
        if host.waiting is not None:
            self.stand(host)
            return
        if not self.by_steps or not host.ready or peer.initiator.is_blocked or host.visit_at <= self.events.now:
            return
        passed = self.passed(host, self.events.now)
        due = host.cursor + max(peer.initiator.due_steps - host.steps - 1, passed)
        if due < len(host.ends) and host.ends[due] < host.visit_at:
            self.visit(host, host.ends[due])

    def count(self, host: Host, when: float) -> None:
        """Count the steps that have ended."""
        passed = self.passed(host, when)
        host.cursor += passed
        if host.ready or trains(host):
            host.steps += passed
            self.steps += passed
            if host.timeline is not None:
                for back in range(passed, 0, -1):
                    end_s = host.ends[host.cursor - back]
                    host.timeline.stepped(host.steps - back + 1, end_s, end_s)

    def seen(self, host: Host) -> None:
        """Tell the peer its step count and when its loop was last at a boundary; its answers to partners need both."""
        self.count(host, self.events.now)
        peer = host.peer
        if host.cursor:
            last = host.ends[host.cursor - 1] if host.waiting is None else self.events.now
            peer.note_boundary(last)
        peer.update_counts(host.steps, host.steps * host.samples_per_step)

    # -- a boundary ----------------------------------------------------------------------------------------------
    def on_boundary(self, host: Host, when: float) -> None:
        """Visit a step boundary as a node's training loop does: take snapshots, add mixes and report progress."""
        if when != host.visit_at or host.gone:
            return
        peer, now, boundary = host.peer, self.events.now, host.boundary
        self.count(host, now)
        ready, host.ready = peer.view.ready, trains(host)
        due = self.by_steps and ready and not peer.initiator.is_blocked and host.steps >= peer.initiator.due_steps
        report = due or now - host.reported_at > REPORT_S or not ready
        spare = due and self.ahead and peer.initiator.mix_at <= now
        host.visiting = True
        visited = self.visit_boundary(host, spare) if boundary.wanted or spare else None
        if report or (visited is not None and not visited.updates_alone):
            host.reported_at = now
            host.averager.visited(visited, host.steps, host.steps * host.samples_per_step, None)
            if not peer.view.sound and not boundary.wanted:
                self.look(host)
            host.ready = trains(host)
        elif visited is not None:
            host.averager.updated(visited)
        if self.lockstep:
            self.hold(host)
        self.plan(host)
        host.visiting = False
        self.arm(host)

    def visit_boundary(self, host: Host, spare: bool) -> Visit:
        self.need(host)  # needed also when weights are adopted, so that batches and optimizer continue from here
        if spare:
            host.averager.expect(host.peer.exchanges.next_part)
        visit = host.boundary.visit(host.averager.replaced, spare)
        if self.trainer is not None:
            if visit.updates:
                self.trainer.mixed(host.row)
                row = np.array([host.row])
                for shift, counts, own_sq, every in host.lessons():
                    self.trainer.learn(row, shift[None], np.array([counts]), np.array([own_sq]), np.array([every]))
            if visit.restored or visit.adopted:
                self.trainer.joined(host.row)
        if host.timeline is not None:
            copies, updates = len(visit.snapshots) + (visit.spare is not None), len(visit.updates)
            host.timeline.visited(self.events.now, copies=copies, updates=updates, adopted=visit.adopted)
        return visit

    def recall(self, host: Host) -> bool:
        """Return True if the vector is still the model of the last boundary, so that it can be copied during a step.

        If the step in progress was computed already, the copy must wait for the next boundary.
        """
        self.seen(host)
        if host.taken > host.steps:
            return False
        self.catch_up(host)
        return True

    def look(self, host: Host) -> None:
        """Report to the peer if its weights, which were not finite, have become finite again."""
        self.need(host)
        if finite(host.vector):
            self.perform(host, host.peer.on_mended(self.events.now))

    def hold(self, host: Host) -> None:
        """Stop the loop at this boundary while its peer is held, and postpone the remaining step ends by the wait."""
        now = self.events.now
        if host.waiting is None and host.peer.view.is_held:
            host.waiting = now, host.ends[host.cursor :]
            del host.ends[host.cursor :]
            host.ends.append(math.inf)
        elif host.waiting is not None and not host.peer.view.is_held:
            since, ends = host.waiting
            host.waiting = None
            if host.timeline is not None:
                host.timeline.spent("waits for a mix", since, now)
            host.ends[host.cursor :] = [end + (now - since) for end in ends]

    # -- steps ---------------------------------------------------------------------------------------------------
    def need(self, host: Host) -> None:
        """Bring the vector up to date; a lazy trainer also computes all other hosts' steps that have begun."""
        if self.trainer is None or host.taken >= host.steps:
            return
        if self.trainer.lazy:
            self.compute(self.events.now)
        else:
            self.catch_up(host)
        assert host.taken == host.steps, "a step that has not ended was computed for a host whose model changes"

    def catch_up(self, host: Host) -> None:
        missing = host.steps - host.taken
        if missing > 0 and self.trainer is not None:
            host.taken = host.steps
            self.trainer.train(np.array([host.row]), np.array([missing]))

    def compute(self, now: float) -> None:
        """Compute all steps that have begun, except for a host that is at a boundary.

        The visit to the boundary may change that host's model before its next step.
        """
        assert self.trainer is not None
        rows: list[int] = []
        counts: list[int] = []
        for host in self.hosts:
            if host.gone or not host.ready:
                continue
            ends = host.ends
            if ends[-1] <= now:
                self.passed(host, now)
            if host.waiting is not None:
                begun = host.steps
            elif host.visit_at <= now:
                begun = host.steps + bisect_right(ends, host.visit_at, host.cursor) - host.cursor
            else:
                begun = host.steps + bisect_right(ends, now, host.cursor) - host.cursor + 1
            missing = begun - host.taken
            if missing > 0:
                rows.append(host.row)
                counts.append(missing)
                host.taken = begun
        if rows:
            self.trainer.train(np.array(rows), np.array(counts))

    def end(self, host: Host) -> None:
        """End the loop in the middle of a step, but compute this step.

        A lazy trainer may have computed it already. If it is always computed, the next life's batches are
        reproducible.
        """
        self.count(host, self.events.now)
        if self.trainer is not None and host.ready and host.waiting is None:
            host.steps += 1
            self.catch_up(host)

    def settle(self, now: float) -> None:
        """Bring all vectors up to date for measurement; a lazy trainer adds the steps in progress."""
        for host in self.hosts:
            if not host.gone:
                self.count(host, now)
        if self.trainer is not None and self.trainer.lazy:
            self.compute(now)
        elif self.trainer is not None:
            for host in self.hosts:
                if not host.gone:
                    self.catch_up(host)


def trains(host: Host) -> bool:
    """Return True if the loop takes steps: it has weights, even if they are not finite, which it cannot see."""
    return host.peer.view.ready or not host.peer.view.sound


def next_look(since: float, now: float) -> float:
    """Return the next poll time, after ``now``, of a loop that has waited at a boundary from ``since`` on."""
    look = since + LOOK_S * (math.floor((now - since) / LOOK_S) + 1)
    return look if look > now else look + LOOK_S  # if now is a poll time, rounding may give now again
