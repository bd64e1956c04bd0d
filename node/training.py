"""The training thread's side of a node: its loop's boundary, what is reported, joining, settling, ending."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import nn

from gossip.arithmetic.correction import Correction, spread
from gossip.averaging.boundary import Visit
from gossip.effects import Effect, MemberState
from gossip.errors import FaultError, LayoutError, LocalError
from gossip.ids import MemberRecord, from_hex, quantity
from gossip.peer import Peer
from node import leaving, running
from node.faults import report_to
from node.held_run import OF_OTHERS, HeldRun
from node.loop import StepLoop
from node.model.loss import LastLoss
from node.model.optimizers import Optimizers
from node.model.state import State
from node.network.runtime import Runtime
from node.observe.figures import Reading, Source, known, reading
from node.observe.listeners import Listeners
from node.observe.members import Member
from node.observe.metrics import Metrics
from node.observe.reduced import Figures, Reduced, reduce, settles
from node.service import LEAVE_S, REPORT_S, Service
from node.settings import Settings

__all__ = ["TrainingSide"]

FAREWELL_S = 0.5  # for a newcomer to ask for the next piece of a finished run's weights
CLOSED_PATIENCE = 3.0  # times join_timeout_s, with seeds that accept connections and close them at once
ALONE_S = 1.0  # how old the newest snapshot of a node alone gets, which newcomers are given while its loop stands
LAST_S = 10.0  # and in company, where each exchange takes one
LAST_WORK = 100.0  # times what a copy takes, between two of them
COPY_RATE = 10e9  # bytes a second that a copy may count as, since a GPU's goes on beside the loop
REPLACED = "Another Node over this model was still running in this process, and is closed now."
HERE = MemberState.ALIVE, MemberState.SUSPECT
SETTLED = 1e-4  # |theirs - ours| / |ours| of an exchange that found nothing left to agree on


class TrainingSide(HeldRun):
    """What :class:`node.node.Node` holds: the run, its loop, and the thread that runs the network. All of it is the
    training thread's, but for what is told to that thread by ``thread.call``."""

    def __init__(
        self, model: nn.Module | Mapping[str, Any] | State, optimizers: Optimizers, settings: Settings,
        frozen: bool = False, keep_average: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizers, settings, frozen, keep_average)
        self.loop = StepLoop(self.config, self.boundary, self, REPORT_S)
        self.service = Service(
            settings, self.state, self.boundary, self.pool, self.outer, self.outer_lock, self.wake,
            self.loop.signals, self.figures, self.source,
        )  # fmt: skip
        self.loss = LastLoss()
        self.lost_told = False  # that the loss is no number
        self.overheads: deque[float] = deque(maxlen=512)
        self.optimizer_at = self.viewed_at = -math.inf
        self.own_figures = Figures()  # that others are told
        self.corrected_at = 0  # the steps when the correction was last applied
        self.settled_at: int | None = None  # the steps at which this loop settled last, until it goes on
        self.handler: Any = None

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Run the network, and join: until this node holds weights to train."""
        if self.service.runtime is not None:
            raise LocalError(running.USED)
        self.thread.check()  # before anything of this node is on the wire
        if leaving.asked():
            raise SystemExit(128 + signal.SIGTERM)
        before = running.enter(self)
        if not self.settings.joins:
            self.mix_from_here()
        self.install_handler()
        began = time.monotonic()
        try:
            self.thread.start(self.service)
            if before:
                self.thread.call(self.runtime.on_event, "replaced", REPLACED)
            self.join()
            if self.peer.finished and not self.boundary.lives:
                self.take_final()
            if self.given is not None and not self.boundary.lives:  # or the weights are another run's, or ahead
                self.go_on(self.given, OF_OTHERS, lambda: None)
            self.wait_for_others(began)
        except BaseException:
            self.stop()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """The loop is over, perhaps by this error."""
        self.stop()

    def stop(self) -> None:
        """Say LEFT and stop, in about a second at most. A forked child leaves its parent's node alone."""
        if self.thread.forked:
            return
        if self.service.leaving is not None:
            self.thread.call(self.service.leave)
        self.thread.join(2 * LEAVE_S)
        self.service.listeners.close(LEAVE_S)
        running.leave(self)
        self.loop.reported_at = -math.inf  # a step after this is told so at once
        if self.handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)
            self.handler = None

    def install_handler(self) -> None:
        """SIGTERM leaves the with block; a program with a handler of its own keeps it."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

            def leave(number: int, frame: FrameType | None) -> None:
                raise SystemExit(128 + number)

            self.handler = signal.signal(signal.SIGTERM, leave)

    def join(self) -> None:
        """Until this node holds weights to train: taken from the swarm, or its own."""
        limit_s, began = self.settings.join_or_fail_s, time.monotonic()
        self.service.counts = self.runtime.counts = lambda: (self.steps, self.samples)
        while True:
            self.wake.wait(0.02)
            self.thread.check()
            if self.service.resting:
                raise FaultError(
                    "Could not join: faults of this library end the network side each time that it begins anew. Report "
                    f"the traceback, which the log has, {report_to()}."
                )
            self.visit()
            runtime = self.runtime
            ready, refusal = runtime.peer.ready and not self.boundary.wanted, runtime.doors.refusal
            waited_s = time.monotonic() - began
            # A seed that only closes may be too busy, or a forwarder whose node is down: it is tried for a while.
            patient = waited_s < CLOSED_PATIENCE * self.config.join_timeout_s and not ready
            final = refusal is not None and not (patient if refusal.code == "closed" else ready)
            if final and not runtime.doors.dialling and not len(runtime.links):
                raise LocalError(f"Could not join: {refusal}") from refusal
            if limit_s is not None and waited_s > limit_s and not ready:
                raise LocalError(f"Could not join within {limit_s:g} s: {runtime.doors.why_alone()}.")
            if ready:
                self.begin_alone()
                self.visit()  # and with it a copy for newcomers: until the first step may be long
                self.heard()  # and with the weights the count of what is behind them
                return

    def begin_alone(self) -> None:
        """The weights that are here stay, unless others were adopted: the memory that mixing needs is taken before the
        first step."""
        if not self.begun:
            self.mix_from_here()
            self.runtime.streams.take_memory()

    def mix_from_here(self) -> None:
        """Mixing starts from the weights that are here."""
        self.begun = True
        if not self.outer.plain:
            self.reset_outer()

    def wait_for_others(self, began: float) -> None:
        """Wait until ``settings.wait_for`` members, itself included, hold this node's run, for ``settings.wait_s``
        seconds at most. Only members that have had a link with this node count, because anybody may tell of others.
        Members that come meanwhile are given weights."""
        count, wait_s = self.settings.wait_for, self.settings.wait_s
        while self.peer.counts.holding < count and not self.finished:
            if time.monotonic() - began >= wait_s:
                alive = self.peer.counts.alive
                if self.settings.others is not None and alive < 2:
                    raise LocalError(
                        f"Waited {wait_s:g} s for {count} members that were launched together, and none of the others "
                        f"came to this node at {self.address} ({self.runtime.doors.why_alone()}): it does not train "
                        "alone. Look whether the others run and can reach this address."
                    )
                text = (
                    f"Waited {wait_s:g} s for {quantity(count, 'member')}, of whom {self.peer.counts.holding} are here "
                    "with the weights, this one included: this node goes on with them, and with the others when they "
                    "come."
                )
                self.thread.call(self.runtime.on_event, "waited", text)
                return
            self.wake.wait(0.02)
            self.thread.check()
            self.visit()

    # -- what is looked at -----------------------------------------------------------------------------------------
    @property
    def address(self) -> str:
        return str(self.peer.record.address or "none")

    @property
    def finished(self) -> bool:
        return self.peer.finished

    @property
    def listeners(self) -> Listeners:
        return self.service.listeners

    def members(self) -> tuple[Member, ...]:
        """At most a quarter of a second old, or, where no steps are taken, a second."""
        service = self.service
        if time.monotonic() - service.listed_at > REPORT_S:
            self.thread.call(service.list_members)
            self.heard()
        return service.members

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Tell others these, and look at what they have told."""
        own = self.own_figures
        packed = own.tell(figures, self.peer.genesis, self.swarm_samples)
        records: list[MemberRecord] = []

        def tell() -> None:
            runtime, peer = self.runtime, self.peer
            if figures and peer.genesis == own.run:
                runtime.perform(peer.tell_figures(packed, runtime.now))
            records.extend(peer.sharing())

        self.thread.call(tell)
        self.heard()
        self.thread.check()
        return reduce(own.told, records)

    def metrics(self) -> Metrics:
        return Metrics.of(self.source())

    def source(self) -> Source:
        runtime = self.runtime
        return Source(
            runtime.peer, runtime.links, self.steps, self.samples, self.swarm_samples, runtime.streams.durations,
            self.overheads, self.service.listeners.dropped, runtime.teller.mixes(), self.service.faults.count,
            self.service.faults.restarts,
        )  # fmt: skip

    def figures(self) -> Reading:
        return reading(self.source())

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        """The loop has taken a step with so many samples, and stands at its boundary."""
        start = time.perf_counter()
        self.steps += 1
        self.samples += samples
        if loss is not None:
            self.loss.give(loss)
        if self.outer.correction is not None:
            self.correct(self.outer.correction)
        self.loop.step(self.steps, start + self.service.clock_s)
        if self.config.max_version_gap is not None:
            self.hold()
        self.overheads.append(time.perf_counter() - start)

    def correct(self, correction: Correction) -> None:
        """Take the pull of this node's own data out of its last steps, every few of them. While an exchange teaches
        another correction this waits for the next step."""
        since = self.steps - self.corrected_at
        if since < spread(correction.every) or not self.outer_lock.acquire(blocking=False):
            return
        try:
            rate = self.optimizers.rate
            correction.rate = rate if rate == rate else self.rate
            if correction.pull is not None:
                self.state.add_scaled(correction.pull, correction.part(since), correction.version)
        finally:
            self.outer_lock.release()
        self.corrected_at = self.steps

    def hold(self) -> None:
        """Stay at this boundary while a mix is under way for longer than ``max_version_gap`` allows, and until what it
        brought has landed."""
        self.heard()
        landing = self.loop.lands
        while self.loop.waits(landing):
            landing = True
            self.wake.wait(0.05)
            self.visit()
            self.heard()

    def heard(self) -> None:
        """Wait until the network thread has done what it was told so far: it is never far behind."""
        told = threading.Event()
        if self.thread.call(told.set):
            told.wait(1.0)

    def visit(self) -> None:
        """The step boundary: fulfil the network thread's wishes, and report."""
        self.loop.visit(time.perf_counter() + self.service.clock_s)

    # -- the loop's owner ------------------------------------------------------------------------------------------
    def updated(self, visit: Visit) -> None:
        """A vector that was added has gone back to the pool, which is both threads': the network's is not woken for it
        alone."""
        self.thread.check()
        if visit.copies or any([update.sample is not None for update in visit.updates]):
            self.tell(self.perform_updated, visit)

    def perform_updated(self, visit: Visit) -> None:
        """Tell the newest network side, in the network thread."""
        self.runtime.averager.updated(visit)
        self.service.refresh()  # an exchange moves the number of samples

    def perform_report(self, *report: Any) -> None:
        """Tell the newest network side, in the network thread."""
        self.runtime.at_boundary(*report)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the network thread do this; raises where that is over, since going on alone would be silently wrong."""
        self.thread.check()
        if not self.thread.call(function, *args):
            raise LocalError(running.CLOSED)

    def tell_peer(self, report: Callable[[Peer, float], list[Effect]]) -> None:
        """Have the newest peer told this, and what it decides performed."""

        def tell() -> None:
            runtime = self.runtime
            runtime.perform(report(runtime.peer, runtime.now))

        self.thread.call(tell)

    def report(self, visit: Visit) -> None:
        runtime, now = self.runtime, time.perf_counter()
        if visit.snapshots:
            self.begin_alone()  # or what is mixed with this snapshot would have nothing to start from
        optimizer = None
        if now - self.optimizer_at > 5.0 or (self.optimizers.all and not runtime.peer.gives_optimizer):
            self.optimizer_at = now
            optimizer = self.optimizer_state()
        if now - self.viewed_at > REPORT_S:
            self.viewed_at = now
            self.thread.call(self.service.refresh)
        if self.settled_at is not None and self.steps > self.settled_at:
            self.settled_at = None
            self.tell_settling(False)
        loss = self.loss.read()
        self.tell(self.perform_report, self.steps, self.samples, loss, visit, optimizer)
        self.watch_soundness(runtime)

    def keeps(self) -> bool:
        """Whether it is time for a copy of the weights that serves newcomers while this loop stands. Exchanges leave
        one; for who mixes with nobody it is made now and then, in a hundredth of its time."""
        peer, now = self.runtime.peer, time.monotonic()
        if not (peer.ready and self.begun) or peer.taking:
            return False
        copy_s = max(self.state.copy_s, 4 * self.state.layout.exchanged / COPY_RATE)
        every_s = max(LAST_WORK * copy_s, ALONE_S if peer.alone else LAST_S)
        if now - self.pool.last_at < every_s:
            return False
        self.pool.last_at = now
        return True

    def watch_soundness(self, runtime: Runtime) -> None:
        """Once a report: a loss that is no number is told once, and then the weights are looked at; and those that were
        spoiled may have been mended by the loop. Weights without a loss are looked at when they are to be sent."""
        lost, self.lost_told = self.loss.lost and not self.lost_told, self.loss.lost
        if not runtime.peer.sound:
            if not self.boundary.wanted and self.state.sound():
                self.average.forget()  # it may have taken up what was no number
                self.tell_peer(lambda peer, now: peer.mended(now))
        elif self.loss.lost and not self.state.sound():
            self.tell_peer(lambda peer, now: peer.spoiled(None, now))
        elif lost:
            sentence = f"The loss is not finite (step {self.steps}); the weights still are, and are mixed."
            self.thread.call(runtime.on_event, "loss", sentence)

    def optimizer_state(self) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
        """What newcomers are told of the optimizer; nothing of one that keeps more than is exchanged."""
        try:
            return self.state.optimizer_keys, tuple(self.state.optimizer_scalars().items())
        except LayoutError:
            return (), ()

    # -- ending --------------------------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        """Mix without training until the nodes agree, or for ``seconds``, once all have come or ``wait_s`` are over;
        returns the consensus distance."""
        peer = self.peer
        before, averaged = peer.counts.done, self.average.mixes
        self.settled_at = self.steps
        self.tell_peer(lambda peer, now: peer.settle(True, now))
        if self.meet(wait_s):
            before = self.peer.counts.done  # what was agreed on without those who came last is no agreement
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.wake.wait(0.02)
            self.visit()
            if self.peer is not peer:  # after a fault, and it counts from the beginning
                peer, before = self.peer, 0
            if peer.counts.done - before >= 3 and peer.agreement() < SETTLED:
                break
        with self.outer_lock:
            self.outer.rest()  # or an exchange that ends from here on would add the momentum to this node alone
        self.tell_peer(lambda peer, now: peer.settle(False, now))
        self.finish_exchanges(min(1.0, seconds))
        self.thread.call(self.service.settled)
        self.heard()
        self.average.settled(averaged)
        if not self.outer.plain:
            self.reset_outer()
        distance: float | None = known(self.peer.consensus_distance)
        return distance

    def meet(self, wait_s: float) -> bool:
        """Say that this loop stands here, and mix until every other member has come, has finished or is gone, for
        ``wait_s`` at most: it is their word, and one that lies or never comes costs no more. Returns whether anybody
        was waited for."""
        until, looked_at, waited = time.monotonic() + wait_s, -math.inf, False
        missing: int | None = 0
        self.tell_settling(True)
        while (now := time.monotonic()) < until:
            if now - looked_at >= REPORT_S:
                looked_at, missing = now, self.missing()
                if missing == 0:
                    return waited
                waited = True
            self.wake.wait(0.02)
            self.visit()
        if missing:
            others = quantity(missing, "member") + (" that has" if missing == 1 else " that have")
            text = f"Waited {wait_s:g} s to settle with {others} not come: this node settles without."
            self.thread.call(self.runtime.on_event, "waited", text)
        return waited

    def missing(self) -> int | None:
        """Members of this run that are neither at their meeting point nor at the run's end, suspected ones among them,
        as slow machines are; None where the network's thread is too busy to say."""
        found: list[list[tuple[MemberRecord, MemberState]]] = []
        self.tell_settling(True)  # again: what was told goes with a run that is given up for another
        self.thread.call(lambda: found.append(self.peer.members()))
        self.heard()
        self.thread.check()
        if not found:
            return None
        run = self.peer.genesis
        here = [one for one, state in found[0] if state in HERE and one.ready and one.genesis == run]
        return sum(not (record.finished or settles(record)) for record in here)

    def tell_settling(self, on: bool) -> None:
        """Until the loop takes a step again, so that who comes later finds it said."""
        packed = self.own_figures.settle(on, self.peer.genesis, self.swarm_samples)
        self.tell_peer(lambda peer, now: peer.tell_figures(packed, now))

    def finish_exchanges(self, seconds: float) -> None:
        """Let those under way land, so that what is evaluated or saved is what the partners have too."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.wake.wait(0.005)
            self.visit()
            if self.peer.idle and not self.boundary.owed and not self.boundary.wanted:
                return

    def finish(self, seconds: float) -> None:
        """The run is complete; waits while newcomers fetch its weights, for up to ``seconds``."""
        if not self.finished:
            self.thread.call(self.runtime.on_event, "finished", "This run is finished: this node's program said so.")
        self.tell_peer(lambda peer, now: peer.finish(now))
        self.heard()
        self.keep_final()
        if said := self.service.state_dir.finish(self.peer.genesis):
            self.thread.call(self.runtime.on_event, "state", said)
        now = time.monotonic()
        until, quiet_at = now + seconds, now + FAREWELL_S
        while now < until and (now < quiet_at or self.peer.serving):
            self.wake.wait(0.02)
            self.visit()
            now = time.monotonic()
            if not self.peer.finished:  # a fault came between
                self.tell_peer(lambda peer, now: peer.finish(now))
            if self.peer.serving:
                quiet_at = now + FAREWELL_S

    def merge(self, run: str) -> None:
        """Take the weights of the run of this name."""
        genesis = from_hex(run)
        if genesis is None:
            raise LocalError(f"{run!r} names no run: give the 32 hexadecimal digits that the notice named.")
        self.tell_peer(lambda peer, now: peer.merge(genesis, now))
