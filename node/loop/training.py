"""The side of a node that runs in the training thread: it starts, visits the step boundary, reports, and ends.

The step boundary (:class:`gossip.averaging.boundary.Boundary`) is where the network thread leaves requests between two
steps. Everything here runs in the training thread, except :meth:`TrainingSide.pass_updates` and
:meth:`TrainingSide.pass_report`, which run in the network thread.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import FrameType
from typing import Any

from gossip.arithmetic.correction import Correction, steps_between_parts
from gossip.averaging.visit import Visit
from gossip.errors import GossipError, LocalError
from gossip.ids import MemberRecord, PeerId, from_hex
from node import running
from node.data.division import Sharers
from node.data.sampler import Samplers
from node.loop.comparison import DataComparison
from node.loop.held_run import LOADED_STATE, HeldRun, OtherRanks
from node.loop.live import LiveModel, OptimizerReport
from node.loop.network_side import NetworkSide
from node.loop.settling import Settling
from node.loop.startup import Startup
from node.loop.step_watch import OptimizerWatch, StepWatch
from node.loop.steps import StepLoop
from node.model.inventory.constants import constants_of
from node.model.inventory.items import Inventory
from node.model.inventory.watch import ModelWatch
from node.model.scalars import LastLoss
from node.model.snapshot import ModelState
from node.network.runtime import Runtime
from node.network.service import LEAVE_S, REPORT_S, Service
from node.observe.figures import Source
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced, reduce
from node.observe.timeline import LoopTimeline
from node.settings import Settings

# Newcomers get the newest snapshot while this node's loop is idle. Another is taken for them once it is so old:
LONE_COPY_S = 1.0  # For a node without other members.
COPY_S = 10.0  # For a node with others, whose exchanges take snapshots anyway.
COPY_PERIODS = 100.0  # The interval between two such copies is at least this multiple of a copy's duration.
COPY_BYTES_PER_S = 10e9  # A copy counts as no faster, because a GPU's overlaps with the loop and looks faster.
OPTIMIZER_S = 5.0  # Seconds between two reports of the optimizer's state, which walk over all parameters.
VISIT_PERIOD_S = 0.05  # Seconds between two visits of the boundary while the loop waits for a mix.
REPLACED_NOTICE = "Another Node over this model was still running in this process, and is closed now."


class TrainingSide:
    """The loop, the run and the network thread behind :class:`node.node.Node`.

    Args:
        live: The model that the loop trains.
        settings: The settings of the node.
        ranks: The other processes that train the same model, by default none.
        samplers: The samplers, by default those of a node of one process.
    """

    def __init__(
        self, live: LiveModel, settings: Settings, ranks: OtherRanks | None = None, samplers: Samplers | None = None
    ) -> None:
        self.live, self.settings, self.config = live, settings, settings.config
        self.ranks = ranks or OtherRanks()
        self.loop = StepLoop(self.config, live.boundary, self, REPORT_S)
        self.service = Service(settings, live, self.loop.hints, self.source)
        self.samplers = samplers or Samplers(Sharers(
            lambda: self.me, lambda: self.view.owners, lambda: self.view.changes, lambda: self.swarm_samples,
            lambda: self.run.samples, finished=lambda: self.finished,
        ))  # fmt: skip
        self.network = NetworkSide(self.service)
        self.run = HeldRun(live, self.network, self.samplers, self.ranks)
        self.settling = Settling(live, self.network, self.run, self.visit, self.on_replaced)
        self.startup = Startup(settings, live, self.network, self.run, self.visit, self.settling.announce)
        self.model_watch = ModelWatch(
            live.state, self.network.notify,
            lambda: self.network.report_to_peer(lambda peer, now: peer.on_frozen_changed(now)),
        )  # fmt: skip
        self.comparison = DataComparison(self.network, self.settling.announce)
        self.step_watch = StepWatch(live, self.run, self.network.notify)
        self.optimizer_watch = OptimizerWatch(live.optimizers, self.run, self.network.notify)
        self.samplers.on_pass, self.samplers.on_draw = self.comparison.on_pass, self.step_watch.on_draw
        self.samplers.notify = self.network.notify
        self.loss = LastLoss()
        self.was_loss_finite = True  # At the last report.
        self.learning_rate = math.nan  # As the loop passes it to `step`; used if no optimizer has one.
        self.overheads_s: deque[float] = deque(maxlen=512)  # Durations of the last calls of `step`.
        self.optimizer_reported_at = self.view_refreshed_at = -math.inf  # -inf: at once.
        # The step count at the last correction for the bias of this node's data (see :meth:`apply_correction`).
        self.corrected_at_step = 0
        self.correcting_steps = 0  # The steps that a correction in progress covers; 0 if none is in progress.
        self.previous_handler: Any = None  # The handler of SIGTERM before ours; None if ours is not installed.
        self.owner: running.Side = self  # The side that the program closes, also if another node over the model starts.
        trace = settings.trace
        self.timeline = None if trace is None else LoopTimeline(trace, self.service.listeners, live.state)

    # -- life ----------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """Return the model, which identifies another node over it (:func:`node.running.enter`)."""
        return self.live.model

    def addresses(self) -> dict[int, str]:
        return self.live.state.addresses() if isinstance(self.live.state, ModelState) else {}

    def start(self) -> None:
        """Start the network thread and join the swarm; return when this node holds weights to train."""
        if self.service.runtime is not None:
            raise LocalError(running.USED)
        self.network.check()  # A closed node must not appear on the network.
        if running.is_stop_requested():
            raise SystemExit(128 + signal.SIGTERM)
        replaced_nodes = self.startup.enter(self.owner)
        if not self.settings.joins:
            self.live.begin_mixing()
        self.handle_sigterm()
        began = time.monotonic()
        try:
            self.service.completed_runs = running.left_runs(self.model)
            self.network.start()
            if replaced_nodes:
                self.network.notify("replaced", REPLACED_NOTICE)
            if self.timeline is not None:
                self.timeline.start(self.me.hex())
            self.model_watch.begin()
            self.comparison.constants = constants_of(self.model)
            self.startup.join()
            if self.finished and not self.live.boundary.replacements:
                self.run.load_final()
            # Weights that replaced ours are of another run, or newer than the state that the program has loaded.
            if self.run.early_state is not None and not self.live.boundary.replacements:
                self.run.continue_run(self.run.early_state, LOADED_STATE, lambda: None)
            self.startup.wait_for_others(began)
            self.startup.tell_of_trained(self.model)
            if not self.finished:  # Its final weights are evaluated, and maybe replaced by an average.
                self.step_watch.begin()
            self.optimizer_watch.begin()
            if self.timeline is not None:
                self.timeline.record_time("join", time.monotonic() - began)
        except BaseException:
            self.close()
            raise

    def leave(self, error: BaseException | None) -> None:
        """Close the node, whose loop has ended, by ``error`` or in order."""
        self.close(error)

    def close(self, error: BaseException | None = None, is_handing_over: bool = True) -> None:
        """Mix a last time, if the node ``is_handing_over``, announce LEFT and stop, after ``error`` of the loop.

        Do nothing in a forked child, whose parent runs the node. Other ranks would have to take part in last mixes.
        """
        if self.network.forked:
            return
        if error is None:
            self.settling.tell_of_changes()
        try:
            if is_handing_over:
                self.hand_over(error)
        finally:
            self.end(error)

    def hand_over(self, error: BaseException | None) -> None:
        """Let members that stay take this loop's last steps, unless an error has ended it.

        SIGTERM and ^C end a loop in order.
        """
        is_in_order = error is None or isinstance(error, SystemExit | KeyboardInterrupt)
        leaving = self.service.leaving
        is_up = leaving is not None and not (leaving.is_set() or self.network.ended.is_set())
        is_up = is_up and not self.service.is_restarting
        if is_in_order and is_up and self.settings.grace_s:
            with contextlib.suppress(GossipError):  # A fault has been told, and must not replace the program's error.
                self.settling.hand_over(self.settings.grace_s)

    def end(self, error: BaseException | None) -> None:
        """Announce LEFT, and end the threads, within about a second."""
        # An error may come before the first step, and a run may end before it.
        self.step_watch.close(could_step=error is None and not self.samplers.has_ended)
        self.optimizer_watch.close()
        if self.service.runtime is not None and not self.service.state_dir.is_closing:  # At the first close alone.
            is_over, is_left = self.samplers.has_ended or self.finished, error is None and self.run.steps > 0
            running.note_run(self.network.peer.view.run_id, self.model, is_over, is_left)
        self.network.call(self.comparison.compare)  # A short program may not have reached a report.
        self.service.state_dir.is_closing = True
        if self.service.leaving is not None:
            self.network.call(self.service.leave)
        self.network.join(2 * LEAVE_S)
        self.service.listeners.close(LEAVE_S)
        if self.timeline is not None:
            self.timeline.close()
        running.leave(self.owner)
        self.loop.reported_at = -math.inf  # A later step then reports at once, and raises that the node is closed.
        if self.previous_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.previous_handler)
            self.previous_handler = None
        self.run.close()  # This comes last, because an upload may take minutes and a signal may end it.

    def handle_sigterm(self) -> None:
        """Make SIGTERM leave the with block, unless the program has a handler of its own."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

            def leave(number: int, frame: FrameType | None) -> None:
                raise SystemExit(128 + number)

            self.previous_handler = signal.signal(signal.SIGTERM, leave)

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
    def address(self) -> str:
        return str(self.network.peer.membership.me.address or "none")

    @property
    def finished(self) -> bool:
        return self.network.peer.view.finished

    @property
    def listeners(self) -> Listeners:
        return self.service.listeners

    def members(self) -> tuple[Member, ...]:
        """Return the members, as of the last quarter of a second, or of the last second if the loop takes no steps."""
        service = self.service
        if time.monotonic() - service.listed_at > REPORT_S:
            self.network.call(service.list_members)
            self.network.sync()
        return service.members

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Send these figures to the other members, and reduce the figures of all members by name."""
        own = self.settling.own_figures
        packed = own.pack(figures, self.network.peer.view.run_id, self.run.swarm_samples)
        records: list[MemberRecord] = []

        def publish_and_read() -> None:
            runtime, peer = self.network.runtime, self.network.peer
            if figures and peer.view.run_id == own.run:
                runtime.perform(peer.publish_figures(packed, runtime.now))
            records.extend(peer.membership.run_members(peer.local.run_id))

        self.network.call(publish_and_read)
        self.network.sync()
        self.network.check()
        return reduce(own.values, records)

    def inventory(self) -> Inventory:
        return self.live.state.inventory()

    def metrics(self) -> Metrics:
        return Metrics.of(self.source())

    def source(self) -> Source:
        """Return the state from which all figures of this node are read."""
        runtime = self.network.runtime
        return Source(
            runtime.peer, runtime.links, self.run.steps, self.run.samples, self.run.swarm_samples,
            runtime.streams.durations, self.overheads_s, self.service.listeners.dropped, runtime.exchange_log.mixes(),
            self.service.faults.count, self.service.faults.restarts, self.run.shown_samples[0].run,
            self.live.archive.written,
        )  # fmt: skip

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        """Count a step of ``samples`` samples, and visit the step boundary."""
        start = self.begin_step(loss, samples)
        self.run.samples += samples
        if self.live.outer.correction is not None:
            self.apply_correction(self.live.outer.correction)
        self.loop.step(self.run.steps, start + self.service.clock_s)
        if self.loop.is_lockstep:
            self.wait_for_mix()
        self.end_step(start)

    def begin_step(self, loss: Any, samples: int) -> float:
        """Count a step, without its samples, and look at what it did. Return the time at which the call began."""
        start = time.perf_counter()
        self.run.steps += 1
        if loss is not None:
            self.loss.set(loss)
        self.model_watch.on_step(loss is not None or samples > 0)
        return start

    def end_step(self, start: float) -> None:
        """Note the weights that the call leaves, and the time that it took."""
        self.model_watch.on_stepped()
        self.settling.note_weights()
        self.overheads_s.append(time.perf_counter() - start)
        if self.timeline is not None:
            self.timeline.record_step(self.run.steps, self.overheads_s[-1])

    def current_rate(self) -> float:
        """Return the learning rate of the optimizers, or else of the program's last step; NaN if unknown."""
        rate = self.live.optimizers.learning_rate
        return self.learning_rate if math.isnan(rate) else rate

    def apply_correction(self, correction: Correction) -> None:
        """Correct the last steps for the bias of this node's data, unless an exchange is changing the correction.

        The *pull* is the displacement that corrects one whole interval between two mixes, None before the first. Its
        version is the number of its changes: a device keeps a copy of the pull, and sees by it that the copy is old.
        A device may take several boundaries to add the pull, and ``add_scaled`` returns False until the last of them;
        ``correcting_steps`` holds the covered steps until then.
        """
        is_resumed = self.correcting_steps > 0
        steps = self.correcting_steps if is_resumed else self.run.steps - self.corrected_at_step
        is_due = is_resumed or steps >= steps_between_parts(correction.interval_steps)
        if not is_due or not self.live.outer_lock.acquire(blocking=False):
            return
        is_unfinished = False
        try:
            correction.rate = self.current_rate()
            factor = correction.step_factor(steps)
            if correction.pull is not None and (is_resumed or factor):
                result = self.live.state.add_scaled(correction.pull, factor, correction.version)
                is_unfinished = result is False  # A user's State may return None, which means that all is added.
        except MemoryError:
            is_unfinished = True  # The model's device has no memory for it now: try again at the next boundary.
        finally:
            self.live.outer_lock.release()
        if not is_resumed:
            self.corrected_at_step = self.run.steps
        self.correcting_steps = steps if is_unfinished else 0

    def wait_for_mix(self) -> None:
        """Wait at this boundary while a mix takes more steps than ``max_version_gap`` allows, until it is applied."""
        self.network.sync()
        until_applied = self.loop.must_apply_mix
        while self.loop.must_wait(until_applied):
            until_applied = True  # A mix for which the loop has waited is applied before the next step.
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
            self.network.sync()

    def visit(self) -> None:
        """Visit the step boundary: fulfil the network thread's requests, and report."""
        self.ranks.send_heartbeat()
        self.loop.visit(self.network.now)
        self.settling.note_weights()

    # -- calls of the step loop ------------------------------------------------------------------------------------
    def on_replaced(self, weights: Any) -> None:
        """Handle the replacement of the model's weights by these."""
        self.live.on_replaced(weights)
        self.model_watch.on_adopted()
        self.ranks.on_replaced()

    def report_updates(self, visit: Visit) -> None:
        """Report a visit that only added updates, if the network thread has to know of them.

        Both threads share the pool, so that a vector's return alone need not wake the network thread.
        """
        self.network.check()
        if self.timeline is not None:
            self.timeline.visit = visit
        # The averager follows the weights at a few sampled positions, which a merge has moved.
        if visit.copies or any([update.merge_sample is not None for update in visit.updates]):
            self.network.must_call(self.pass_updates, visit)

    def pass_updates(self, visit: Visit) -> None:
        """Pass a visit to the newest averager. Runs in the network thread."""
        self.network.runtime.averager.use_copies(visit)
        self.service.refresh_view()  # An exchange changes the sample count.

    def pass_report(
        self, steps: int, samples: int, loss: float | None, visit: Visit, optimizer: OptimizerReport | None
    ) -> None:
        """Pass a report to the newest peer and averager. Runs in the network thread."""
        runtime = self.network.runtime
        if optimizer is not None:
            keys, scalars, form = optimizer
            runtime.peer.set_optimizer(keys, scalars)
            runtime.perform(runtime.peer.set_moments(form))
        runtime.averager.on_visit(visit, steps, samples, loss)

    def report(self, visit: Visit) -> None:
        """Report a visit, the loop's progress, and now and then the optimizer's state, to the network thread."""
        runtime, now = self.network.runtime, time.perf_counter()
        if self.timeline is not None:
            self.timeline.visit = visit
        if visit.snapshots:
            self.startup.begin_with_own_weights()  # The outer step of this snapshot's mix needs weights to start from.
        optimizer, is_unreported = None, self.live.optimizers.all and not runtime.peer.local.optimizer_keys
        if now - self.optimizer_reported_at > OPTIMIZER_S or is_unreported:
            optimizer = self.live.optimizer_report()
            self.model_watch.look()
            self.optimizer_reported_at = -math.inf if optimizer is None else now
        if now - self.view_refreshed_at > REPORT_S:
            self.view_refreshed_at = now
            self.network.call(self.service.refresh_view)
        self.settling.on_step()
        self.comparison.compare_if_due(self.loss.first_two, self.current_rate)
        loss = self.loss.read()
        self.network.must_call(self.pass_report, self.run.steps, self.run.samples, loss, visit, optimizer)
        self.check_soundness(runtime)

    def is_copy_due(self) -> bool:
        """Return True if a copy of the weights for newcomers is due, and count it as taken.

        Newcomers get it while this loop is idle. The snapshots of exchanges serve too, so that a node that mixes often
        needs no other copies. The copies take at most a hundredth of the loop's time.
        """
        peer, pool, now = self.network.runtime.peer, self.live.pool, time.monotonic()
        if not (peer.view.ready and self.live.has_weights) or peer.view.is_joining:
            return False
        copy_s = max(self.live.state.copy_s, 4 * self.live.state.layout.exchanged / COPY_BYTES_PER_S)
        every_s = max(COPY_PERIODS * copy_s, LONE_COPY_S if peer.run_choice.is_alone else COPY_S)
        if now - pool.newest_at < every_s:
            return False
        pool.newest_at = now
        return True

    def check_soundness(self, runtime: Runtime) -> None:
        """Check the loss, and the weights if the loss is not finite. Report weights that become unsound or sound again.

        Weights are sound if all are finite. A loop may fix them, for example by a checkpoint. A loop without a loss is
        not checked here: its weights are checked before they are sent.
        """
        has_diverged = self.was_loss_finite and self.loss.is_not_finite
        self.was_loss_finite = not self.loss.is_not_finite
        if not runtime.peer.view.sound:
            if not self.live.boundary.has_requests and self.live.state.sound():
                self.network.report_to_peer(lambda peer, now: peer.on_mended(now))
        elif self.loss.is_not_finite and not self.live.state.sound():
            tensor = self.live.state.spoiled_tensor()
            self.network.report_to_peer(lambda peer, now: peer.on_spoiled(None, now, tensor))
        elif has_diverged:
            sentence = f"The loss is not finite (step {self.run.steps}); the weights still are, and are mixed."
            self.network.notify("loss", sentence)

    # -- ending --------------------------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        began = time.monotonic()
        self.model_watch.look()  # A short program may have been looked at once alone, before its first step.
        with self.step_watch.paused():
            distance = self.settling.settle(seconds, wait_s)
        if distance is not None:
            self.model_watch.look()  # A short program has had no second look.
        if self.timeline is not None:
            self.timeline.record_time("settle", time.monotonic() - began)
        return distance

    def finish(self, seconds: float) -> None:
        with self.step_watch.paused():
            self.settling.finish(seconds)

    def merge(self, run: str) -> None:
        """Ask the peer to take the weights of the run with this name."""
        run_id = from_hex(run)
        if run_id is None:
            raise LocalError(f"{run!r} names no run: give the 32 hexadecimal digits that the notice named.")
        self.network.report_to_peer(lambda peer, now: peer.merge(run_id, now))

    # -- the run ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return self.run.state_dict()

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        self.run.save(path, keep=keep)

    def export(self, path: str | os.PathLike[str]) -> None:
        self.live.archive.export(path)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        with self.step_watch.paused():
            return self.run.load(path)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run.load_state_dict(state)
