"""The fast level as a whole: decisions, models, and the interface through which reports measure the swarm.

Decisions run ahead and log the arithmetic on a tape, which the models replay (:mod:`sim.exchanges.tape`).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from gossip.codecs import AUTO, COMPILED, Codec, ExchangeCost, Machine, fastest_codec, get_codec
from gossip.config import Config
from gossip.exchange.durations import MIN_WAIT_LIMIT_S
from sim.arrays import I64
from sim.engine.events import Events
from sim.exchanges.acceptance import Acceptance
from sim.exchanges.clocks import ConstantClocks, DrawnClocks
from sim.exchanges.decisions import Decisions
from sim.exchanges.intervals import Intervals
from sim.exchanges.models import Models
from sim.exchanges.presence import Presence
from sim.exchanges.streams import Sizes, StreamTimes
from sim.exchanges.tape import Tape
from sim.learning.learners import Learners
from sim.level import Counts
from sim.scenario.scenario import Scenario
from sim.seeds import Draws
from sim.world.churn import Uptime
from sim.world.network import NetworkModel
from sim.world.step_times import StepTimes

# The tape is replayed once it is longer than both. Exchanges in progress stay on it; they are a smaller share of a
# longer tape. An entry takes 100 bytes.
ENTRIES_PER_PEER, MIN_ENTRIES = 32, 1 << 17


class ExchangeLevel:
    """A swarm simulated exchange by exchange.

    ``sessions`` has the times at which each of the peers ``names`` is up, and ``machine`` the costs of an exchange to
    each peer's machine.
    """

    def __init__(
        self, scenario: Scenario, names: Sequence[str], network: NetworkModel, learners: Learners,
        sessions: Sequence[Iterator[Uptime]], machine: Machine = COMPILED,
    ) -> None:  # fmt: skip
        seed, peers, config = scenario.seed, len(names), scenario.config
        self.learners = learners
        self.events, self.tape = Events(), Tape()
        step_times = StepTimes(scenario.compute, seed, scenario.fleet)
        distributions = scenario.compute.step_s, *step_times.own_step_s.values()
        constant = scenario.compute.per == "peer" or all(step_s.kind == "constant" for step_s in distributions)
        self.clocks = ConstantClocks(peers) if constant else DrawnClocks(peers)
        for peer, name in enumerate(names):
            network.add(name)
            self.clocks.add(peer, step_times.durations(name))
        codec = codec_of(config)
        self.sizes = Sizes(codec.name, learners.elements)
        # A peer answers at its next boundary, so such steps may make a wait longer than the shortest limit of waits.
        has_slow_steps = scenario.compute.step_s.mean > MIN_WAIT_LIMIT_S / 2
        vector_bytes = network.bytes_of(self.sizes.vector_bytes)
        self.streams = StreamTimes(network, vector_bytes, names, seed, has_slow_steps)
        draws = [Draws(seed, name, "exchanges") for name in names]
        intervals = None
        if config.auto_interval:
            cost = ExchangeCost(learners.elements, codec.name, self.sizes.vector_bytes, 0.0)
            intervals = Intervals(peers, cost, machine)
        self.decisions = Decisions(self.events, config, self.clocks, self.streams, self.tape, draws, intervals)
        self.streams.used_slots = self.decisions.slots.used
        self.acceptance = Acceptance(config, names, learners.elements, self.decisions.ready, seed)
        self.models = Models(learners, config, codec, self.tape, self.acceptance)
        self.max_entries = max(ENTRIES_PER_PEER * peers, MIN_ENTRIES)
        self.presence = Presence(
            self.events, config, self.clocks, self.streams, self.tape, self.decisions, names, seed, learners.elements
        )
        self.presence.populate(sessions)

    # -- time ----------------------------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        """Return the virtual time in seconds since the swarm was created."""
        return self.events.now

    def advance(self, when: float) -> None:
        """Make all decisions up to ``when``. The models follow only when the tape is long or a result is read."""
        self.events.run_until(when)
        if len(self.tape.rows) > self.max_entries:
            self.models.replay(self.steps_done(), splits=False)
            self.streams.sent_bytes(self.now)  # Frees the list of streams that have begun.

    def steps_done(self) -> I64:
        """Return how many steps of each peer have ended, shape (peers,)."""
        steps, rows = np.array(self.presence.steps), self.honest_rows()
        steps[rows] = self.clocks.steps_done(rows, self.now)
        return steps

    def update_models(self) -> None:
        """Bring every model up to date, including the steps in progress."""
        steps, rows = self.steps_done(), self.honest_rows()
        self.models.replay(steps)
        self.models.train_until(rows, steps[rows] + 1)

    # -- figures -------------------------------------------------------------------------------------------------
    @property
    def handled_events(self) -> int:
        return self.events.handled_events

    @property
    def mixes(self) -> int:
        return self.decisions.mixes - self.acceptance.failures

    def honest_rows(self) -> I64:
        """Return the rows of the ready peers, none of which attacks at this level."""
        return np.flatnonzero(self.decisions.ready)

    def counts(self) -> Counts:
        decisions, acceptance = self.decisions, self.acceptance
        intervals = sorted(decisions.interval_steps(peer) for peer in decisions.alive)
        return Counts(
            live_peers=len(decisions.alive), ready_peers=sum(decisions.ready), honest_rows=self.honest_rows(),
            steps=int(self.steps_done().sum()),
            interval_steps=intervals[len(intervals) // 2] if intervals else decisions.config.interval_steps,
            exchanges=self.mixes / 2, failures=decisions.failures + acceptance.failures, sent_bytes=self.sent_bytes(),
            durations_s=self.streams.durations.seconds, refusals=dict(acceptance.refusals()),
        )  # fmt: skip

    def sent_bytes(self) -> int:
        decisions, sizes = self.decisions, self.sizes
        answers = decisions.refusals * sizes.busy_bytes + decisions.accepts * sizes.accept_bytes
        commits = 2 * decisions.accepts * sizes.commit_bytes
        pieces = self.presence.requested_pieces * sizes.piece_bytes
        messages = decisions.offers * sizes.offer_bytes + answers + commits + pieces
        if (moments := self.models.moments) is not None:
            messages += self.streams.network.bytes_of(moments.encoded_bytes) + moments.parts * sizes.piece_bytes
        return self.streams.sent_bytes(self.now) + messages

    def digest(self) -> str:
        digest = self.tape.digest()
        digest.update(self.learners.matrix.reshape(-1).data)
        return digest.hexdigest()


def codec_of(config: Config) -> Codec:
    """Return the codec of all exchanges. With "auto" it is the one that peers choose at first, and on most links."""
    return get_codec(fastest_codec(None, COMPILED) if config.codec_name == AUTO else config.codec_name)
