"""How a peer finds its swarm, and whether others can find it: seeds, and being dialled."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping

from gossip.config import Config
from gossip.effects import Dial, Effect, LookUp, MemberState, Notice, Send, TryDial
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
from gossip.wire.messages import Gossip, Ping, Reach, Reached

__all__ = ["TRY_EVERY_S", "Listening", "Reachability", "Seeds", "answer_reach"]

ASKED = 3  # members asked whether they can dial us: one may be barred from dialling out, three rarely are
PATIENCE_S = 10.0  # after the first answer: in a swarm of two there are no three to ask
TRY_EVERY_S = 10.0  # how often one member may have another dial the address it claims
AGAIN_S, MOST_AGAIN_S = 240.0, 3_600.0  # between a verdict and the next question, doubling while it is the same
HOMES = 3
ANSWERING = 1  # dials since it last opened: one may be on its way
BUSY_S = 5.0  # between two dials to a seed that opens and lets us in no further
LOOK_S = 5.0  # between two looks for seeds with nobody there: what was empty a moment ago may have filled
HOME_PING_S = 20.0  # a third of the idle time, so that a home's link never goes idle


class Seeds:
    """Addresses to begin from, dialled until somebody answers, for ever: 1 s, 2 s ... 60 s apart. Once the swarm is
    found they are tried only while nobody is there; healing dials DEAD members, and seeds are members too.

    ``looks``: a driver looks them up, whenever they are tried; what it found last is dialled meanwhile. In company too,
    at the pace of healing: of two halves of a swarm each may have found only itself.
    """

    def __init__(
        self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId], config: Config, now: float,
        looks: bool = False,
    ) -> None:  # fmt: skip
        self.seeds, self.expected, self.config, self.looks = seeds, expected, config, looks
        self.deadline = now if seeds or looks else math.inf
        self.delay_s = config.seed_backoff_s
        self.unanswered = dict.fromkeys(seeds, ANSWERING + 1)  # dials in a row to which nobody opened

    def answered(self, seed: Address) -> None:
        """It accepted a connection, whatever came of it."""
        if seed in self.unanswered:
            self.unanswered[seed] = 0

    @property
    def answering(self) -> bool:
        """Whether there is a seed that accepts connections: then there is a swarm to join, were it only less busy."""
        return any(dials <= ANSWERING for dials in self.unanswered.values())

    def dial(self, seed: Address) -> Dial:
        self.unanswered[seed] += 1
        return Dial(seed, self.expected.get(seed))

    def renew(self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId]) -> tuple[Address, ...]:
        """These are the seeds from now on; returns those that were none before."""
        new = tuple(seed for seed in seeds if seed not in self.unanswered)
        self.seeds, self.expected = seeds, expected
        self.unanswered = {seed: self.unanswered.get(seed, ANSWERING + 1) for seed in seeds}
        return new

    def unlinked(self, now: float) -> None:
        """The last link is gone: ask the seeds soon, and not only when the pace of healing would."""
        if self.seeds or self.looks:
            self.deadline = min(self.deadline, now + self.config.seed_backoff_s)

    def tick(self, now: float, linked: bool, alive: Container[Address], rng: random.Random) -> list[Effect]:
        """``linked``: somebody is there; ``alive``: where living members listen, who need no dialling."""
        if now < self.deadline:
            return []
        look: list[Effect] = [LookUp()] if self.looks else []
        if linked:  # a partition may have us on the seeds' other side: try them at the pace of healing
            self.deadline, self.delay_s = now + self.config.heal_period_s, self.config.seed_backoff_s
            seed = rng.choice(self.seeds) if self.seeds else None
            return look if seed is None or seed in alive else [self.dial(seed), *look]
        self.deadline = now + self.delay_s * (0.75 + 0.5 * rng.random())
        soon = BUSY_S if self.answering else LOOK_S if self.looks else math.inf
        self.delay_s = min(2 * self.delay_s, soon, self.config.seed_backoff_max_s)
        return [*(self.dial(seed) for seed in self.seeds), *look]


class Listening:
    """The addresses at which living members whom we met listen, found among those linked first, where a seed mostly
    is."""

    def __init__(self, members: Members, linked: Iterable[PeerId]) -> None:
        self.members, self.linked = members, linked

    def __contains__(self, address: object) -> bool:
        members = self.members
        for peer in (*self.linked, *members.met()):
            record = members.record(peer)
            if record is not None and record.address == address and members.state(peer) is MemberState.ALIVE:
                return True
        return False


class Reachability:
    """Finds out whether anybody can dial us (NAT), says so, and keeps links to members who probe for us.

    What three members answer holds for some minutes, and then three others are asked, so that no one member decides it
    for good: neither who lies nor who is itself barred from dialling out. A round that finds what the one before found
    is followed by the next after twice as long, since an address that is withdrawn must be announced for it again: what
    is tried is the address of the asker's own record, and no other.
    """

    def __init__(self) -> None:
        self.asked: set[PeerId] = set()  # in this round
        self.asked_as = 0  # with our record of this incarnation
        self.answers: dict[PeerId, bool] = {}
        self.before: set[PeerId] = set()  # asked in the round before: others come first
        self.homes: list[PeerId] = []
        self.wanted: Address | None = None  # what we would have others dial, withdrawn or not
        self.found: bool | None = None  # by the last round
        self.pause_s = AGAIN_S
        self.next_ping_at = float("inf")
        self.decide_at = float("inf")
        self.again_at = float("inf")  # when the next round begins
        self.settled = False

    @property
    def deadline(self) -> float:
        return min(self.next_ping_at, self.decide_at, self.again_at)

    def linked(self, peer: PeerId, me: MemberRecord) -> list[Effect]:
        self.wanted = me.address or self.wanted
        if self.settled or me.address is None or len(self.asked) >= ASKED or peer in self.asked:
            return []
        if not self.asked:
            self.asked_as = me.incarnation
        self.asked.add(peer)
        return [Send(peer, Reach())]

    def on_reached(self, sender: PeerId, ok: bool, incarnation: int, now: float) -> None:
        """Note an answer. Most of three decide, or of those who answered within some seconds. ``incarnation`` of our
        record now: who found nobody may have tried the address of an earlier life, which is what it knew of us."""
        if sender not in self.asked or self.settled or sender in self.answers:
            return
        if not ok and incarnation != self.asked_as:
            self.again_at = min(self.again_at, now + TRY_EVERY_S)
            return
        self.answers[sender] = ok
        enough = max(Counter(self.answers.values()).values()) > ASKED // 2
        self.decide_at = now if enough else min(self.decide_at, now + PATIENCE_S)

    def decided(self, now: float) -> bool | None:
        """Whether others can dial us, once in each round, when most of those asked have said it; of as many for as
        against the one who could is right, for whoever cannot may be barred itself."""
        if now < self.decide_at:
            return None
        found = 2 * sum(self.answers.values()) >= len(self.answers)
        self.pause_s = min(2 * self.pause_s, MOST_AGAIN_S) if found is self.found else AGAIN_S
        self.settled, self.decide_at, self.again_at, self.found = True, float("inf"), now + self.pause_s, found
        return found

    def again(self, linked: Collection[PeerId], me: MemberRecord, now: float) -> list[Effect]:
        """Begin another round, with those linked that were not asked in the last one, if there are any. ``me`` has the
        address in question."""
        if now < self.again_at:
            return []
        self.again_at = now + self.pause_s  # should nobody answer
        self.before, self.asked, self.answers, self.settled = self.asked, set(), {}, False
        others = [peer for peer in linked if peer not in self.before]
        effects: list[Effect] = []
        for peer in others or linked:
            if asked := self.linked(peer, me):  # the record first, which may have been without the address until now
                effects += [Send(peer, Gossip((me,))), *asked]
        return effects

    def notice(self, address: Address) -> Notice:
        return Notice(
            "unreachable",
            f"No member can open a connection to {address}, so this node takes part by dialling out; "
            "forward the port or set --advertise to let others dial it.",
        )

    def choose_homes(self, linked: Collection[PeerId], dialable: Collection[PeerId], now: float) -> tuple[PeerId, ...]:
        """Keep living homes, fill up with linked members that others can dial."""
        kept = [home for home in self.homes if home in linked]
        kept += [peer for peer in linked if peer in dialable and peer not in kept][: HOMES - len(kept)]
        self.homes = kept  # pinged when they are due, however often links come and go
        self.next_ping_at = min(self.next_ping_at, now + HOME_PING_S) if kept else float("inf")
        return tuple(kept)

    def tick(self, now: float) -> list[Effect]:
        if now < self.next_ping_at:
            return []
        self.next_ping_at = now + HOME_PING_S
        return [Send(home, Ping(0, ())) for home in self.homes]


def answer_reach(asker: PeerId, record: MemberRecord | None) -> list[Effect]:
    """Try the address of the asker's own signed record, no other: nobody makes us scan ports."""
    if record is None or record.address is None:
        return [Send(asker, Reached(False))]
    return [TryDial(asker, record.address)]
