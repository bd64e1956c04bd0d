"""The training thread's side of a node: step boundary, reports, joining, settling, ending."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from gossip.arithmetic.correction import Correction, spread
from gossip.averaging.boundary import Update, Visit
from gossip.errors import FaultError, LayoutError, LocalError
from gossip.ids import MemberRecord, PeerId, from_hex, quantity
from node import leaving, running
from node.data.sampler import Samplers, Sharers, Sharing
from node.faults import report_to
from node.loop.held_run import OF_OTHERS, HeldRun, NoRanks, OtherRanks
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.loop.settling import Settling
from node.loop.steps import StepLoop
from node.model.loss import LastLoss
from node.network.runtime import Runtime
from node.network.service import LEAVE_S, REPORT_S, Service
from node.observe.figures import Reading, Source, reading
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced, reduce
from node.observe.timeline import LoopTimeline
from node.settings import Settings

if TYPE_CHECKING:  # The page needs optional packages.
    from node.page.page import Page

__all__ = ["TrainingSide"]

CLOSED_PATIENCE = 3.0  # Times join_timeout_s, for seeds that accept connections and close them at once.
ALONE_S = 1.0  # The age limit of a lone node's newest snapshot, which newcomers get while its loop is idle.
LAST_S = 10.0  # The same with other members, where each exchange takes a snapshot.
LAST_WORK = 100.0  # The least interval between two copies, as a multiple of a copy's duration.
COPY_RATE = 10e9  # A copy counts as at most so many bytes a second: a GPU's overlaps with the loop and looks faster.
REPLACED = "Another Node over this model was still running in this process, and is closed now."


class TrainingSide:
    """The loop, the run and the network thread behind :class:`node.node.Node`.

    The training thread owns all of it. The network thread runs what ``thread.call`` passes to it. ``ranks`` are the
    other processes that train the same model. ``sharing`` is the side whose data the samplers divide, by default this.
    """

    rank, size = 0, 1  # The place among the processes that form one node, and their number.

    def __init__(
        self, live: LiveModel, settings: Settings, ranks: OtherRanks | None = None, sharing: Sharing | None = None
    ) -> None:
        self.live, self.settings, self.config = live, settings, settings.config
        self.ranks = NoRanks() if ranks is None else ranks
        self.average = live.average
        self.loop = StepLoop(self.config, live.boundary, self, REPORT_S)
        self.service = Service(settings, live, self.loop.signals, self, page_of(settings))
        self.samplers = Samplers(Sharers.of(sharing or self))
        self.network = NetworkSide(self.service)
        self.run = HeldRun(live, self.network, self.samplers, self.ranks)
        self.settling = Settling(live, self.network, self.run, self)
        self.loss = LastLoss()
        self.lost_told = False  # A loss that is not finite was reported.
        self.rate = math.nan  # The learning rate, if the loop passes it and no optimizer has it.
        self.overheads: deque[float] = deque(maxlen=512)
        self.optimizer_at = self.viewed_at = -math.inf
        self.corrected_at = 0  # The step count when the correction was last applied.
        self.handler: Any = None
        self.owner: running.Side = self  # The side that the program closes.
        trace = settings.trace
        self.timeline = None if trace is None else LoopTimeline(trace, self.service.listeners, live.state)

    # -- life ----------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """Return the model, which identifies another node over it (:func:`node.running.enter`)."""
        return self.live.model

    def start(self, owner: running.Side | None = None) -> None:
        """Run the network, and join: return when this node holds weights to train.

        ``owner`` is closed if another node over this model starts; by default this side.
        """
        if self.service.runtime is not None:
            raise LocalError(running.USED)
        self.network.thread.check()  # Before the node appears on the network.
        if leaving.asked():
            raise SystemExit(128 + signal.SIGTERM)
        self.owner = owner or self
        before = running.enter(self.owner)
        if not self.settings.joins:
            self.live.mix_from_here()
        self.install_handler()
        began = time.monotonic()
        try:
            self.network.thread.start(self.service)
            if before:
                self.network.notice("replaced", REPLACED)
            if self.timeline is not None:
                self.timeline.start(self.me.hex())
            self.join()
            if self.finished and not self.live.boundary.lives:
                self.run.take_final()
            # If the weights were replaced, they are of another run or newer than the given state.
            if self.run.given is not None and not self.live.boundary.lives:
                self.run.go_on(self.run.given, OF_OTHERS, lambda: None)
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
        if self.network.thread.forked:
            return
        if self.service.leaving is not None:
            self.network.thread.call(self.service.leave)
        self.network.thread.join(2 * LEAVE_S)
        self.service.listeners.close(LEAVE_S)
        if self.timeline is not None:
            self.timeline.close()
        running.leave(self.owner)
        self.loop.reported_at = -math.inf  # A later step reports at once that the node is closed.
        if self.handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)
            self.handler = None
        self.run.close()  # Comes last: it may take minutes, and a signal may end it.

    def install_handler(self) -> None:
        """Make SIGTERM leave the with block, unless the program has a handler of its own."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

            def leave(number: int, frame: FrameType | None) -> None:
                raise SystemExit(128 + number)

            self.handler = signal.signal(signal.SIGTERM, leave)

    def join(self) -> None:
        """Wait until this node holds weights to train: taken from the swarm, or its own."""
        limit_s, began = self.settings.join_or_fail_s, time.monotonic()
        self.service.counts = self.network.runtime.counts = lambda: (self.run.steps, self.run.samples)
        while True:
            self.live.wake.wait(0.02)
            self.network.thread.check()
            if self.service.resting:
                raise FaultError(
                    "Could not join: faults of this library end the network side each time that it begins anew. Report "
                    f"the traceback, which the log has, {report_to()}."
                )
            self.visit()
            runtime = self.network.runtime
            ready, refusal = runtime.peer.view.ready and not self.live.boundary.wanted, runtime.connector.refusal
            waited_s = time.monotonic() - began
            # A seed that only closes connections may be busy, or a forwarder whose node is down: retry it for a while.
            patient = waited_s < CLOSED_PATIENCE * self.config.join_timeout_s and not ready
            final = refusal is not None and not (patient if refusal.code == "closed" else ready)
            if final and not runtime.connector.dialling and not len(runtime.links):
                raise LocalError(f"Could not join: {refusal}") from refusal
            if limit_s is not None and waited_s > limit_s and not ready:
                raise LocalError(f"Could not join within {limit_s:g} s: {runtime.connector.why_alone()}.")
            if ready:
                self.begin_alone()
                self.visit()  # Also takes a copy for newcomers: the first step may be far off.
                self.network.heard()  # Wait for the sample count behind the weights.
                return

    def begin_alone(self) -> None:
        """Keep the node's own weights unless others were adopted; allocate memory before the first step."""
        if not self.live.begun:
            self.live.mix_from_here()
            self.network.runtime.streams.take_memory()

    def wait_for_others(self, began: float) -> None:
        """Wait up to ``settings.wait_s`` until ``settings.wait_for`` members hold this run, this one included.

        Only contacted members count, because any peer may claim others. Newcomers are given weights meanwhile.
        """
        count, wait_s = self.settings.wait_for, self.settings.wait_s
        while (here := self.network.peer.membership.run_size) < count and not self.finished:
            if time.monotonic() - began >= wait_s:
                alive = self.network.peer.view.alive
                if self.settings.others is not None and alive < 2:
                    raise LocalError(
                        f"Waited {wait_s:g} s for {count} members that were launched together, and none of the others "
                        f"came to this node at {self.address} ({self.network.runtime.connector.why_alone()}): it does "
                        "not train alone. Look whether the others run and can reach this address."
                    )
                text = (
                    f"Waited {wait_s:g} s for {quantity(count, 'member')}, of whom {here} are here "
                    "with the weights, this one included: this node goes on with them, and with the others when they "
                    "come."
                )
                self.network.notice("waited", text)
                return
            self.live.wake.wait(0.02)
            self.network.thread.check()
            self.visit()

    # -- readings --------------------------------------------------------------------------------------------------
    @property
    def me(self) -> PeerId:
        return self.service.identity.id

    @property
    def view(self) -> SwarmView:
        return self.service.view

    @property
    def swarm_samples(self) -> int:
        return self.run.swarm_samples

    @property
    def trained_on(self) -> int:
        """Return the samples that this loop has trained on."""
        return self.run.samples

    @property
    def address(self) -> str:
        return str(self.network.peer.membership.me.address or "none")

    @property
    def finished(self) -> bool:
        return self.network.peer.view.finished

    @property
    def listeners(self) -> Listeners:
        return self.service.listeners

    def members(self) -> tuple[Member, ...]:
        """Return the members, at most a quarter of a second old, or a second while no steps are taken."""
        service = self.service
        if time.monotonic() - service.listed_at > REPORT_S:
            self.network.thread.call(service.list_members)
            self.network.heard()
        return service.members

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Tell other members these figures, and reduce the figures of all members."""
        own = self.settling.own_figures
        packed = own.tell(figures, self.network.peer.view.run_id, self.run.swarm_samples)
        records: list[MemberRecord] = []

        def tell() -> None:
            runtime, peer = self.network.runtime, self.network.peer
            if figures and peer.view.run_id == own.run:
                runtime.perform(peer.tell_figures(packed, runtime.now))
            records.extend(peer.membership.run_members(peer.local.run_id))

        self.network.thread.call(tell)
        self.network.heard()
        self.network.thread.check()
        return reduce(own.told, records)

    def metrics(self) -> Metrics:
        return Metrics.of(self.source())

    def source(self) -> Source:
        runtime = self.network.runtime
        return Source(
            runtime.peer, runtime.links, self.run.steps, self.run.samples, self.run.swarm_samples,
            runtime.streams.durations, self.overheads, self.service.listeners.dropped, runtime.exchange_log.mixes(),
            self.service.faults.count, self.service.faults.restarts,
        )  # fmt: skip

    def figures(self) -> Reading:
        return reading(self.source())

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        """Count a step of ``samples`` samples, and visit the step boundary."""
        start = time.perf_counter()
        self.run.steps += 1
        self.run.samples += samples
        if loss is not None:
            self.loss.give(loss)
        if self.live.outer.correction is not None:
            self.correct(self.live.outer.correction)
        self.loop.step(self.run.steps, start + self.service.clock_s)
        if self.config.max_version_gap is not None:
            self.hold()
        self.overheads.append(time.perf_counter() - start)
        if self.timeline is not None:
            self.timeline.stepped(self.run.steps, self.overheads[-1])

    def correct(self, correction: Correction) -> None:
        """Correct the last steps for the bias of this node's data, unless an exchange is changing the correction."""
        since = self.run.steps - self.corrected_at
        if since < spread(correction.every) or not self.live.outer_lock.acquire(blocking=False):
            return
        try:
            rate = self.live.optimizers.rate
            correction.rate = rate if rate == rate else self.rate  # NaN if no optimizer has it.
            if correction.pull is not None:
                self.live.state.add_scaled(correction.pull, correction.part(since), correction.version)
        finally:
            self.live.outer_lock.release()
        self.corrected_at = self.run.steps

    def hold(self) -> None:
        """Stay at this boundary while a mix takes longer than ``max_version_gap`` allows, and until it has landed."""
        self.network.heard()
        landing = self.loop.lands
        while self.loop.waits(landing):
            landing = True
            self.live.wake.wait(0.05)
            self.visit()
            self.network.heard()

    def visit(self) -> None:
        """Visit the step boundary: fulfil the network thread's requests, and report."""
        self.ranks.beat()
        self.loop.visit(self.network.now)

    # -- calls of the step loop ------------------------------------------------------------------------------------
    def mixed(self, updates: Sequence[Update]) -> None:
        """Note that updates of exchanges were added to the model."""
        self.live.mixed(updates)
        self.ranks.mixed()

    def replaced(self, weights: Any) -> None:
        """Note that the model now holds these weights."""
        self.live.replaced(weights)
        self.ranks.replaced()

    def updated(self, visit: Visit) -> None:
        """Tell the network thread of updates that it has to see.

        The pool is shared by both threads, so a vector's return alone need not wake the network's.
        """
        self.network.thread.check()
        if self.timeline is not None:
            self.timeline.visit = visit
        if visit.copies or any([update.sample is not None for update in visit.updates]):
            self.network.tell(self.perform_updated, visit)

    def perform_updated(self, visit: Visit) -> None:
        """Tell the newest network side, in the network thread."""
        self.network.runtime.averager.updated(visit)
        self.service.refresh()  # An exchange changes the sample count.

    def perform_report(self, *report: Any) -> None:
        """Tell the newest network side, in the network thread."""
        self.network.runtime.at_boundary(*report)

    def report(self, visit: Visit) -> None:
        runtime, now = self.network.runtime, time.perf_counter()
        if self.timeline is not None:
            self.timeline.visit = visit
        if visit.snapshots:
            self.begin_alone()  # Otherwise the mix of this snapshot would have no start.
        optimizer = None
        if now - self.optimizer_at > 5.0 or (self.live.optimizers.all and not runtime.peer.local.optimizer_keys):
            self.optimizer_at = now
            optimizer = self.optimizer_state()
            if optimizer is None:
                self.optimizer_at = -math.inf
        if now - self.viewed_at > REPORT_S:
            self.viewed_at = now
            self.network.thread.call(self.service.refresh)
        self.settling.goes_on()
        loss = self.loss.read()
        self.network.tell(self.perform_report, self.run.steps, self.run.samples, loss, visit, optimizer)
        self.watch_soundness(runtime)

    def keeps(self) -> bool:
        """Return True if it is time for a copy of the weights, which serves newcomers while this loop is idle.

        Exchanges leave one. A lone node makes copies that take at most a hundredth of its time.
        """
        peer, now = self.network.runtime.peer, time.monotonic()
        if not (peer.view.ready and self.live.begun) or peer.view.taking:
            return False
        copy_s = max(self.live.state.copy_s, 4 * self.live.state.layout.exchanged / COPY_RATE)
        every_s = max(LAST_WORK * copy_s, ALONE_S if peer.run_choice.is_alone else LAST_S)
        if now - self.live.pool.last_at < every_s:
            return False
        self.live.pool.last_at = now
        return True

    def watch_soundness(self, runtime: Runtime) -> None:
        """Check the loss once a report, and the weights if the loss is not finite.

        A non-finite loss is reported once. The loop may fix spoiled weights itself. Without a loss, weights are checked
        before they are sent.
        """
        lost, self.lost_told = self.loss.lost and not self.lost_told, self.loss.lost
        if not runtime.peer.view.sound:
            if not self.live.boundary.wanted and self.live.state.sound():
                self.average.forget()  # The average may include values that are not finite.
                self.network.tell_peer(lambda peer, now: peer.mended(now))
        elif self.loss.lost and not self.live.state.sound():
            self.network.tell_peer(lambda peer, now: peer.spoiled(None, now))
        elif lost:
            sentence = f"The loss is not finite (step {self.run.steps}); the weights still are, and are mixed."
            self.network.notice("loss", sentence)

    def optimizer_state(self) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]] | None:
        """Return the optimizer state that newcomers get; nothing if it has more tensors than may be exchanged.

        None if it is still on its way from a device.
        """
        state = self.live.state
        try:
            scalars = state.recent_optimizer_scalars()
            return None if scalars is None else (state.optimizer_keys, tuple(scalars.items()))
        except LayoutError:
            return (), ()

    # -- ending --------------------------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        began = time.monotonic()
        distance = self.settling.settle(seconds, wait_s)
        if self.timeline is not None:
            self.timeline.spent("settle", time.monotonic() - began)
        return distance

    def finish(self, seconds: float) -> None:
        self.settling.finish(seconds)

    def merge(self, run: str) -> None:
        """Take the weights of the run with this name."""
        run_id = from_hex(run)
        if run_id is None:
            raise LocalError(f"{run!r} names no run: give the 32 hexadecimal digits that the notice named.")
        self.network.tell_peer(lambda peer, now: peer.merge(run_id, now))

    # -- the run ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return self.run.state_dict()

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        self.run.save(path, keep=keep)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        return self.run.load(path)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run.load_state_dict(state)


def page_of(settings: Settings) -> Page | None:
    """Return the page that the settings ask for.

    Its modules are imported before the network thread starts, which they would delay by a third of a second.
    """
    if settings.page is None:
        return None
    from node.page.page import Page

    return Page(settings.page, settings.secret, settings.config)
