"""The interface of a swarm at any level of detail, through which a simulation advances and measures it.

A peer is *ready* once it holds the weights of a run. A *mix* is one side of an exchange, which adds its result.
"""

from typing import NamedTuple, Protocol

from sim.arrays import I64

MAX_DURATIONS = 65_536  # Durations kept; when full, every second one is dropped and the sampling rate is halved.


class DurationSample:
    """An even sample of the seconds from the request for a snapshot to the mix."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mixes = 0  # Mixes so far.
        self.mixes_per_duration = 1  # One in this many mixes has its duration kept.

    def add(self, seconds: float) -> None:
        """Count a mix, and keep its duration if it is in the sample."""
        self.mixes += 1
        if self.mixes % self.mixes_per_duration:
            return
        self.seconds.append(seconds)
        if len(self.seconds) >= MAX_DURATIONS:
            del self.seconds[::2]
            self.mixes_per_duration *= 2


class Counts(NamedTuple):
    """The counts of a swarm so far."""

    live_peers: int
    ready_peers: int
    honest_rows: I64  # The ready peers that do not attack, as rows of the learners' matrix.
    steps: int  # Of all peers, as far as counted.
    interval_steps: int | None  # The median peer's local steps between two mixes now; None if timed by the clock.
    exchanges: float  # Finished ones: each mix counts as its side's share of an exchange.
    failures: int  # Failed exchanges, as each peer counts them.
    sent_bytes: int  # Of all peers: streams in full or in part, and messages.
    durations_s: list[float]  # An even sample of the exchanges.
    refusals: dict[str, int]  # How often honest live peers refused vectors or clipped them ("clipped"), by reason.
    relayed_bytes: int = 0  # Passed on between undialable peers, by all relays.
    most_relayed_bytes: int = 0  # By the relay that has passed on the most.


class Level(Protocol):
    """A running swarm."""

    @property
    def now(self) -> float:
        """Return virtual seconds since the beginning."""

    @property
    def handled_events(self) -> int:
        """Return the number of events handled."""

    @property
    def mixes(self) -> int:
        """Return the mixes applied, counting each side of an exchange."""

    def advance(self, when: float) -> None:
        """Advance virtual time to ``when``, seconds."""

    def update_models(self) -> None:
        """Bring every model to the end of its peer's current step."""

    def counts(self) -> Counts:
        """Return everything else that is counted."""

    def digest(self) -> str:
        """Return the SHA-256 of all events and models, in hexadecimal."""
