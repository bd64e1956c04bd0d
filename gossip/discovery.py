"""Discovery: find the swarm through seeds, and find out whether other members can dial us.

A peer that cannot be dialled, for example behind NAT, names *homes*: members to which it keeps links. They probe it on
behalf of the others.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gossip.config import Config
from gossip.effects import Dial, Effect, LookUp, MemberState, Notice, Send, TryDial
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
from gossip.wire.messages import Gossip, Ping, Reach, Reached

__all__ = ["Bootstrap", "Listening", "Reachability", "Seeds"]

ASKED_MEMBERS = 3  # Members asked in a round whether they can dial us. One may be unable to dial out, three rarely are.
PATIENCE_S = 10.0  # Wait after the first answer, since a swarm of two has no three members to ask.
TRY_EVERY_S = 10.0  # A member may ask us this often to dial its address.
# Time between a verdict and the next round. It doubles while the verdict stays the same.
ROUND_S, MAX_ROUND_S = 240.0, 3_600.0
UNANSWERED_S = 30.0  # Time until others are asked if no member answers in the first round.
MAX_HOMES = 3  # As many as a record may name.
MAX_OPEN_DIALS = 1  # Dials since a seed was last busy, for which it still counts as busy: one may be in progress.
NEVER_BUSY = MAX_OPEN_DIALS + 1  # The first count of a seed, so that it does not count as busy.
HOME_PING_S = 20.0  # A third of the idle timeout, so that the link to a home is never idle.


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
    """

    seeds: tuple[Address, ...] = ()
    expected: Mapping[Address, PeerId] = field(default_factory=dict)
    looks_up: bool = False
    book: Sequence[MemberRecord] = ()
    finished: bytes = b""
    must_join: bool = False
    wait_until: float = -math.inf


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


class Reachability:
    """Detection of NAT: whether other members can dial us, and links to homes if they cannot.

    Three members answer in each round, and the verdict holds for some minutes. The next round asks three others. So no
    single member decides for good, neither a liar nor one that cannot dial out.

    A peer that cannot be dialled withdraws its address from its record. Members dial only the address in the record, so
    each round publishes the address again. This is why rounds become rarer while the verdict stays the same.

    ``linked_peers`` holds the linked members, and when each last had us dial its address: -infinity for never.
    """

    def __init__(self, members: Members, linked_peers: dict[PeerId, float]) -> None:
        self.members, self.linked_peers = members, linked_peers
        self.asked: set[PeerId] = set()  # Members asked in this round.
        self.asked_incarnation = 0  # The incarnation of our record when we asked.
        self.answers: dict[PeerId, bool] = {}  # This round's answers: True from a member that could dial us.
        self.asked_before: set[PeerId] = set()  # Members asked in the last round.
        self.homes: list[PeerId] = []  # Members to which we keep links; empty while we have an address.
        self.address: Address | None = None  # Our address, even while it is withdrawn from our record.
        self.verdict: bool | None = None  # The last verdict: True if others can dial us; None before the first.
        self.pause_s = ROUND_S  # Time from a verdict to the next round.
        self.next_ping_at = self.decide_at = self.next_round_at = math.inf
        self.is_decided = False  # True if this round has its verdict.

    @property
    def deadline(self) -> float:
        return min(self.next_ping_at, self.decide_at, self.next_round_at)

    def tick(self, now: float) -> list[Effect]:
        """Begin a round, take a verdict and ping the homes when each is due."""
        effects: list[Effect] = []
        if now >= self.next_round_at:
            effects += self.begin_round(now)
        elif now >= self.decide_at:
            effects += self.decide(now)
        if now >= self.next_ping_at:
            self.next_ping_at = now + HOME_PING_S
            effects += [Send(home, Ping(0, ())) for home in self.homes]
        return effects

    # -- the questions of others ---------------------------------------------------------------------------------
    def answer(self, asker: PeerId, now: float) -> list[Effect]:
        """Return the effects that answer a linked member's question whether we can dial it.

        Only the address in the member's own signed record is dialled, so that no peer can make us scan ports.
        """
        if now < self.linked_peers.get(asker, now) + TRY_EVERY_S:  # Asked too often, or without a link.
            return []
        self.linked_peers[asker] = now
        record = self.members.record(asker)
        if record is None or record.address is None:
            return [Send(asker, Reached(False))]
        return [TryDial(asker, record.address)]

    # -- our own question ----------------------------------------------------------------------------------------
    def ask(self, peer: PeerId, now: float) -> list[Effect]:
        """Ask a linked member whether it can dial us, if this round needs more answers."""
        me = self.members.me
        self.address = me.address or self.address
        if self.is_decided or me.address is None or len(self.asked) >= ASKED_MEMBERS or peer in self.asked:
            return []
        if not self.asked:
            self.asked_incarnation = me.incarnation
            # The questions may be lost with their links. Until a verdict, all members dial an address in vain.
            self.next_round_at = now + (UNANSWERED_S if self.verdict is None else self.pause_s)
        self.asked.add(peer)
        return [Send(peer, Reach())]

    def on_reached(self, sender: PeerId, ok: bool, now: float) -> None:
        """Note an answer: ``ok`` is True if the sender could dial us.

        Two equal answers decide, or all answers that come within ``PATIENCE_S``. A failure does not count if our
        incarnation has changed since we asked: the member may have dialled the address of our earlier life.
        """
        if sender not in self.asked or self.is_decided or sender in self.answers:
            return
        if not ok and self.members.me.incarnation != self.asked_incarnation:
            if not self.answers:
                self.next_round_at = min(self.next_round_at, now + TRY_EVERY_S)
            return
        self.answers[sender], self.next_round_at = ok, math.inf  # The verdict is due first.
        has_majority = max(Counter(self.answers.values()).values()) > ASKED_MEMBERS // 2
        self.decide_at = now if has_majority else min(self.decide_at, now + PATIENCE_S)

    def decide(self, now: float) -> list[Effect]:
        """End the round with a verdict. If others cannot dial us, withdraw our address and name homes instead.

        A tie counts as reachable, since a member that fails may be unable to dial out.
        """
        earlier_verdict, self.verdict = self.verdict, 2 * sum(self.answers.values()) >= len(self.answers)
        self.pause_s = min(2 * self.pause_s, MAX_ROUND_S) if self.verdict is earlier_verdict else ROUND_S
        self.is_decided = True
        self.decide_at, self.next_round_at = math.inf, now + self.pause_s
        address = self.members.me.address
        if self.verdict or address is None:
            return []
        self.members.update_me(now, address=None)
        self.refresh_homes(now)
        text = (
            f"No member can open a connection to {address}, so this node takes part by dialling out. "
            "Forward the port or set --advertise to let others dial it."
        )
        return [] if earlier_verdict is False else [Notice("unreachable", text)]

    def begin_round(self, now: float) -> list[Effect]:
        """Ask linked members, if possible others than in the last round, after publishing our address again."""
        if self.members.me.address is None and self.address is not None:
            self.members.update_me(now, address=self.address)
        self.next_round_at = now + self.pause_s  # This holds if there is no member to ask.
        self.asked_before, self.asked, self.answers, self.is_decided = self.asked, set(), {}, False
        others = [peer for peer in self.linked_peers if peer not in self.asked_before]
        effects: list[Effect] = []
        for peer in others or self.linked_peers:
            if question := self.ask(peer, now):
                effects += [Send(peer, Gossip((self.members.me,))), *question]
        return effects

    # -- homes ---------------------------------------------------------------------------------------------------
    def refresh_homes(self, now: float) -> None:
        """Name homes in our record if others cannot dial us: earlier homes with a link, then other dialable members."""
        members, linked = self.members, self.linked_peers
        if members.me.address is not None:
            return
        dialable = (peer for peer in linked if (record := members.record(peer)) is not None and record.address)
        homes = [home for home in self.homes if home in linked]
        homes += [peer for peer in dialable if peer not in homes][: MAX_HOMES - len(homes)]
        self.homes = homes
        # The next ping is not postponed, however often links come and go.
        self.next_ping_at = min(self.next_ping_at, now + HOME_PING_S) if homes else math.inf
        if tuple(homes) != members.me.homes:
            members.update_me(now, homes=tuple(homes))
