"""The simulation of a scenario: build the swarm, advance virtual time, and record rows of measurements."""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gossip.codecs import COMPILED
from gossip.config import Config
from gossip.errors import ConfigError, LocalError
from gossip.timeline import TimelineWriter
from sim.engine.level import WholeLevel
from sim.engine.swarm import Swarm
from sim.exchanges.level import ExchangeLevel
from sim.learning.learners import Learners
from sim.report.measures import Level
from sim.report.result import Progress, Result
from sim.report.rows import Measures
from sim.scenario.adversaries import liars
from sim.scenario.fidelity import Beyond, Fidelity, fidelity_of
from sim.scenario.scenario import Scenario
from sim.seeds import derive
from sim.threads import one_thread
from sim.world.churn import Uptime, churn_of
from sim.world.network import NetworkModel, network_of
from sim.world.step_times import StepTimes

__all__ = ["Simulation", "Stopped", "simulate"]

SLICES = 400  # slices of a run with a duration, after each of which progress is shown
ROWS = 40  # rows of the history, unless the report sets an interval
SEEDS = 3  # seeds for a peer that starts during the run
PATIENCE_S = 600.0  # virtual seconds without a mix after which a run with a number of rounds gives up
REDRAW_S = 0.1
START_S = 0.03, 0.1  # start-up time of a node: keys, thread and socket take 20 to 45 ms of CPU time


@dataclass(slots=True)
class Spent:
    """A point in time, or the time spent since another one."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Spent) -> Spent:
        return Spent(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s)


class Stopped(KeyboardInterrupt):
    """^C during a simulation; ``result`` is the partial result, as if the run had ended there."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


class Played:
    """A simulation in progress, at any level.

    :meth:`slices` advances it, and :class:`sim.report.measures.Measures` measures it.
    """

    scenario: Scenario
    level: Level
    measures: Measures

    @property
    def done(self) -> float:
        """Return the progress of the run, 0 to 1."""
        scenario = self.scenario
        if scenario.duration_s is not None:
            return min(1.0, self.level.now / scenario.duration_s)
        assert scenario.rounds is not None
        return min(1.0, self.level.mixes / (scenario.rounds * scenario.peers))

    def slices(self) -> Iterator[None]:
        """Advance the simulation slice by slice until it is done, yielding after each slice."""
        scenario, level = self.scenario, self.level
        if scenario.duration_s is not None:
            for number in range(1, SLICES + 1):
                level.run_until(scenario.duration_s * number / SLICES)
                yield
            return
        slice_s, mixes, mixed_at = self.interval_s() / 8, 0, 0.0
        while self.done < 1.0:
            level.run_until(level.now + slice_s)
            if level.mixes > mixes:
                mixes, mixed_at = level.mixes, level.now
            elif level.now > mixed_at + PATIENCE_S:
                raise LocalError(
                    f"After {level.now:.0f} virtual seconds the peers have mixed {mixes / scenario.peers:.1f} times on "
                    f"average, and for {PATIENCE_S:.0f} s not at all: rounds = {scenario.rounds:g} is never reached."
                )
            yield

    @property
    def stranded(self) -> bool:
        """Return True if joining peers wait for weights that no peer has any more."""
        return False

    def interval_s(self) -> float:
        """Return the approximate time between two mixes of a peer, in virtual seconds."""
        gossip, step_s = self.scenario.gossip, self.scenario.compute.step_s.mean
        by_steps = math.inf if gossip.first_interval is None else gossip.first_interval * step_s
        return min(by_steps, gossip.mix_every_s or math.inf)


class ExchangeSimulation(Played):
    """A simulation at the fast level, exchange by exchange."""

    def __init__(self, scenario: Scenario, device: str = "cpu") -> None:
        self.scenario = scenario
        names = [str(index) for index in range(scenario.peers)]
        learners = Learners(scenario.task, names, scenario.seed, device=device, config=scenario.config)
        if learners.parameters < learners.elements:
            raise Beyond(
                f"task.model = {scenario.task.model!r} has buffers, as the running statistics of BatchNorm are, which "
                "is beyond fidelity = 'exchange': use GroupNorm or LayerNorm, or play it with fidelity = 'whole'.",
                f"the fast level cannot represent the buffers of task.model = {scenario.task.model!r}",
            )
        weight = scenario.task.weight(learners.elements)
        ideal = scenario.membership.mode == "ideal"
        network = network_of(
            scenario.network, scenario.seed, ideal, scenario.fleet, weight, scenario.gossip.connections
        )
        if not ideal:
            check_latency(scenario, network)
        churn = churn_of(scenario.churn, scenario.seed, scenario.peers)
        sessions = [churn.sessions(name, index) for index, name in enumerate(names)]
        self.exchanges = ExchangeLevel(
            scenario, names, network, learners, sessions, dataclasses.replace(COMPILED, weight=weight)
        )
        self.level = self.exchanges
        self.measures = Measures(self.level, scenario, learners)

    @property
    def stranded(self) -> bool:
        return self.exchanges.presence.stranded


class Simulation(Played):
    """A simulation at the whole level, message by message."""

    def __init__(
        self, scenario: Scenario, device: str = "cpu", timeline: TimelineWriter | None = None
    ) -> None:  # fmt: skip
        ideal = scenario.membership.mode == "ideal"
        if ideal and scenario.network.partitions:
            raise ConfigError(
                "network.partitions needs membership.mode = 'protocol': a perfect sampler knows of no cut network."
            )
        self.scenario = scenario
        seed, names = scenario.seed, [str(index) for index in range(scenario.peers)]
        self.names = names
        self.liars = liars(scenario.attackers, names, seed)
        self.learners = Learners(scenario.task, names, seed, device=device, config=scenario.config)
        weight = scenario.task.weight(self.learners.elements)
        network = network_of(scenario.network, seed, ideal, scenario.fleet, weight, scenario.gossip.connections)
        if not ideal:
            check_latency(scenario, network)
        self.swarm = Swarm(
            seed, network, patient(scenario.config, weight), trainer=self.learners if scenario.trains else None,
            ideal=ideal, parameters=self.learners.parameters, machine=dataclasses.replace(COMPILED, weight=weight),
        )  # fmt: skip
        self.swarm.timeline = timeline
        self.times = StepTimes(scenario.compute, seed, scenario.fleet)
        churn = churn_of(scenario.churn, seed, scenario.peers)
        self.sessions = [churn.sessions(name, index) for index, name in enumerate(names)]
        self.indices: list[int | None] = [None] * scenario.peers  # index in the swarm, by row
        self.populate()
        self.level = WholeLevel(self.swarm)
        self.measures = Measures(self.level, scenario, self.learners)
        for cut in scenario.network.partitions:
            self.swarm.events.push(cut.at_s, self.cut, cut.groups)
            self.swarm.events.push(cut.until_s, self.swarm.heal)

    # -- churn and partitions ------------------------------------------------------------------------------------
    def populate(self) -> None:
        spec = self.scenario.membership
        for row, sessions in enumerate(self.sessions):
            session = next(sessions, None)
            if session is None:
                continue
            at_s = session.from_s
            if spec.start == "seed":
                at_s = max(at_s, row * spec.join_every_s)
            if at_s == 0.0 and (spec.start == "together" or row == 0):
                self.come(row, session, sessions, founder=True)
            else:
                self.swarm.events.push(at_s + self.start_s(row, at_s), self.come, row, session, sessions)
        self.swarm.introduce()

    def start_s(self, row: int, at_s: float) -> float:
        """Return how long a peer that starts at ``at_s`` takes until others can reach it, in s; 0 without TCP."""
        if self.swarm.network.congestion is None:
            return 0.0
        low, high = START_S
        return random.Random(derive(self.swarm.seed, self.names[row], f"start at {at_s}")).uniform(low, high)

    def come(self, row: int, session: Uptime, sessions: Iterator[Uptime], founder: bool = False) -> None:
        """Start a peer. A peer that was there before returns as the same member and fetches the run's weights."""
        swarm, name = self.swarm, self.names[row]
        seeds: list[int] = []
        if not founder and swarm.registry is None:
            present = [host.index for host in swarm.hosts if not host.gone]
            rng = random.Random(derive(swarm.seed, name, f"seeds at {swarm.now}"))
            seeds = rng.sample(present, min(SEEDS, len(present)))
        known = self.indices[row]
        if known is None:
            self.indices[row] = swarm.add_peer(
                self.learners.matrix[row], seeds, step_s=self.times.durations(name), name=name, founder=founder,
                samples_per_step=self.learners.samples_per_step, row=row, liar=self.liars.get(name),
            )  # fmt: skip
        else:
            swarm.revive(known, seeds)
        if math.isfinite(session.until_s):
            swarm.events.push(max(session.until_s, swarm.now), self.go, row, session, sessions)

    def go(self, row: int, session: Uptime, sessions: Iterator[Uptime]) -> None:
        index = self.indices[row]
        assert index is not None, "a peer that goes has come"
        if session.farewell:
            self.swarm.leave(index)
        else:
            self.swarm.kill(index, session.silent)
        following = next(sessions, None)
        if following is not None:
            at_s = max(following.from_s, self.swarm.now)
            self.swarm.events.push(at_s + self.start_s(row, at_s), self.come, row, following, sessions)

    def cut(self, groups: int) -> None:
        """Partition the network into groups of consecutive rows, which also assigns peers that are not up yet."""
        size = self.scenario.peers
        self.swarm.partition([[row for row in range(size) if row * groups // size == group] for group in range(groups)])


def check_latency(scenario: Scenario, network: NetworkModel) -> None:
    """Raise ConfigError if opening a link takes longer than the handshake timeout: real nodes could never connect."""
    latencies, takes = (6, "six latencies to open with TLS") if network.tls else (4, "four latencies to open")
    if latencies * network.longest_s >= scenario.gossip.hello_timeout_s:
        raise ConfigError(
            f"network.latency reaches {network.longest_s:g} s, and a link takes {takes}: set "
            f"gossip.stall_s above {latencies * network.longest_s:g} (a handshake may take "
            f"{scenario.gossip.hello_timeout_s:g} s)."
        )


def patient(config: Config, weight: float) -> Config:
    """Return a config whose peers wait for streams as long as peers with the large model that the task stands for."""
    slowest = config.slowest_rate_mb_s
    return config if weight == 1.0 else dataclasses.replace(config, slowest_rate_mb_s=slowest / weight)


def simulate(
    scenario: Scenario,
    progress: bool | Callable[[Progress], None] = True,
    device: str = "cpu",
    rows: Callable[[dict[str, float]], None] | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Result:
    """Simulate a scenario to its end and return the result.

    The same scenario gives the same history and digest on the same machine.

    Args:
        scenario: The scenario.
        progress: True shows a progress bar in a terminal or a notebook, False shows nothing. A function is called with
            a Progress at intervals.
        device: The torch device; only "cpu" works.
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
                return simulate(scenario, bar.update, device, rows, trace)
        progress = ignore
    with one_thread(), uncollected(), np.errstate(all="ignore"):  # a diverging model is a result and no error
        return play(scenario, progress, device, rows or ignore, None if trace is None else Path(trace))


def play(
    scenario: Scenario, progress: Callable[[Progress], None], device: str, rows: Callable[[dict[str, float]], None],
    trace: Path | None,
) -> Result:  # fmt: skip
    """Simulate a scenario at the level that it requests.

    With "auto", the fast level may find out during the run that it cannot represent the scenario. The simulation then
    restarts at the whole level, and ``rows`` receives rows from the beginning again.
    """
    if trace is not None:
        if scenario.fidelity == "exchange":
            raise ConfigError("A timeline needs the whole level: leave out fidelity = 'exchange', or the timeline.")
        with TimelineWriter(trace) as timeline:
            whole = Fidelity("whole", "a timeline is recorded")
            return play_at(whole, scenario, progress, device, rows, timeline)
    fidelity = fidelity_of(scenario)
    try:
        return play_at(fidelity, scenario, progress, device, rows)
    except Beyond as error:
        if scenario.fidelity != "auto":
            raise
        return play_at(Fidelity("whole", error.reason), scenario, progress, device, rows)


def play_at(
    fidelity: Fidelity, scenario: Scenario, progress: Callable[[Progress], None], device: str,
    rows: Callable[[dict[str, float]], None], timeline: TimelineWriter | None = None,
) -> Result:  # fmt: skip
    start = Spent.now()
    simulation: ExchangeSimulation | Simulation
    if fidelity.level == "exchange":
        simulation = ExchangeSimulation(scenario, device)
    else:
        simulation = Simulation(scenario, device, timeline)
    setup = Spent.now().since(start)
    level, measures, history = simulation.level, simulation.measures, list[dict[str, float]]()

    def look() -> None:
        history.append(measures.row())
        rows(history[-1])

    look()
    every = 1 / ROWS
    if scenario.report.every_s is not None and scenario.duration_s is not None:
        every = scenario.report.every_s / scenario.duration_s
    due, started, shown_at, stopped = every, Spent.now(), 0.0, False
    try:
        for _ in simulation.slices():
            if scenario.fidelity == "auto" and simulation.stranded:
                raise Beyond(
                    "No peer that holds weights is left, and the fast level begins no new run.",
                    "the fast level begins no new run where no peer that holds weights is left",
                )
            done, now = simulation.done, time.perf_counter()
            if done >= due - 1e-9 or done >= 1.0:
                look()
                due += every * max(1, math.ceil((done - due) / every + 1e-9))
            if now - shown_at > REDRAW_S or done >= 1.0:
                shown_at, passed_s = now, now - started.wall_s
                left_s = passed_s * (1 - done) / done if done > 0 else math.inf
                events = level.handled
                progress(Progress(level.now, done, events, events / max(passed_s, 1e-9), left_s))
    except KeyboardInterrupt:
        stopped = True  # perhaps in the middle of an event, so no further row can be measured
    spent = Spent.now().since(started)
    summary = measures.summary(
        history[-1], fidelity, done=round(simulation.done, 4) if stopped else 1.0, wall_s=spent.wall_s,
        cpu_s=spent.cpu_s, setup_s=setup.cpu_s, peak_rss_mb=peak_rss_mb(),
    )  # fmt: skip
    durations: NDArray[np.float64] = np.array(level.durations_s)
    result = Result(scenario, history, summary, durations)
    if stopped:
        raise Stopped(result)
    return result


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the ``with`` block.

    It would walk a million entries of membership tables again and again, and find nothing: a swarm drops no cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def ignore(_seen: object) -> None:
    """Do nothing; the default for ``progress`` and ``rows``."""


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
