"""How a peer finds its swarm, and whether others can find it: seeds, and being dialled."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Container, Iterable

from gossip.config import Config
from gossip.effects import Dial, Effect, MemberState, Notice, Send, TryDial
from gossip.ids import Address, MemberRecord, PeerId
from gossip.members import Members
from gossip.messages import Ping, Reach, Reached

__all__ = ["Listening", "Reachability", "Seeds", "answer_reach"]

ASKED = 3  # members asked whether they can dial us: one may be barred from dialling out, three rarely are
PATIENCE_S = 10.0  # after the first answer: in a swarm of two there are no three to ask
HOMES = 3
HOME_PING_S = 20.0  # a third of the idle time, so that a home's link never goes idle


class Seeds:
    """Addresses to begin from, dialled until somebody answers, for ever: 1 s, 2 s ... 60 s apart. Once the swarm is
    found they are tried only while nobody is there; healing dials DEAD members, and seeds are members too."""

    def __init__(self, seeds: tuple[Address, ...], expected: dict[Address, PeerId], config: Config, now: float) -> None:
        self.seeds, self.expected, self.config = seeds, expected, config
        self.deadline = now if seeds else math.inf
        self.delay_s = config.seed_backoff_s

    def unlinked(self, now: float) -> None:
        """The last link is gone: ask the seeds soon, and not only when the pace of healing would."""
        if self.seeds:
            self.deadline = min(self.deadline, now + self.config.seed_backoff_s)

    def tick(self, now: float, linked: bool, alive: Container[Address], rng: random.Random) -> list[Effect]:
        """``linked``: somebody is there; ``alive``: where living members listen, who need no dialling."""
        if now < self.deadline:
            return []
        if linked:  # a partition may have us on the seeds' other side: try them at the pace of healing
            self.deadline, self.delay_s = now + self.config.heal_period_s, self.config.seed_backoff_s
            seed = rng.choice(self.seeds)
            return [] if seed in alive else [Dial(seed, self.expected.get(seed))]
        self.deadline = now + self.delay_s * (0.75 + 0.5 * rng.random())
        self.delay_s = min(2 * self.delay_s, self.config.seed_backoff_max_s)
        return [Dial(seed, self.expected.get(seed)) for seed in self.seeds]


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
    """Finds out that nobody can dial us (NAT), says so, and keeps links to members who probe for us."""

    def __init__(self) -> None:
        self.asked: set[PeerId] = set()
        self.answers: dict[PeerId, bool] = {}
        self.homes: list[PeerId] = []
        self.next_ping_at = float("inf")
        self.decide_at = float("inf")
        self.settled = False

    @property
    def deadline(self) -> float:
        return self.next_ping_at if self.next_ping_at < self.decide_at else self.decide_at

    def linked(self, peer: PeerId, me: MemberRecord) -> list[Effect]:
        if self.settled or me.address is None or len(self.asked) >= ASKED or peer in self.asked:
            return []
        self.asked.add(peer)
        return [Send(peer, Reach())]

    def on_reached(self, sender: PeerId, ok: bool, now: float) -> None:
        """Note an answer. One that could settles it."""
        if sender not in self.asked or self.settled:
            return
        self.answers[sender] = ok
        if ok:
            self.settled, self.decide_at = True, float("inf")
        else:
            self.decide_at = now if len(self.answers) == ASKED else min(self.decide_at, now + PATIENCE_S)

    def out_of_reach(self, now: float) -> bool:
        """True once: when it has become certain enough that nobody can dial us."""
        if now < self.decide_at:
            return False
        self.settled, self.decide_at = True, float("inf")
        return True

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
