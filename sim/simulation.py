"""The simulation of a scenario: build the swarm, advance virtual time, and record rows of measurements.

The *whole* level plays every message, the fast one each exchange as one event (:mod:`sim.scenario.fidelity`). A *mix*
is one side of an exchange. A peer is known by its *row* in the learners' matrix of models; the rows of the history are
measurements.
"""

import dataclasses
import gc
import math
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.errors import ConfigError, LocalError
from gossip.timeline import TimelineWriter
from sim.engine.swarm import Swarm
from sim.exchanges.level import ExchangeLevel
from sim.interrupt import interrupt
from sim.learning.learners import Learners
from sim.level import Level
from sim.report.figures import row_of, summary_of
from sim.report.measures import FinishedRun, Instant
from sim.report.result import Progress, Result, RowHandler
from sim.scenario.adversaries import draw_attackers
from sim.scenario.fidelity import Beyond, Fidelity, fidelity_of
from sim.scenario.scenario import Scenario
from sim.seeds import derive
from sim.threads import one_thread
from sim.world.churn import Uptime, churn_of
from sim.world.nat import Nat
from sim.world.network import NetworkModel, network_of
from sim.world.step_times import StepTimes

SLICES = 400  # Slices of a run with a duration; between them rows are measured and progress is shown.
ROWS = 40  # Rows of the history, unless the report sets an interval.
MAX_SEEDS = 3  # The most peers, called its seeds, through which a peer joins that starts during the run.
MAX_IDLE_S = 600.0  # Virtual seconds without a mix after which a run with a number of rounds gives up.
REDRAW_S = 0.1  # Real seconds between two reports of progress.
START_S = 0.03, 0.1  # Start-up time of a node: keys, thread and socket take 20 to 45 ms of CPU time.
ROUNDING_ALLOWANCE = 1e-9  # Rounding must not postpone a row by a slice.


class Stopped(KeyboardInterrupt):
    """^C during a simulation; ``result`` is the partial result, as if the run had ended there."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


class RunningSimulation:
    """A simulation in progress, at any level; :meth:`slices` advances it."""

    scenario: Scenario
    learners: Learners
    level: Level  # The swarm.

    @property
    def done(self) -> float:
        """Return the progress of the run, 0 to 1."""
        scenario = self.scenario
        if scenario.duration_s is not None:
            return min(1.0, self.level.now / scenario.duration_s)
        assert scenario.rounds is not None
        return min(1.0, self.level.mixes / (scenario.rounds * scenario.peers))

    def check(self) -> None:
        """Raise Beyond if the fast level was chosen automatically and the swarm has reached a state beyond it."""

    def row(self) -> dict[str, float]:
        """Measure the swarm now, and return a row of the history."""
        return row_of(Instant(self.level, self.scenario, self.learners))

    def slices(self) -> Iterator[None]:
        """Advance the simulation slice by slice until it is done, yielding after each slice."""
        scenario, level = self.scenario, self.level
        if scenario.duration_s is not None:
            ends = {scenario.duration_s * number / SLICES for number in range(1, SLICES + 1)}
            if (every_s := scenario.report.every_s) is not None:
                ends |= {every_s * number for number in range(1, math.ceil(scenario.duration_s / every_s))}
            for end in sorted(ends):
                level.advance(end)
                yield
            return
        mixes, mixed_at = 0, 0.0  # The count of mixes, and when it last grew.
        slice_s, idle_s = min(self.interval_s() / 8, MAX_IDLE_S), max(MAX_IDLE_S, 3 * self.interval_s())
        while self.done < 1.0:
            level.advance(level.now + slice_s)
            if level.mixes > mixes:
                mixes, mixed_at = level.mixes, level.now
            elif level.now > mixed_at + idle_s:
                raise LocalError(
                    f"After {level.now:.0f} virtual seconds the peers have mixed {mixes / scenario.peers:.1f} times on "
                    f"average, and for {idle_s:.0f} s not at all: give duration_s, not rounds = {scenario.rounds:g}."
                )
            yield

    def interval_s(self) -> float:
        """Return the approximate time between two mixes of a peer, in virtual seconds."""
        gossip, step_s = self.scenario.gossip, self.scenario.compute.step_s.mean
        by_steps = math.inf if gossip.first_interval is None else gossip.first_interval * step_s
        return min(by_steps, gossip.mix_every_s or math.inf)


class ExchangeSimulation(RunningSimulation):
    """A simulation at the fast level, exchange by exchange."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        names = names_of(scenario)
        self.learners = learners = Learners(scenario.task, names, scenario.seed, scenario.config)
        if learners.parameters < learners.elements:
            raise Beyond(
                f"task.model = {scenario.task.model!r} has buffers, as the running statistics of BatchNorm are, which "
                "is beyond fidelity = 'exchange': use GroupNorm or LayerNorm, or play it with fidelity = 'whole'.",
                f"the fast level cannot represent the buffers of task.model = {scenario.task.model!r}",
            )
        weight = scenario.task.weight(learners.elements)  # Above 1 where the model stands for a larger one.
        network, machine = build_network(scenario, weight), machine_of(learners, weight)
        self.level: ExchangeLevel = ExchangeLevel(scenario, names, network, learners, sessions_of(scenario), machine)

    def check(self) -> None:
        if self.scenario.fidelity == "auto" and self.level.presence.is_stranded:
            raise Beyond(
                "No peer that holds weights is left, and the fast level begins no new run.",
                "the fast level begins no new run where no peer that holds weights is left",
            )


class Simulation(RunningSimulation):
    """A simulation at the whole level, message by message."""

    def __init__(self, scenario: Scenario, timeline: TimelineWriter | None = None) -> None:
        is_ideal = scenario.membership.mode == "ideal"
        if is_ideal and scenario.network.partitions:
            raise ConfigError(
                "network.partitions needs membership.mode = 'protocol': a perfect sampler knows of no cut network."
            )
        self.scenario = scenario
        seed, names = scenario.seed, names_of(scenario)
        self.names = names
        self.attackers = draw_attackers(scenario.attackers, names, seed)
        self.learners = Learners(scenario.task, names, seed, scenario.config)
        weight = scenario.task.weight(self.learners.elements)
        self.swarm = self.level = Swarm(
            seed, build_network(scenario, weight), with_scaled_deadlines(scenario.config, weight),
            trainer=self.learners if scenario.trains else None, ideal=is_ideal,
            machine=machine_of(self.learners, weight), timeline=timeline,
        )  # fmt: skip
        self.times = StepTimes(scenario.compute, seed, scenario.fleet)
        self.sessions = sessions_of(scenario)
        self.indices: list[int | None] = [None] * scenario.peers  # Index in the swarm, by row.
        self.populate()
        for cut in scenario.network.partitions:
            self.swarm.events.push(cut.at_s, self.on_cut, cut.groups)
            self.swarm.events.push(cut.until_s, self.swarm.heal)

    # -- churn and partitions ------------------------------------------------------------------------------------
    def populate(self) -> None:
        """Start the founders, and schedule the starts of all other peers."""
        spec = self.scenario.membership
        for row, sessions in enumerate(self.sessions):
            session = next(sessions, None)
            may_join_s = row * spec.join_every_s if spec.start == "seed" else 0.0
            while session is not None and session.until_s <= may_join_s:
                session = next(sessions, None)
            if session is None:
                continue
            at_s = max(session.from_s, may_join_s)
            if at_s == 0.0 and (spec.start == "together" or row == 0):
                self.on_start(row, session, sessions, founder=True)
            else:
                self.schedule_start(row, at_s, session, sessions)
        self.swarm.introduce()

    def schedule_start(self, row: int, at_s: float, session: Uptime, later: Iterator[Uptime]) -> None:
        """Schedule the start of a peer at ``at_s``; with TCP, others can reach it after its start-up time."""
        start_s = 0.0
        if self.swarm.network.congestion is not None:
            rng = random.Random(derive(self.swarm.seed, self.names[row], f"start at {at_s}"))
            start_s = rng.uniform(*START_S)
        self.swarm.events.push(at_s + start_s, self.on_start, row, session, later)

    def on_start(self, row: int, session: Uptime, later: Iterator[Uptime], founder: bool = False) -> None:
        """Start a peer. A peer that was there before returns as the same member and fetches the run's weights."""
        swarm, name, index = self.swarm, self.names[row], self.indices[row]
        seeds: list[int] = []
        if not founder and swarm.registry is None:
            present, nat = [host.index for host in swarm.alive()], swarm.network.nat
            if nat is not None:  # A peer behind a router is nobody's seed. Dead seeds keep a newcomer from a new run.
                dialable = [host.index for host in swarm.hosts if nat.is_dialable(host.name)]
                present = [index for index in present if index in dialable] or dialable
            rng = random.Random(derive(swarm.seed, name, f"seeds at {swarm.now}"))
            seeds = rng.sample(present, min(MAX_SEEDS, len(present)))
        if index is None:
            self.indices[row] = swarm.add_peer(
                self.learners.matrix[row], seeds, step_s=self.times.durations(name), name=name, founder=founder,
                samples_per_step=self.learners.samples_per_step, row=row, attacker=self.attackers.get(name),
            )  # fmt: skip
        else:
            swarm.restart(index, seeds)
        if math.isfinite(session.until_s):
            swarm.events.push(max(session.until_s, swarm.now), self.on_stop, row, session, later)

    def on_stop(self, row: int, session: Uptime, later: Iterator[Uptime]) -> None:
        """Stop a peer as its session says, and schedule its next start."""
        index = self.indices[row]
        assert index is not None, "a peer that stops has started"
        if session.farewell:
            self.swarm.leave(index)
        else:
            self.swarm.kill(index, session.silent)
        following = next(later, None)
        if following is not None:
            self.schedule_start(row, max(following.from_s, self.swarm.now), following, later)

    def on_cut(self, groups: int) -> None:
        """Partition the network into groups of consecutive rows, which also assigns peers that are not up yet."""
        size = self.scenario.peers
        self.swarm.partition([[row for row in range(size) if row * groups // size == group] for group in range(groups)])


def names_of(scenario: Scenario) -> list[str]:
    """Return the names of the peers, from which their randomness comes."""
    return [str(number) for number in range(scenario.peers)]


def sessions_of(scenario: Scenario) -> list[Iterator[Uptime]]:
    """Return the sessions of each peer in order of time."""
    churn = churn_of(scenario.churn, scenario.seed, scenario.peers)
    return [churn.sessions(name, index) for index, name in enumerate(names_of(scenario))]


def build_network(scenario: Scenario, weight: float) -> NetworkModel:
    """Return the network; ``weight`` is that of a byte, if the model stands for a larger one.

    Raises ConfigError if opening a link takes longer than the handshake timeout: real nodes could never connect.
    """
    is_ideal, gossip = scenario.membership.mode == "ideal", scenario.gossip
    network = network_of(scenario.network, scenario.seed, is_ideal, scenario.fleet, weight, gossip.connections)
    if scenario.network.nat is not None:
        network = dataclasses.replace(network, nat=Nat(scenario.network.nat, scenario.peers, scenario.seed))
    latencies, opening = (6, "six latencies to open with TLS") if network.tls else (4, "four latencies to open")
    if not is_ideal and latencies * network.longest_s >= gossip.hello_timeout_s:
        raise ConfigError(
            f"network.latency reaches {network.longest_s:g} s, and a link takes {opening}: set "
            f"gossip.stall_s above {latencies * network.longest_s:g} (a handshake may take "
            f"{gossip.hello_timeout_s:g} s)."
        )
    return network


def machine_of(learners: Learners, weight: float) -> Machine:
    """Return what exchanges cost each peer; an element of a vector stands for ``weight`` real ones."""
    return dataclasses.replace(COMPILED, element_weight=weight)


def with_scaled_deadlines(config: Config, weight: float) -> Config:
    """Return a config whose peers wait as long for streams as they do with the large model that the task stands for.

    ``weight`` is the number of that model's bytes for each byte here.
    """
    slowest = config.slowest_rate_mb_s
    return config if weight == 1.0 else dataclasses.replace(config, slowest_rate_mb_s=slowest / weight)


def simulate(
    scenario: Scenario,
    progress: bool | Callable[[Progress], None] = True,
    rows: RowHandler | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Result:
    """Simulate a scenario to its end and return the result.

    The same scenario gives the same history and digest on the same machine.

    Args:
        scenario: The scenario.
        progress: True shows a progress bar in a terminal or a notebook, False shows nothing. A function is called with
            a Progress at intervals.
        rows: Called with each row of the history as it is measured.
        trace: A file for the timeline of all peers, as Chrome trace events. The whole level plays it.

    Raises:
        ConfigError, DataError, LocalError: The scenario cannot be simulated; the message is one sentence.
        Stopped: ^C was pressed. It is a KeyboardInterrupt with the partial result.
    """
    if isinstance(progress, bool):
        if progress:
            from sim.report.progress_bar import Bar

            with Bar(scenario.name) as bar:
                return simulate(scenario, bar.update, rows, trace)
        progress = ignore
    with one_thread(), no_garbage_collection(), np.errstate(all="ignore"):  # A diverging model is a result, no error.
        return play(scenario, progress, rows or ignore, None if trace is None else Path(trace))


def play(scenario: Scenario, progress: Callable[[Progress], None], rows: RowHandler, trace: Path | None) -> Result:
    """Simulate a scenario at the level that it requests.

    With "auto", the fast level may find out during the run that it cannot represent the scenario. The simulation then
    restarts at the whole level, and ``rows`` receives rows from the beginning again.
    """
    if trace is not None:
        if scenario.fidelity == "exchange":
            raise ConfigError("A timeline needs the whole level: leave out fidelity = 'exchange', or the timeline.")
        with TimelineWriter(trace) as timeline:
            whole = Fidelity("whole", "a timeline is recorded")
            return play_at(whole, scenario, progress, rows, timeline)
    fidelity = fidelity_of(scenario)
    try:
        return play_at(fidelity, scenario, progress, rows)
    except Beyond as error:
        if scenario.fidelity != "auto":
            raise
        return play_at(Fidelity("whole", error.reason), scenario, progress, rows)


def play_at(
    fidelity: Fidelity, scenario: Scenario, progress: Callable[[Progress], None], rows: RowHandler,
    timeline: TimelineWriter | None = None,
) -> Result:  # fmt: skip
    """Simulate a scenario at one level. Raises Beyond if the fast level finds that it cannot represent it."""
    setup_at_s = time.process_time()
    is_fast = fidelity.level == "exchange"
    simulation = ExchangeSimulation(scenario) if is_fast else Simulation(scenario, timeline)
    setup_s = time.process_time() - setup_at_s
    level, history = simulation.level, list[dict[str, float]]()

    def add_row() -> None:
        history.append(simulation.row())
        rows(history[-1])

    add_row()
    row_share = 1 / ROWS  # Progress between two rows.
    if scenario.report.every_s is not None and scenario.duration_s is not None:
        row_share = scenario.report.every_s / scenario.duration_s
    next_row = row_share  # The progress at which the next row is due.
    began_at_s, cpu_at_s, shown_at, was_stopped = time.perf_counter(), time.process_time(), 0.0, False
    with interrupt.deferred():
        try:
            for _ in simulation.slices():
                simulation.check()
                done, now = simulation.done, time.perf_counter()
                if done >= next_row - ROUNDING_ALLOWANCE or done >= 1.0:
                    add_row()
                    rows_passed = math.ceil((done - next_row) / row_share + ROUNDING_ALLOWANCE)
                    next_row += row_share * max(1, rows_passed)  # A long slice may pass several.
                if now - shown_at > REDRAW_S or done >= 1.0:
                    shown_at, passed_s, events = now, now - began_at_s, level.handled_events
                    left_s = passed_s * (1 - done) / done if done > 0 else math.inf
                    progress(Progress(level.now, done, events, events / max(passed_s, 1e-9), left_s))
            interrupt.check()
        except KeyboardInterrupt:
            if interrupt.is_pending:  # The second ^C, perhaps in the middle of an event: no figure can be trusted.
                raise
            was_stopped = True
            if level.now > history[-1]["virtual_s"]:
                add_row()
    wall_s, cpu_s = time.perf_counter() - began_at_s, time.process_time() - cpu_at_s
    counts = level.counts()
    run = FinishedRun(
        level, counts, scenario, simulation.learners, history[-1], fidelity, wall_s=wall_s, cpu_s=cpu_s,
        setup_s=setup_s, peak_rss_mb=peak_rss_mb(), done=round(simulation.done, 4) if was_stopped else 1.0,
    )  # fmt: skip
    result = Result(scenario, history, summary_of(run), np.array(counts.durations_s, np.float64))
    if was_stopped:
        raise Stopped(result)
    return result


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the ``with`` block.

    It would walk a million entries of membership tables again and again, and find nothing: a swarm drops no cycles but
    the lives that peers have ended, which :meth:`sim.engine.swarm.Swarm.restart` collects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def ignore(_: object) -> None:
    """Do nothing; the default for ``progress`` and ``rows``."""


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
