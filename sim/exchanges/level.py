"""The fast level as a whole: decisions, models, and the interface through which reports measure the swarm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gossip.codecs import AUTO, COMPILED, Codec, Machine, Taken, get_codec
from gossip.config import Config
from gossip.exchange.durations import MIN_WAIT_LIMIT_S
from sim.engine.events import Events
from sim.exchanges.acceptance import Acceptance
from sim.exchanges.clocks import ConstantClocks, DrawnClocks
from sim.exchanges.control import Control
from sim.exchanges.intervals import Intervals
from sim.exchanges.models import Models
from sim.exchanges.presence import Presence
from sim.exchanges.streams import Sizes, StreamTimes, is_instant
from sim.exchanges.tape import Tape
from sim.learning.learners import Learners
from sim.scenario.scenario import Scenario
from sim.seeds import Draws
from sim.world.churn import Uptime
from sim.world.network import NetworkModel
from sim.world.step_times import StepTimes

__all__ = ["ExchangeLevel"]

I64 = NDArray[np.int64]
# Exchanges decided before the models follow: EACH per peer, but at least ALL in total, because every batch must find
# the exchanges in progress and leave them on the tape. A tape entry takes 100 bytes.
EACH, ALL = 8, 1 << 15


class ExchangeLevel:
    """A swarm simulated exchange by exchange.

    ``sessions`` has the times at which each of the peers ``names`` is up, and ``machine`` the costs on each machine.
    """

    def __init__(
        self, scenario: Scenario, names: Sequence[str], network: NetworkModel, learners: Learners,
        sessions: Sequence[Iterator[Uptime]], machine: Machine = COMPILED,
    ) -> None:  # fmt: skip
        seed, peers = scenario.seed, len(names)
        self.scenario, self.learners = scenario, learners
        self.events, self.tape = Events(), Tape()
        times = StepTimes(scenario.compute, seed, scenario.fleet)
        alike = scenario.compute.per == "peer" or all(
            step_s.kind == "constant" for step_s in (scenario.compute.step_s, *times.own.values())
        )
        self.clocks = ConstantClocks(peers) if alike else DrawnClocks(peers)
        for name in names:
            network.add(name)
        codec = codec_of(scenario.config, is_instant(network, peers))
        self.sizes = Sizes(codec.name, learners.elements)
        slow = scenario.compute.step_s.mean > MIN_WAIT_LIMIT_S / 2
        self.streams = StreamTimes(network, network.bytes_of(self.sizes.stream), names, seed, slow)
        draws = [Draws(seed, name, "exchanges") for name in names]
        intervals = None
        if scenario.config.auto_interval:
            intervals = Intervals(peers, Taken(learners.elements, codec.name, self.sizes.stream, 0.0), machine)
        self.control = Control(self.events, scenario.config, self.clocks, self.streams, self.tape, draws, intervals)
        self.streams.moving = self.control.moving
        self.acceptance = Acceptance(scenario.config, peers, learners.elements, self.control.ready)
        self.models = Models(learners, scenario.config, codec, self.tape, self.acceptance)
        self.most = 4 * max(EACH * peers, ALL)  # entries of the tape
        self.presence = Presence(
            self.events, scenario.config, self.clocks, self.streams, self.tape, self.control, names, seed,
            learners.elements,
        )  # fmt: skip
        for peer, name in enumerate(names):
            self.clocks.add(peer, times.durations(name))
        self.presence.populate(sessions)

    # -- time ----------------------------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        """Return the virtual time in seconds since the swarm was created."""
        return self.events.now

    def run_until(self, when: float) -> None:
        """Make all decisions up to ``when``. The models follow only when the tape is long or a result is read."""
        self.events.run_until(when)
        if len(self.tape.rows) > self.most:
            self.models.play(self.done(), cut=False)
            self.streams.bytes_sent(self.now)  # frees the list of streams that have begun

    def done(self) -> I64:
        """Return how many steps of each peer have ended, shape (peers,)."""
        ready, done = np.array(self.control.ready), np.array(self.presence.steps)
        rows = np.flatnonzero(ready)
        done[rows] = self.clocks.done(rows, self.now)
        return done

    def settle(self) -> None:
        """Bring every model up to date, including the steps in progress."""
        done = self.done()
        self.models.play(done)
        rows = np.flatnonzero(self.control.ready)
        self.models.train(rows, done[rows] + 1)

    # -- questions -----------------------------------------------------------------------------------------------
    @property
    def handled(self) -> int:
        return self.events.handled

    @property
    def alive(self) -> int:
        return len(self.control.alive)

    @property
    def ready(self) -> int:
        return sum(self.control.ready)

    @property
    def steps(self) -> int:
        return int(self.done().sum())

    @property
    def interval_steps(self) -> int | None:
        """Return the local steps between two mixes, of the median peer that is ready."""
        found = sorted(self.control.every(peer) for peer in self.control.alive)
        return found[len(found) // 2] if found else self.control.config.first_interval

    @property
    def mixes(self) -> int:
        return self.control.mixes - self.acceptance.failed

    @property
    def exchanges(self) -> float:
        return (self.control.mixes - self.acceptance.failed) / 2

    @property
    def failed(self) -> int:
        return self.control.failed + self.acceptance.failed

    @property
    def bytes_sent(self) -> int:
        control, sizes, fetched = self.control, self.sizes, self.presence.fetched
        said = control.offers * sizes.offer + control.busy * sizes.busy + fetched * sizes.piece
        return self.streams.bytes_sent(self.now) + said + control.accepts * (sizes.accept + 2 * sizes.commit)

    @property
    def durations_s(self) -> list[float]:
        return self.streams.durations_s

    def refused(self) -> dict[str, int]:
        return dict(self.acceptance.total())

    def digest(self) -> str:
        whole = self.tape.digest()
        whole.update(self.learners.matrix.reshape(-1).data)
        return whole.hexdigest()

    def honest(self) -> I64:
        """Return the rows of the peers whose models are measured."""
        return np.flatnonzero(self.control.ready)


def codec_of(config: Config, instant: bool) -> Codec:
    """Return the codec of all exchanges. With "auto" it is the one that peers come to choose for nearly all of them.

    They choose int8 wherever a vector takes a measurable time, and bf16 as long as it takes none.
    """
    return get_codec(("bf16" if instant else "int8") if config.codec_name == AUTO else config.codec_name)
