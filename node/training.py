"""The training thread's side of a node: step boundary, reports, joining, settling, ending."""

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
from node.observe.timeline import LoopTimeline
from node.service import LEAVE_S, REPORT_S, Service
from node.settings import Settings

__all__ = ["TrainingSide"]

FAREWELL_S = 0.5  # For a newcomer to request the next piece of a finished run's weights.
CLOSED_PATIENCE = 3.0  # Times join_timeout_s, for seeds that accept connections and close them at once.
ALONE_S = 1.0  # The age limit of a lone node's newest snapshot, which newcomers get while its loop is idle.
LAST_S = 10.0  # The same with other members, where each exchange takes a snapshot.
LAST_WORK = 100.0  # The least interval between two copies, as a multiple of a copy's duration.
COPY_RATE = 10e9  # The most bytes a second that a copy may count as, since a GPU's copy overlaps with the loop.
REPLACED = "Another Node over this model was still running in this process, and is closed now."
HERE = MemberState.ALIVE, MemberState.SUSPECT
SETTLED = 1e-4  # |theirs - ours| / |ours| below which nodes agree.


class TrainingSide(HeldRun):
    """The run, the loop and the network thread behind :class:`node.node.Node`.

    The training thread owns all of it. The network thread runs what ``thread.call`` passes to it.
    """

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
        self.lost_told = False  # Whether a loss that is not finite was reported.
        self.overheads: deque[float] = deque(maxlen=512)
        self.optimizer_at = self.viewed_at = -math.inf
        self.own_figures = Figures()  # The figures that other members are told.
        self.corrected_at = 0  # The step count when the correction was last applied.
        self.settled_at: int | None = None  # The step count at which this loop settled, until it continues.
        self.handler: Any = None
        self.timeline = None if settings.trace is None else LoopTimeline(settings.trace, self.service.listeners)

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Run the network, and join: return when this node holds weights to train."""
        if self.service.runtime is not None:
            raise LocalError(running.USED)
        self.thread.check()  # Before the node appears on the network.
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
            if self.timeline is not None:
                self.timeline.start(self.me.hex())
            self.join()
            if self.peer.view.finished and not self.boundary.lives:
                self.take_final()
            # Otherwise the weights are another run's, or ahead.
            if self.given is not None and not self.boundary.lives:
                self.go_on(self.given, OF_OTHERS, lambda: None)
            self.wait_for_others(began)
            if self.timeline is not None:
                self.timeline.spent("join", time.monotonic() - began)
        except BaseException:
            self.stop()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End the node after the loop, which may have ended with this error."""
        self.stop()

    def stop(self) -> None:
        """Say LEFT and stop, within about a second. A forked child leaves its parent's node alone."""
        if self.thread.forked:
            return
        if self.service.leaving is not None:
            self.thread.call(self.service.leave)
        self.thread.join(2 * LEAVE_S)
        self.service.listeners.close(LEAVE_S)
        if self.timeline is not None:
            self.timeline.close()
        running.leave(self)
        self.loop.reported_at = -math.inf  # A later step reports at once that the node is closed.
        if self.handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)
            self.handler = None

    def install_handler(self) -> None:
        """Make SIGTERM leave the with block, unless the program has a handler of its own."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

            def leave(number: int, frame: FrameType | None) -> None:
                raise SystemExit(128 + number)

            self.handler = signal.signal(signal.SIGTERM, leave)

    def join(self) -> None:
        """Wait until this node holds weights to train: taken from the swarm, or its own."""
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
            ready, refusal = runtime.peer.view.ready and not self.boundary.wanted, runtime.doors.refusal
            waited_s = time.monotonic() - began
            # A seed that only closes connections may be busy, or a forwarder whose node is down: retry it for a while.
            patient = waited_s < CLOSED_PATIENCE * self.config.join_timeout_s and not ready
            final = refusal is not None and not (patient if refusal.code == "closed" else ready)
            if final and not runtime.doors.dialling and not len(runtime.links):
                raise LocalError(f"Could not join: {refusal}") from refusal
            if limit_s is not None and waited_s > limit_s and not ready:
                raise LocalError(f"Could not join within {limit_s:g} s: {runtime.doors.why_alone()}.")
            if ready:
                self.begin_alone()
                self.visit()  # Also takes a copy for newcomers: the first step may be far off.
                self.heard()  # Wait for the sample count behind the weights.
                return

    def begin_alone(self) -> None:
        """Keep the node's own weights unless others were adopted; allocate memory before the first step."""
        if not self.begun:
            self.mix_from_here()
            self.runtime.streams.take_memory()

    def mix_from_here(self) -> None:
        """Start mixing from the current weights."""
        self.begun = True
        if not self.outer.plain:
            self.reset_outer()

    def wait_for_others(self, began: float) -> None:
        """Wait up to ``settings.wait_s`` until ``settings.wait_for`` members hold this run, this one included.

        Only contacted members count, because any peer may claim others. Newcomers are given weights meanwhile.
        """
        count, wait_s = self.settings.wait_for, self.settings.wait_s
        while (here := self.peer.membership.sharers) < count and not self.finished:
            if time.monotonic() - began >= wait_s:
                alive = self.peer.view.alive
                if self.settings.others is not None and alive < 2:
                    raise LocalError(
                        f"Waited {wait_s:g} s for {count} members that were launched together, and none of the others "
                        f"came to this node at {self.address} ({self.runtime.doors.why_alone()}): it does not train "
                        "alone. Look whether the others run and can reach this address."
                    )
                text = (
                    f"Waited {wait_s:g} s for {quantity(count, 'member')}, of whom {here} are here "
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
        return str(self.peer.membership.me.address or "none")

    @property
    def finished(self) -> bool:
        return self.peer.view.finished

    @property
    def listeners(self) -> Listeners:
        return self.service.listeners

    def members(self) -> tuple[Member, ...]:
        """Return the members, at most a quarter of a second old, or a second while no steps are taken."""
        service = self.service
        if time.monotonic() - service.listed_at > REPORT_S:
            self.thread.call(service.list_members)
            self.heard()
        return service.members

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Tell other members these figures, and reduce all that were told."""
        own = self.own_figures
        packed = own.tell(figures, self.peer.view.run_id, self.swarm_samples)
        records: list[MemberRecord] = []

        def tell() -> None:
            runtime, peer = self.runtime, self.peer
            if figures and peer.view.run_id == own.run:
                runtime.perform(peer.tell_figures(packed, runtime.now))
            records.extend(peer.membership.sharing(peer.local.run_id))

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
        """Count a step of ``samples`` samples, and visit the step boundary."""
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
        if self.timeline is not None:
            self.timeline.stepped(self.steps, self.overheads[-1])

    def correct(self, correction: Correction) -> None:
        """Correct the last steps for the bias of this node's data, unless an exchange is changing the correction."""
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
        """Stay at this boundary while a mix takes longer than ``max_version_gap`` allows, and until it has landed."""
        self.heard()
        landing = self.loop.lands
        while self.loop.waits(landing):
            landing = True
            self.wake.wait(0.05)
            self.visit()
            self.heard()

    def heard(self) -> None:
        """Wait until the network thread has processed all earlier calls: it is never far behind."""
        told = threading.Event()
        if self.thread.call(told.set):
            told.wait(1.0)

    def visit(self) -> None:
        """Visit the step boundary: fulfil the network thread's requests, and report."""
        self.loop.visit(time.perf_counter() + self.service.clock_s)

    # -- the loop's owner ------------------------------------------------------------------------------------------
    def updated(self, visit: Visit) -> None:
        """Tell the network thread of updates that it has to see.

        The pool is shared by both threads, so a vector's return alone need not wake the network's.
        """
        self.thread.check()
        if self.timeline is not None:
            self.timeline.visit = visit
        if visit.copies or any([update.sample is not None for update in visit.updates]):
            self.tell(self.perform_updated, visit)

    def perform_updated(self, visit: Visit) -> None:
        """Tell the newest network side, in the network thread."""
        self.runtime.averager.updated(visit)
        self.service.refresh()  # An exchange changes the sample count.

    def perform_report(self, *report: Any) -> None:
        """Tell the newest network side, in the network thread."""
        self.runtime.at_boundary(*report)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Call this in the network thread; raise if that has ended, since training on alone would be silently wrong."""
        self.thread.check()
        if not self.thread.call(function, *args):
            raise LocalError(running.CLOSED)

    def tell_peer(self, report: Callable[[Peer, float], list[Effect]]) -> None:
        """Have the newest peer handle this report, and perform its decisions."""

        def tell() -> None:
            runtime = self.runtime
            runtime.perform(report(runtime.peer, runtime.now))

        self.thread.call(tell)

    def report(self, visit: Visit) -> None:
        runtime, now = self.runtime, time.perf_counter()
        if self.timeline is not None:
            self.timeline.visit = visit
        if visit.snapshots:
            self.begin_alone()  # Otherwise the mix of this snapshot would have no start.
        optimizer = None
        if now - self.optimizer_at > 5.0 or (self.optimizers.all and not runtime.peer.local.optimizer_keys):
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
        """Return True if it is time for a copy of the weights, which serves newcomers while this loop is idle.

        Exchanges leave one. A lone node makes one now and then, in a hundredth of its time.
        """
        peer, now = self.runtime.peer, time.monotonic()
        if not (peer.view.ready and self.begun) or peer.view.taking:
            return False
        copy_s = max(self.state.copy_s, 4 * self.state.layout.exchanged / COPY_RATE)
        every_s = max(LAST_WORK * copy_s, ALONE_S if peer.runs.alone else LAST_S)
        if now - self.pool.last_at < every_s:
            return False
        self.pool.last_at = now
        return True

    def watch_soundness(self, runtime: Runtime) -> None:
        """Check the loss once a report, and the weights if the loss is not finite.

        A non-finite loss is reported once. The loop may fix spoiled weights itself. Without a loss, weights are checked
        before they are sent.
        """
        lost, self.lost_told = self.loss.lost and not self.lost_told, self.loss.lost
        if not runtime.peer.view.sound:
            if not self.boundary.wanted and self.state.sound():
                self.average.forget()  # The average may include values that are not finite.
                self.tell_peer(lambda peer, now: peer.mended(now))
        elif self.loss.lost and not self.state.sound():
            self.tell_peer(lambda peer, now: peer.spoiled(None, now))
        elif lost:
            sentence = f"The loss is not finite (step {self.steps}); the weights still are, and are mixed."
            self.thread.call(runtime.on_event, "loss", sentence)

    def optimizer_state(self) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
        """Return the optimizer state that newcomers get; nothing if it has more tensors than may be exchanged."""
        try:
            return self.state.optimizer_keys, tuple(self.state.optimizer_scalars().items())
        except LayoutError:
            return (), ()

    # -- ending --------------------------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        """Mix without training until the nodes agree, or for ``seconds``, once all have come or after ``wait_s``.

        Returns the consensus distance.
        """
        peer = self.peer
        before, averaged = peer.exchanges.done, self.average.mixes
        self.settled_at, began = self.steps, time.monotonic()
        self.tell_peer(lambda peer, now: peer.settle(True, now))
        if self.meet(wait_s):
            before = self.peer.exchanges.done  # An agreement without the last members to come does not count.
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.wake.wait(0.02)
            self.visit()
            if self.peer is not peer:  # After a fault the new peer counts from 0.
                peer, before = self.peer, 0
            if peer.exchanges.done - before >= 3 and peer.exchanges.agreement() < SETTLED:
                break
        with self.outer_lock:
            self.outer.rest()  # Otherwise an exchange that ends later would add the momentum to this node alone.
        self.tell_peer(lambda peer, now: peer.settle(False, now))
        self.finish_exchanges(min(1.0, seconds))
        self.thread.call(self.service.settled)
        self.heard()
        self.average.settled(averaged)
        if not self.outer.plain:
            self.reset_outer()
        if self.timeline is not None:
            self.timeline.spent("settle", time.monotonic() - began)
        distance: float | None = known(self.peer.exchanges.consensus_distance)
        return distance

    def meet(self, wait_s: float) -> bool:
        """Announce that this loop settles, and mix until all other members have come, have finished or are gone.

        It waits ``wait_s`` seconds at most: a member that lies costs no more. Returns whether it had to wait.
        """
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
        """Count the run's members that neither settle nor have finished; None if the network thread is too busy.

        Suspected members count, since slow machines are often suspected.
        """
        found: list[list[tuple[MemberRecord, MemberState]]] = []
        self.tell_settling(True)  # Repeat it: figures are dropped when a run is given up for another.
        self.thread.call(lambda: found.append(self.peer.membership.members()))
        self.heard()
        self.thread.check()
        if not found:
            return None
        run = self.peer.view.run_id
        here = [one for one, state in found[0] if state in HERE and one.ready and one.run_id == run]
        return sum(not (record.finished or settles(record)) for record in here)

    def tell_settling(self, on: bool) -> None:
        """Announce whether this loop settles, until its next step."""
        packed = self.own_figures.settle(on, self.peer.view.run_id, self.swarm_samples)
        self.tell_peer(lambda peer, now: peer.tell_figures(packed, now))

    def finish_exchanges(self, seconds: float) -> None:
        """Let running exchanges land, so that evaluated or saved weights equal the partners'."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.wake.wait(0.005)
            self.visit()
            if not self.peer.exchanges.table and not self.boundary.owed and not self.boundary.wanted:
                return

    def finish(self, seconds: float) -> None:
        """Mark the run as complete. Wait while newcomers fetch its weights, for up to ``seconds``."""
        if not self.finished:
            self.thread.call(self.runtime.on_event, "finished", "This run is finished: this node's program said so.")
        self.tell_peer(lambda peer, now: peer.finish(now))
        self.heard()
        self.keep_final()
        if said := self.service.state_dir.finish(self.peer.view.run_id):
            self.thread.call(self.runtime.on_event, "state", said)
        now = time.monotonic()
        until, quiet_at = now + seconds, now + FAREWELL_S
        while now < until and (now < quiet_at or self.peer.view.serving):
            self.wake.wait(0.02)
            self.visit()
            now = time.monotonic()
            if not self.peer.view.finished:  # A fault came in between.
                self.tell_peer(lambda peer, now: peer.finish(now))
            if self.peer.view.serving:
                quiet_at = now + FAREWELL_S

    def merge(self, run: str) -> None:
        """Take the weights of the run with this name."""
        run_id = from_hex(run)
        if run_id is None:
            raise LocalError(f"{run!r} names no run: give the 32 hexadecimal digits that the notice named.")
        self.tell_peer(lambda peer, now: peer.merge(run_id, now))
