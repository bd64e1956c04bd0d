"""Discovery: find the swarm through seeds, and find out whether others can dial us."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gossip.config import Config
from gossip.effects import Dial, Effect, LookUp, MemberState, Notice, Send, TryDial
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
from gossip.wire.messages import Gossip, Ping, Reach, Reached

__all__ = ["TRY_EVERY_S", "Bootstrap", "Listening", "Reachability", "Seeds", "answer_reach"]

ASKED = 3  # members asked whether they can dial us: one may be unable to dial out, three rarely are
PATIENCE_S = 10.0  # wait after the first answer: a swarm of two has no three members to ask
TRY_EVERY_S = 10.0  # interval at which one member may have another dial its address
# Time between a verdict and the next round; doubles while the verdict stays the same.
AGAIN_S, MOST_AGAIN_S = 240.0, 3_600.0
HOMES = 3  # members that probe for a peer which others cannot dial
ANSWERING = 1  # unanswered dials of a seed that still counts as answering: one may be on its way
BUSY_S = 5.0  # interval of dials to a seed that accepts connections but finishes no Hello
LOOK_S = 5.0  # interval of look-ups without a link: the list may have been empty a moment ago
HOME_PING_S = 20.0  # a third of the idle time-out, so that a home's link is never idle


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The terms of a peer's start: how it finds its swarm, and when it may begin a run.

    Attributes:
        seeds: The addresses to dial first.
        expected: The ids that seeds from an invite must prove.
        looks: Seeds are looked up on the effect LookUp and reported with ``seeded``; until then there may be none.
        book: The members of an earlier life.
        finished: A run that this node had finished in an earlier life.
        must_join: Do not begin a run only because no member offers one.
        wait_until: Do not begin a run before this time for lack of others: more are expected.
    """

    seeds: tuple[Address, ...] = ()
    expected: Mapping[Address, PeerId] = field(default_factory=dict)
    looks: bool = False
    book: Sequence[MemberRecord] = ()
    finished: bytes = b""
    must_join: bool = False
    wait_until: float = -math.inf


class Seeds:
    """The seeds: addresses that are dialled with back-off (1 s, 2 s ... 60 s) until a member answers.

    With links they are tried only at the pace of healing. Healing itself dials DEAD members, and seeds are members too.

    ``looks``: the driver looks the seeds up at each try; the last result is dialled meanwhile. This goes on with links
    too: each half of a swarm may have found only itself.
    """

    def __init__(
        self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId], config: Config, now: float,
        looks: bool = False,
    ) -> None:  # fmt: skip
        self.seeds, self.expected, self.config, self.looks = seeds, expected, config, looks
        self.deadline = now if seeds or looks else math.inf
        self.delay_s = config.internal.seed_backoff_s
        self.unanswered = dict.fromkeys(seeds, ANSWERING + 1)  # dials in a row that no seed accepted

    def answered(self, seed: Address) -> None:
        """Note that the seed accepted a connection, even if no link followed."""
        if seed in self.unanswered:
            self.unanswered[seed] = 0

    @property
    def answering(self) -> bool:
        """Return True if a seed accepts connections: then there is a swarm to join, which may be busy."""
        return any(dials <= ANSWERING for dials in self.unanswered.values())

    def dial(self, seed: Address) -> Dial:
        self.unanswered[seed] += 1
        return Dial(seed, self.expected.get(seed))

    def renew(self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId]) -> tuple[Address, ...]:
        """Replace the seeds; return those that are new."""
        new = tuple(seed for seed in seeds if seed not in self.unanswered)
        self.seeds, self.expected = seeds, expected
        self.unanswered = {seed: self.unanswered.get(seed, ANSWERING + 1) for seed in seeds}
        return new

    def unlinked(self, now: float) -> None:
        """Note that the last link is gone: dial the seeds soon, not at the pace of healing."""
        if self.seeds or self.looks:
            self.deadline = min(self.deadline, now + self.config.internal.seed_backoff_s)

    def tick(self, now: float, linked: bool, alive: Container[Address], rng: random.Random) -> list[Effect]:
        """Dial the seeds that are due.

        Args:
            now: The current time.
            linked: True if we have a link.
            alive: The addresses of ALIVE members, which need no dial.
            rng: The source of jitter and of the choice of a seed.
        """
        if now < self.deadline:
            return []
        look: list[Effect] = [LookUp()] if self.looks else []
        if linked:  # a partition may separate us from the seeds: dial them at the pace of healing
            self.deadline, self.delay_s = now + self.config.internal.heal_period_s, self.config.internal.seed_backoff_s
            seed = rng.choice(self.seeds) if self.seeds else None
            return look if seed is None or seed in alive else [self.dial(seed), *look]
        self.deadline = now + self.delay_s * (0.75 + 0.5 * rng.random())
        soon = BUSY_S if self.answering else LOOK_S if self.looks else math.inf
        self.delay_s = min(2 * self.delay_s, soon, self.config.internal.seed_backoff_max_s)
        return [*(self.dial(seed) for seed in self.seeds), *look]


class Listening:
    """The addresses of ALIVE contacted members. Linked ones are searched first, since a seed is mostly among them."""

    def __init__(self, members: Members, linked: Iterable[PeerId]) -> None:
        self.members, self.linked = members, linked

    def __contains__(self, address: object) -> bool:
        members = self.members
        for peer in (*self.linked, *members.contacted()):
            record = members.record(peer)
            if record is not None and record.address == address and members.state(peer) is MemberState.ALIVE:
                return True
        return False


class Reachability:
    """Detection of NAT: find out whether others can dial us, publish it, and keep links to homes that probe for us.

    Three members answer in each round, and the verdict holds for some minutes. The next round asks three others. So no
    single member decides for good, neither a liar nor one that cannot dial out. The time to the next round doubles
    while the verdict stays the same: a round must announce a withdrawn address again, since members dial only the
    address in our record.
    """

    def __init__(self) -> None:
        self.asked: set[PeerId] = set()  # members asked in this round
        self.asked_as = 0  # incarnation of our record when we asked
        self.answers: dict[PeerId, bool] = {}
        self.before: set[PeerId] = set()  # members asked in the round before: others come first
        self.homes: list[PeerId] = []
        self.wanted: Address | None = None  # the address to advertise, withdrawn or not
        self.found: bool | None = None  # the last verdict
        self.pause_s = AGAIN_S
        self.next_ping_at = float("inf")
        self.decide_at = float("inf")
        self.again_at = float("inf")  # when the next round begins
        self.settled = False

    @property
    def deadline(self) -> float:
        return min(self.next_ping_at, self.decide_at, self.again_at)

    def linked(self, peer: PeerId, me: MemberRecord) -> list[Effect]:
        """Ask a newly linked member whether it can dial us, if this round needs more answers."""
        self.wanted = me.address or self.wanted
        if self.settled or me.address is None or len(self.asked) >= ASKED or peer in self.asked:
            return []
        if not self.asked:
            self.asked_as = me.incarnation
        self.asked.add(peer)
        return [Send(peer, Reach())]

    def on_reached(self, sender: PeerId, ok: bool, incarnation: int, now: float) -> None:
        """Note an answer. A majority of three decides, or of the answers within some seconds.

        ``incarnation`` is that of our record now. A member may have dialled the address of an earlier life, so its
        failure does not count.
        """
        if sender not in self.asked or self.settled or sender in self.answers:
            return
        if not ok and incarnation != self.asked_as:
            self.again_at = min(self.again_at, now + TRY_EVERY_S)
            return
        self.answers[sender] = ok
        enough = max(Counter(self.answers.values()).values()) > ASKED // 2
        self.decide_at = now if enough else min(self.decide_at, now + PATIENCE_S)

    def decided(self, now: float) -> bool | None:
        """Return the verdict, once in each round, when it is due: True if others can dial us.

        A tie counts as reachable, since a member that fails may be unable to dial out.
        """
        if now < self.decide_at:
            return None
        found = 2 * sum(self.answers.values()) >= len(self.answers)
        self.pause_s = min(2 * self.pause_s, MOST_AGAIN_S) if found is self.found else AGAIN_S
        self.settled, self.decide_at, self.again_at, self.found = True, float("inf"), now + self.pause_s, found
        return found

    def again(self, linked: Collection[PeerId], me: MemberRecord, now: float) -> list[Effect]:
        """Begin another round with linked members, if possible others than in the last. ``me`` has the address."""
        if now < self.again_at:
            return []
        self.again_at = now + self.pause_s  # if no member answers
        self.before, self.asked, self.answers, self.settled = self.asked, set(), {}, False
        others = [peer for peer in linked if peer not in self.before]
        effects: list[Effect] = []
        for peer in others or linked:
            if asked := self.linked(peer, me):  # our record first: it may have had no address until now
                effects += [Send(peer, Gossip((me,))), *asked]
        return effects

    def notice(self, address: Address) -> Notice:
        return Notice(
            "unreachable",
            f"No member can open a connection to {address}, so this node takes part by dialling out; "
            "forward the port or set --advertise to let others dial it.",
        )

    def choose_homes(self, linked: Collection[PeerId], dialable: Collection[PeerId], now: float) -> tuple[PeerId, ...]:
        """Keep linked homes, and fill up with linked members that others can dial."""
        kept = [home for home in self.homes if home in linked]
        kept += [peer for peer in linked if peer in dialable and peer not in kept][: HOMES - len(kept)]
        self.homes = kept  # their pings stay due, however often links come and go
        self.next_ping_at = min(self.next_ping_at, now + HOME_PING_S) if kept else float("inf")
        return tuple(kept)

    def tick(self, now: float) -> list[Effect]:
        if now < self.next_ping_at:
            return []
        self.next_ping_at = now + HOME_PING_S
        return [Send(home, Ping(0, ())) for home in self.homes]


def answer_reach(asker: PeerId, record: MemberRecord | None) -> list[Effect]:
    """Dial only the address in the asker's own signed record, so that no peer can make us scan ports."""
    if record is None or record.address is None:
        return [Send(asker, Reached(False))]
    return [TryDial(asker, record.address)]
