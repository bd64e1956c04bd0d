"""Seeds: the addresses and the terms with which a peer looks for its swarm."""

import math
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gossip.config import Config
from gossip.effects import Dial, Effect, LookUp, MemberState
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members

MAX_OPEN_DIALS = 1  # Dials since a seed was last busy, for which it still counts as busy: one may be in progress.
NEVER_BUSY = MAX_OPEN_DIALS + 1  # The first count of a seed, so that it does not count as busy.


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The terms of a peer's start: how it finds its swarm, and when it may begin a run.

    Attributes:
        seeds: The addresses to dial first.
        expected: The ids that seeds from an invite must prove.
        looks_up: True if the driver looks the seeds up, on the effect LookUp, and reports ``on_seeds_found``. There may
            be no seeds before.
        book: The members of an earlier life.
        finished: The id of the run that this node had finished in an earlier life; empty if there is none.
        must_join: True if this peer may only join a run. It begins none, even if no member offers one.
        wait_until: The time before which this peer begins no run of its own, because other members are expected.
        completed: Runs that this program has completed before, and takes no part in again.
    """

    seeds: tuple[Address, ...] = ()
    expected: Mapping[Address, PeerId] = field(default_factory=dict)
    looks_up: bool = False
    book: Sequence[MemberRecord] = ()
    finished: bytes = b""
    must_join: bool = False
    wait_until: float = -math.inf
    completed: frozenset[bytes] = frozenset()


class Seeds:
    """The seeds: addresses that are dialled with back-off (1, 2, 4 and then every 5 s) until a member answers.

    While this peer has links, one seed is dialled at each healing period, as DEAD members are, to heal a partition.

    With ``looks_up`` the driver looks the seeds up again at each try, and the seeds of the last look-up are dialled
    meanwhile. Look-ups go on while there are links, because each half of a swarm may have found only itself.
    """

    def __init__(
        self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId], config: Config, now: float,
        looks_up: bool = False,
    ) -> None:  # fmt: skip
        self.seeds, self.expected, self.config, self.looks_up = seeds, expected, config, looks_up
        self.deadline = now if seeds or looks_up else math.inf
        self.delay_s = config.internal.seed_backoff_s  # Time to the next dials while there is no link.
        self.dials = dict.fromkeys(seeds, NEVER_BUSY)  # Dials of each seed since it was last busy.

    def on_busy(self, seed: Address) -> None:
        """Note that the seed accepted a connection and closed it."""
        if seed in self.dials:
            self.dials[seed] = 0

    @property
    def busy(self) -> bool:
        """Return True if a seed closes our connections, as a node does that has no room for more strangers."""
        return any(dials <= MAX_OPEN_DIALS for dials in self.dials.values())

    def dial(self, seed: Address) -> Dial:
        """Return the effect that dials a seed, and count the dial."""
        self.dials[seed] += 1
        return Dial(seed, self.expected.get(seed))

    def renew(self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId]) -> tuple[Address, ...]:
        """Replace the seeds; return those that are new."""
        new_seeds = tuple(seed for seed in seeds if seed not in self.dials)
        self.seeds, self.expected = seeds, expected
        self.dials = {seed: self.dials.get(seed, NEVER_BUSY) for seed in seeds}
        return new_seeds

    def on_last_link_lost(self, now: float) -> None:
        """Dial the seeds soon instead of at the next healing period."""
        if self.seeds or self.looks_up:
            self.deadline = min(self.deadline, now + self.config.internal.seed_backoff_s)

    def tick(self, now: float, has_link: bool, alive: Container[Address], rng: random.Random) -> list[Effect]:
        """Dial the seeds that are due.

        Args:
            now: The current time.
            has_link: True if this peer has a link.
            alive: The addresses of ALIVE members, which need no dial.
            rng: The source of jitter and of the choice of a seed.
        """
        if now < self.deadline:
            return []
        internal = self.config.internal
        look_up: list[Effect] = [LookUp()] if self.looks_up else []
        if has_link:  # Dial a seed all the same, since a partition may separate us from it.
            self.deadline, self.delay_s = now + internal.heal_period_s, internal.seed_backoff_s
            seed = rng.choice(self.seeds) if self.seeds else None
            return look_up if seed is None or seed in alive else [self.dial(seed), *look_up]
        self.deadline = now + self.delay_s * (0.75 + 0.5 * rng.random())
        self.delay_s = min(2 * self.delay_s, internal.seed_backoff_max_s)
        return [*(self.dial(seed) for seed in self.seeds), *look_up]


class Listening:
    """The addresses of ALIVE contacted members. Linked ones are searched first, since a seed is mostly among them."""

    def __init__(self, members: Members, linked_peers: Iterable[PeerId]) -> None:
        self.members, self.linked_peers = members, linked_peers

    def __contains__(self, address: object) -> bool:
        members = self.members
        for peer in (*self.linked_peers, *members.contacted()):
            record = members.record(peer)
            if record is not None and record.address == address and members.state(peer) is MemberState.ALIVE:
                return True
        return False
