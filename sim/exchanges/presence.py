"""Peers that come and go at the fast level: they start, join by fetching the weights from donors, and stop."""

import math
import random
from collections.abc import Iterator, Sequence

from gossip.codecs import get_codec
from gossip.config import Config
from gossip.filters.rule import MIN_ELEMENTS
from gossip.selection.rule import uniform
from gossip.state_transfer.comparing import MIN_DONORS
from sim.engine.events import Events
from sim.exchanges.clocks import Clocks
from sim.exchanges.decisions import Decisions
from sim.exchanges.streams import StreamTimes
from sim.exchanges.tape import ADOPT, DROP, GIVE, MAX_SIDES, Tape
from sim.seeds import derive
from sim.world.churn import Uptime

RETRY_S = 1.0  # Interval at which a newcomer that found no donor looks again.


class Presence:
    """The starts, joins and stops of all peers.

    A peer that stops and starts again begins a new life; lives are numbered from 0. An event that was scheduled in a
    life that has ended starts nothing in the next. ``steps[peer]`` holds a peer's steps so far while it is not ready;
    it takes none then.

    The entries of a join on the tape share one number: GIVE for each donor's snapshot, then ADOPT by the newcomer, or
    DROP if the join has failed (:mod:`sim.exchanges.tape`).
    """

    def __init__(
        self, events: Events, config: Config, clocks: Clocks, streams: StreamTimes, tape: Tape, decisions: Decisions,
        names: Sequence[str], seed: int, elements: int,
    ) -> None:  # fmt: skip
        self.events, self.config, self.clocks, self.streams, self.tape = events, config, clocks, streams, tape
        self.decisions, self.names, self.seed, self.elements = decisions, names, seed, elements
        self.codec = get_codec("fp32")  # The codec of pieces.
        self.lives = [0] * len(names)  # Number of the present life, by peer.
        self.steps = [0] * len(names)
        self.life_ends: list[list[float]] = [[] for _ in names]  # End time of each life, by peer.
        self.requested_pieces = 0
        self.is_stranded = False  # A newcomer found no ready peer at all; real peers would begin a new run.

    def populate(self, sessions: Sequence[Iterator[Uptime]]) -> None:
        """Start the peers that are up at time 0 as founders with one model, and schedule the starts of the others.

        ``sessions`` yields the times from start to stop of each peer's lives.
        """
        for peer, uptimes in enumerate(sessions):
            uptime = next(uptimes, None)
            if uptime is None:
                continue
            if uptime.from_s:
                self.events.push(uptime.from_s, self.on_start, peer, uptime, uptimes)
            else:
                self.on_start(peer, uptime, uptimes, founder=True)

    def on_start(self, peer: int, uptime: Uptime, later: Iterator[Uptime], founder: bool = False) -> None:
        """Start a peer at a random phase of its first step."""
        life, now = self.lives[peer], self.events.now
        self.decisions.alive.add(peer)
        draws_name = f"{self.names[peer]}/{life}" if life else self.names[peer]
        phase = random.Random(derive(self.seed, draws_name, "phase")).random()
        self.clocks.begin(peer, self.steps[peer], now, phase)
        if founder:
            self.decisions.begin(peer)
        else:
            self.join(peer, life)
        if math.isfinite(uptime.until_s):
            self.events.push(max(uptime.until_s, now), self.on_stop, peer, later)

    def on_stop(self, peer: int, later: Iterator[Uptime]) -> None:
        """Stop a peer, with or without a farewell. The step in progress is still computed: its batch is used up."""
        now, decisions = self.events.now, self.decisions
        if decisions.ready[peer]:
            self.steps[peer] = self.clocks.next_boundary(peer, now)
            decisions.end(peer, self.steps[peer])
        self.lives[peer] += 1
        self.life_ends[peer].append(now)
        decisions.alive.remove(peer)
        uptime = next(later, None)
        if uptime is not None:
            self.events.push(max(uptime.from_s, now), self.on_start, peer, uptime, later)

    # -- joining -------------------------------------------------------------------------------------------------
    def join(self, peer: int, life: int) -> None:
        """Fetch the weights in pieces from several ready peers, the donors; without any, try again later."""
        if life != self.lives[peer]:  # The peer has stopped since this attempt was scheduled.
            return
        streams, now = self.streams, self.events.now
        donors = self.choose_donors(peer)
        if not donors:
            self.is_stranded = self.is_stranded or not any(self.decisions.ready)
            self.events.push(now + RETRY_S, self.join, peer, life)
            return
        # The newcomer first asks all donors which weights they have: a round trip.
        surveyed_at = now + max(
            streams.message_s(peer, donor, now) + streams.message_s(donor, peer, now) for donor in donors
        )
        ranges = self.divide(len(donors))
        donors = donors[: len(ranges)]
        number = self.tape.new_exchange(peer)
        self.tape.piece_ranges[number] = ranges
        snapshots_at, arrivals = [], []
        for place, (donor, (start, stop)) in enumerate(zip(donors, ranges, strict=True)):
            snapshot_at, arrives_at = self.fetch(peer, donor, stop - start, surveyed_at, (number, place))
            snapshots_at.append(snapshot_at)
            arrivals.append(arrives_at)
        complete_at = max(arrivals)
        if len(donors) >= MIN_DONORS:  # Each donor also sends a chunk of another donor's piece, for comparison.
            sizes = [min(stop - start, self.config.chunk_elements) for start, stop in ranges]
            complete_at = max(
                self.fetch(peer, donor, size, complete_at, None)[1] for donor, size in zip(donors, sizes, strict=True)
            )
        lives = [self.lives[donor] for donor in donors]
        donations = list(zip(donors, lives, snapshots_at, strict=True))
        self.events.push(complete_at, self.on_fetched, peer, life, number, donations)

    def choose_donors(self, peer: int) -> list[int]:
        """Draw the donors of a newcomer from the ready peers."""
        decisions = self.decisions
        decisions.selecting = peer  # So that is_candidate(), which gets only the candidate, answers for this peer.
        donors: list[int] = []
        for _ in range(min(self.config.internal.donors, MAX_SIDES)):
            donor = uniform(decisions.alive, decisions.rngs[peer], decisions.is_candidate, donors)
            if donor is None:
                break
            donors.append(donor)
        return donors

    def divide(self, donors: int) -> list[tuple[int, int]]:
        """Return the element ranges of at most this many pieces, of whole chunks as far as possible."""
        chunk = self.config.chunk_elements
        size = max(math.ceil(self.elements / donors), MIN_ELEMENTS)
        size = size if size < chunk else math.ceil(size / chunk) * chunk
        return [(start, min(start + size, self.elements)) for start in range(0, self.elements, size)]

    def fetch(
        self, peer: int, donor: int, elements: int, asked_at: float, join_and_place: tuple[int, int] | None
    ) -> tuple[float, float]:
        """Return when a donor takes its snapshot, and when ``elements`` of it have arrived.

        ``join_and_place`` is the number of the join and the donor's place in it; None if the snapshot is only compared.
        """
        steps = self.clocks.next_boundary(donor, asked_at + self.streams.message_s(peer, donor, asked_at))
        snapshot_at = self.clocks.time_of(donor, steps)
        if join_and_place is not None:
            self.tape.append(donor, steps, GIVE, *join_and_place)
        self.requested_pieces += 1
        size_bytes = self.streams.network.bytes_of(self.codec.encoded_bytes(elements))
        return snapshot_at, snapshot_at + self.streams.stream_s(donor, peer, snapshot_at, size_bytes)

    def on_fetched(self, peer: int, life: int, number: int, donations: list[tuple[int, int, float]]) -> None:
        """Use the complete weights at the next boundary, or start again if a donor died before its snapshot.

        ``donations`` holds each donor with its life and the time of its snapshot.
        """
        is_one_lost = any(
            donor_life != self.lives[donor] and self.life_ends[donor][donor_life] < snapshot_at
            for donor, donor_life, snapshot_at in donations
        )
        if life != self.lives[peer] or is_one_lost:
            self.tape.append(peer, self.steps[peer], DROP, number, 0)
            self.join(peer, life)  # Does nothing if the newcomer itself has stopped.
            return
        adopts_at = self.clocks.time_of(peer, self.clocks.next_boundary(peer, self.events.now))
        self.events.push(adopts_at, self.on_adopted, peer, life, number)

    def on_adopted(self, peer: int, life: int, number: int) -> None:
        """Adopt the weights at a boundary; the loop trains from here on."""
        steps, decisions = self.steps[peer], self.decisions
        if life != self.lives[peer]:
            self.tape.append(peer, steps, DROP, number, 0)
            return
        self.tape.append(peer, steps, ADOPT, number, 0)
        self.clocks.begin(peer, steps, self.events.now, phase=0.0)
        decisions.counted_steps[peer] = steps  # begin() counts the interval to the first mix from here.
        decisions.begin(peer)
