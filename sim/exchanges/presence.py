"""Churn: peers start, join by fetching the weights from donors, and stop."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from gossip.codecs import get_codec
from gossip.config import Config
from gossip.filters.rule import FEW
from gossip.selection.rule import uniform
from gossip.state_transfer.comparing import MIN_DONORS
from sim.engine.events import Events
from sim.exchanges.clocks import Clocks
from sim.exchanges.control import Control
from sim.exchanges.streams import StreamTimes
from sim.exchanges.tape import DROP, GIVE, MOST_SIDES, TAKE, Tape
from sim.seeds import derive
from sim.world.churn import Uptime

__all__ = ["Presence"]

LOOK_S = 1.0  # interval at which a newcomer looks for donors


class Presence:
    """The starts, joins and stops of all peers. ``steps`` is valid for a peer that is not ready, as it takes none."""

    def __init__(
        self, events: Events, config: Config, clocks: Clocks, streams: StreamTimes, tape: Tape, control: Control,
        names: Sequence[str], seed: int, elements: int,
    ) -> None:  # fmt: skip
        self.events, self.config, self.clocks, self.streams, self.tape = events, config, clocks, streams, tape
        self.control, self.names, self.seed, self.elements = control, names, seed, elements
        self.raw = get_codec("fp32")
        self.lives = [0] * len(names)
        self.steps = [0] * len(names)
        self.ended: list[list[float]] = [[] for _ in names]  # end time of each life, by peer
        self.place: dict[int, int] = {}  # index in control.alive of each peer that is up
        self.fetched = 0  # pieces that newcomers requested
        self.stranded = False  # a newcomer found no ready peer at all; real peers would begin a new run

    def populate(self, sessions: Sequence[Iterator[Uptime]]) -> None:
        """Start the peers that are up at time 0 as founders with one model, and schedule the starts of the others."""
        for peer, ups in enumerate(sessions):
            session = next(ups, None)
            if session is None:
                continue
            if session.from_s:
                self.events.push(session.from_s, self.come, peer, session, ups)
            else:
                self.come(peer, session, ups, founder=True)

    def come(self, peer: int, session: Uptime, sessions: Iterator[Uptime], founder: bool = False) -> None:
        """Start a peer at a random phase of its first step."""
        self.place[peer] = len(self.control.alive)
        self.control.alive.append(peer)
        life, now = self.lives[peer], self.events.now
        whose = f"{self.names[peer]}/{life}" if life else self.names[peer]
        phase = random.Random(derive(self.seed, whose, "phase")).random()
        self.clocks.begin(peer, self.steps[peer], now, phase)
        if founder:
            self.control.begin(peer)
        else:
            self.join(peer, life)
        if math.isfinite(session.until_s):
            self.events.push(max(session.until_s, now), self.go, peer, sessions)

    def go(self, peer: int, sessions: Iterator[Uptime]) -> None:
        """Stop a peer, in order or not. The step in progress is still computed, because its batch is used up."""
        now, control = self.events.now, self.control
        if control.ready[peer]:
            self.steps[peer] = self.clocks.after(peer, now)
            control.end(peer, self.steps[peer])
        self.lives[peer] += 1
        self.ended[peer].append(now)
        last, place = control.alive.pop(), self.place.pop(peer)
        if last != peer:
            control.alive[place], self.place[last] = last, place
        following = next(sessions, None)
        if following is not None:
            self.events.push(max(following.from_s, now), self.come, peer, following, sessions)

    # -- joining -------------------------------------------------------------------------------------------------
    def join(self, peer: int, life: int) -> None:
        """Fetch the weights in pieces from several ready peers, the donors."""
        if life != self.lives[peer]:
            return
        control, streams, now = self.control, self.streams, self.events.now
        control.asking = peer
        donors: list[int] = []
        for _ in range(min(self.config.internal.donors, MOST_SIDES)):
            donor = uniform(control.alive, control.rngs[peer], control.fits, donors)
            if donor is None:
                break
            donors.append(donor)
        if not donors:
            self.stranded = self.stranded or not any(control.ready)
            self.events.push(now + LOOK_S, self.join, peer, life)
            return
        surveyed = now + max(streams.message(peer, one, now) + streams.message(one, peer, now) for one in donors)
        share, chunk = max(-(-self.elements // len(donors)), FEW), self.config.chunk_elements
        share = share if share < chunk else -(-share // chunk) * chunk
        ranges = [(at, min(at + share, self.elements)) for at in range(0, self.elements, share)]
        number = self.tape.exchange(peer)
        self.tape.ranges[number] = ranges
        given = [(donor, self.lives[donor]) for donor, _ in zip(donors, ranges, strict=False)]
        pieces = [
            self.piece(peer, donor, stop - start, surveyed, (number, place))
            for place, ((donor, _), (start, stop)) in enumerate(zip(given, ranges, strict=True))
        ]
        whole = max(there for _, there in pieces)
        if len(given) >= MIN_DONORS:  # each donor also sends a chunk of another donor's piece, for comparison
            sizes = [min(stop - start, chunk) for start, stop in ranges]
            whole = max(
                self.piece(peer, donor, size, whole, None)[1] for (donor, _), size in zip(given, sizes, strict=True)
            )
        until = [(donor, one, at) for (donor, one), (at, _) in zip(given, pieces, strict=True)]
        self.events.push(whole, self.on_whole, peer, life, number, until)

    def piece(
        self, peer: int, donor: int, elements: int, asked: float, gives: tuple[int, int] | None
    ) -> tuple[float, float]:
        """Return when a donor takes its snapshot, and when ``elements`` of it have arrived."""
        steps = self.clocks.after(donor, asked + self.streams.message(peer, donor, asked))
        at = self.clocks.time(donor, steps)
        if gives is not None:
            self.tape.put(donor, steps, GIVE, *gives)
        self.fetched += 1
        size_bytes = self.streams.network.bytes_of(self.raw.encoded_bytes(elements))
        return at, at + self.streams.stream(donor, peer, at, size_bytes)

    def on_whole(self, peer: int, life: int, number: int, given: list[tuple[int, int, float]]) -> None:
        """Use the complete weights at the next boundary, or start again if a donor died before its snapshot."""
        died = any(one != self.lives[donor] and self.ended[donor][one] < at for donor, one, at in given)
        if life != self.lives[peer] or died:
            self.tape.put(peer, self.steps[peer], DROP, number, 0)
            self.join(peer, life)
            return
        self.events.push(
            self.clocks.time(peer, self.clocks.after(peer, self.events.now)), self.on_taken, peer, life, number
        )

    def on_taken(self, peer: int, life: int, number: int) -> None:
        """Adopt the weights at a boundary; the loop trains from here on."""
        steps, control = self.steps[peer], self.control
        if life != self.lives[peer]:
            self.tape.put(peer, steps, DROP, number, 0)
            return
        self.tape.put(peer, steps, TAKE, number, 0)
        self.clocks.begin(peer, steps, self.events.now, 0.0)
        control.counted[peer] = steps
        control.begin(peer)
