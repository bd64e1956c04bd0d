"""How long the peers' exchanges take at the fast level: their choice of intervals, and the waits that are usual.

An *interval* is the local steps from one mix to the next. A peer that pays much for an exchange chooses a longer one.
"""

import dataclasses
import math
from typing import cast

from gossip.codecs import ExchangeCost, Machine
from gossip.exchange.durations import WAIT_PARTNERS, OwnResults, Waits, median
from gossip.exchange.exchanges import MAX_STREAM_RATIO
from gossip.ids import PeerId
from gossip.recent import Recent
from gossip.schedule import Schedule
from sim.exchanges.pair_exchange import INITIATOR, PairExchange


class Intervals:
    """The durations of the last exchanges that each peer initiated, by partner.

    ``cost`` is that of an exchange whose duration does not count, and ``machine`` the costs on each peer's machine.
    """

    def __init__(self, peers: int, cost: ExchangeCost, machine: Machine) -> None:
        self.cost, self.machine = cost, machine
        self.durations_s = [Recent[int, float](WAIT_PARTNERS) for _ in range(peers)]
        self.results = [OwnResults() for _ in range(peers)]

    def note_duration(self, peer: int, partner: int, seconds: float) -> None:
        """Record an exchange that the peer initiated, from its offer to its end."""
        self.durations_s[peer][partner] = seconds
        self.results[peer].add(failed=False)

    def note_failure(self, peer: int) -> None:
        """Record an exchange that the peer initiated and that failed."""
        self.results[peer].add(failed=True)

    def choose_interval(self, peer: int, schedule: Schedule, steps: int, boundary_at: float) -> None:
        """Let a peer choose its interval anew after a mix; its last boundary was after ``steps`` steps."""
        cost, durations_s = None, self.durations_s[peer]
        if durations_s:
            cost = dataclasses.replace(self.cost, seconds=median([durations_s[partner] for partner in durations_s]))
        schedule.adapt_interval(steps, boundary_at, cost, self.machine, self.results[peer].are_failing)

    def forget(self, peer: int) -> None:
        """Drop the durations of a peer that dies or leaves."""
        self.durations_s[peer].clear()
        self.results[peer] = OwnResults()


class UsualWaits:
    """The waits of each peer for answers to its offers, and for streams with their commits."""

    def __init__(self) -> None:
        self.answers: dict[int, Waits] = {}
        self.streams: dict[int, Waits] = {}

    def add(self, exchange: PairExchange, side: int, now: float) -> None:
        """Record the waits of an exchange that has ended for one side."""
        peer, partner = exchange.peer_and_partner(side)
        self.streams.setdefault(peer, Waits()).add(cast(PeerId, partner), now - exchange.streams_at(peer))
        if side == INITIATOR:
            answer_s = exchange.accept_arrives_at - exchange.offered_at
            self.answers.setdefault(peer, Waits()).add(cast(PeerId, partner), answer_s)

    def are_answers_long(self, peer: int) -> bool:
        """Return True if answers take so much of the time of an exchange that mixes may overlap."""
        answers, streams = self.answers.get(peer), self.streams.get(peer)
        if answers is None or streams is None:
            return False
        return streams.median_s <= MAX_STREAM_RATIO * answers.median_s < math.inf

    def forget(self, peer: int) -> None:
        """Drop the waits of a peer that dies or leaves."""
        self.answers.pop(peer, None)
        self.streams.pop(peer, None)
