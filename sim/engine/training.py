"""The training loops of all hosts: when steps end, and when they are computed.

A step depends on nothing but its own model and batch, so its result is not needed before somebody looks: to send the
model, or to add what came from others. Steps are counted by the clock and left pending; the first time one of them is
needed, **all steps that have begun by then are computed in one batched call**. That is exact and not an approximation,
because a model is changed by others at a step boundary alone, and a step in progress cannot be changed any more.

A host visits its boundary when its mix is due, when the network has a wish, or to report that it is alive, as a node's
training loop does; the boundaries between them cost nothing.
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

REPORT_S = 10.0  # a node reports four times a second, for people: here progress is told no more often than this
LOOK_S = 0.1  # how often one who waits at a boundary looks round
AHEAD = 32  # ends of steps drawn at once: 1 KiB a host


class Trainer(Protocol):
    """Computes steps. ``lazy``: may be asked for steps that have begun and not ended, many rows at once."""

    lazy: bool

    def train(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Row ``rows[i]`` takes its next ``counts[i]`` steps, in place."""

    def reset(self, row: int) -> None:
        """The loop of this row starts anew: forget the optimizer's state."""

    def mixed(self, row: int) -> None:
        """What exchanges brought was added to this row, all of whose steps so far were taken."""

    def joined(self, row: int) -> None:
        """The weights of this row were replaced by those of another run."""

    def learn(
        self, rows: NDArray[np.int64], shifts: Floats, credits: NDArray[np.float64], own_sq: NDArray[np.float64],
        every: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """Exchanges brought these shifts, (rows, parameters), which count so far, to models of these squared norms.
        ``every``: local steps in an interval from then on, 0 or None: as many as before."""


class OneByOne:
    """A function of (index, vector, step) for each step, called when the step has ended: the plain way, which the
    batched one must equal."""

    lazy = False

    def __init__(self, hosts: list[Host], on_step: Callable[[int, Floats, int], None]) -> None:
        self.hosts, self.on_step = hosts, on_step

    def train(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            host = self.hosts[row]
            for step in range(host.taken - count + 1, host.taken + 1):
                self.on_step(row, host.vector, step)

    def reset(self, row: int) -> None:
        """Nothing is kept."""

    def mixed(self, row: int) -> None:
        """Nothing is kept."""

    def joined(self, row: int) -> None:
        """Nothing is kept."""

    def learn(
        self, rows: NDArray[np.int64], shifts: Floats, credits: NDArray[np.float64], own_sq: NDArray[np.float64],
        every: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """Nothing is kept."""


class Training:
    """``perform(host, effects)`` is the swarm's. Without a trainer nobody's model changes between mixes."""

    def __init__(
        self, events: Events, hosts: list[Host], config: Config, perform: Callable[[Host, list[Effect]], None],
        trainer: Trainer | None,
    ) -> None:  # fmt: skip
        self.events, self.hosts, self.perform, self.trainer = events, hosts, perform, trainer
        self.by_steps = config.interval_steps is not None
        self.lockstep = config.max_version_gap is not None
        self.ahead = config.paired  # what is pushed is copied when it is asked for: with its mass
        self.steps = 0  # of all peers, as far as they have been counted
        self.arm: Callable[[Host], None]  # the swarm's: a host's timer

    # -- the clock -----------------------------------------------------------------------------------------------
    def begin(self, host: Host, first_end: float) -> None:
        """The loop begins now, and its first step ends then."""
        host.ends.append(first_end)
        host.reported_at = self.events.now
        self.plan(host)

    def extend(self, host: Host) -> None:
        """Draw further ends; those passed go, but for the last."""
        if host.cursor > AHEAD:
            del host.ends[: host.cursor - 1]
            host.cursor = 1
        ends, when = host.ends, host.ends[-1]
        for step_s in host.times(AHEAD).tolist():
            when += step_s
            ends.append(when)

    def passed(self, host: Host, when: float) -> int:
        """How many steps have ended since the cursor."""
        while host.ends[-1] <= when:
            self.extend(host)
        return bisect_right(host.ends, when, host.cursor) - host.cursor

    def plan(self, host: Host) -> None:
        """Schedule the next boundary at which there is something to do; one scheduled for later is forgotten."""
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
            if self.by_steps and not peer.offering:
                due = at + max(peer.due_steps - host.steps - 1, 0)
                if due < len(ends) and ends[due] < when:
                    when = ends[due]
        if when < host.visit_at or host.visit_at <= self.events.now:
            self.visit(host, when)

    def stand(self, host: Host) -> None:
        """One who waits at a boundary looks there again at once for a wish, and else after a while."""
        assert host.waiting is not None
        now = self.events.now
        when = now if host.boundary.wanted or not host.peer.held else next_look(host.waiting[0], now)
        if when < host.visit_at or host.visit_at <= now:
            self.visit(host, when)

    def visit(self, host: Host, when: float) -> None:
        host.visit_at = when
        self.events.push(when, self.on_boundary, host, when)

    def wish(self, host: Host) -> None:
        """The network wants something at the next boundary."""
        if host.waiting is not None:
            self.stand(host)
            return
        when = host.ends[host.cursor + self.passed(host, self.events.now)]
        if when < host.visit_at:
            self.visit(host, when)

    def released(self, host: Host) -> None:
        """An exchange is over: the next mix may be due sooner than it would look."""
        peer = host.peer
        if host.waiting is not None:
            self.stand(host)
            return
        if not self.by_steps or not host.ready or peer.offering or host.visit_at <= self.events.now:
            return
        passed = self.passed(host, self.events.now)
        due = host.cursor + max(peer.due_steps - host.steps - 1, passed)
        if due < len(host.ends) and host.ends[due] < host.visit_at:
            self.visit(host, host.ends[due])

    def count(self, host: Host, when: float) -> None:
        """Count the steps that have ended."""
        passed = self.passed(host, when)
        host.cursor += passed
        if host.ready or trains(host):
            host.steps += passed
            self.steps += passed

    def seen(self, host: Host) -> None:
        """Tell the peer how far its loop is, and when it was last at a boundary: others wait for it, or do not."""
        self.count(host, self.events.now)
        peer = host.peer
        if host.cursor:
            last = host.ends[host.cursor - 1] if host.waiting is None else self.events.now
            peer.at_boundary(last)
        peer.counted(host.steps, host.steps * host.samples_per_step)

    # -- a boundary ----------------------------------------------------------------------------------------------
    def on_boundary(self, host: Host, when: float) -> None:
        """What a node's training loop does between two steps."""
        if when != host.visit_at or host.gone:
            return
        peer, now, boundary = host.peer, self.events.now, host.boundary
        self.count(host, now)
        ready, host.ready = peer.ready, trains(host)
        due = self.by_steps and ready and not peer.offering and host.steps >= peer.due_steps
        report = due or now - host.reported_at > REPORT_S or not ready
        spare = due and self.ahead and peer.mix_at <= now
        host.visiting = True
        visited = self.visit_boundary(host, spare) if boundary.wanted or spare else None
        if report or (visited is not None and not visited.updates_alone):
            host.reported_at = now
            host.averager.visited(visited, host.steps, host.steps * host.samples_per_step, None)
            if not peer.sound and not boundary.wanted:
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
        self.need(host)  # who adopts as well: the batches and the optimizer go on from there
        if spare:
            host.averager.expect(host.peer.next_part)
        visit = host.boundary.visit(host.averager.replaced, spare)
        if self.trainer is not None:
            if visit.updates:
                self.trainer.mixed(host.row)
                row = np.array([host.row])
                for shift, counts, own_sq, every in host.lessons():
                    self.trainer.learn(row, shift[None], np.array([counts]), np.array([own_sq]), np.array([every]))
            if visit.restored or visit.adopted:
                self.trainer.joined(host.row)
        return visit

    def recall(self, host: Host) -> bool:
        """A long step is under way. Whether the model still holds what it held at the last boundary: else the step was
        computed already, and the next boundary is waited for."""
        self.seen(host)
        if host.taken > host.steps:
            return False
        self.catch_up(host)
        return True

    def look(self, host: Host) -> None:
        """Whether a loop has made weights finite again that were spoiled."""
        self.need(host)
        if finite(host.vector):
            self.perform(host, host.peer.mended(self.events.now))

    def hold(self, host: Host) -> None:
        """The loop stands at this boundary for as long as its peer says so: the ends of its steps wait beside it."""
        now = self.events.now
        if host.waiting is None and host.peer.held:
            host.waiting = now, host.ends[host.cursor :]
            del host.ends[host.cursor :]
            host.ends.append(math.inf)
        elif host.waiting is not None and not host.peer.held:
            since, ends = host.waiting
            host.waiting = None
            host.ends[host.cursor :] = [end + (now - since) for end in ends]

    # -- steps ---------------------------------------------------------------------------------------------------
    def need(self, host: Host) -> None:
        """The vector must hold all steps that have ended: compute them, and with them all others that have begun."""
        if self.trainer is None or host.taken >= host.steps:
            return
        if self.trainer.lazy:
            self.compute(self.events.now)
        else:
            self.catch_up(host)
        assert host.taken == host.steps, "a step that has not ended was computed for one whose model changes"

    def catch_up(self, host: Host) -> None:
        missing = host.steps - host.taken
        if missing > 0 and self.trainer is not None:
            host.taken = host.steps
            self.trainer.train(np.array([host.row]), np.array([missing]))

    def compute(self, now: float) -> None:
        """Take all steps that have begun, those of one who stands at a boundary excepted: what it does there may change
        its model first."""
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
        """The loop ends in the middle of a step, which is still computed: else it would depend on who looked whether
        the batches of the next life go on behind it."""
        self.count(host, self.events.now)
        if self.trainer is not None and host.ready and host.waiting is None:
            host.steps += 1
            self.catch_up(host)

    def settle(self, now: float) -> None:
        """All steps up to now are in the vectors, for whoever looks at them; a lazy trainer adds those in progress."""
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
    """Whether the loop takes steps: once it has weights, and be they spoiled, which it does not see by itself."""
    return host.peer.ready or not host.peer.sound


def next_look(since: float, now: float) -> float:
    """When one who waits at a boundary ``since`` then looks round the next time."""
    look = since + LOOK_S * (math.floor((now - since) / LOOK_S) + 1)
    return look if look > now else look + LOOK_S  # now may be the last look, whose quotient was rounded down
