"""Reachability: whether other members can dial us.

A peer that cannot be dialled, for example behind NAT, names *homes*: members to which it keeps links. They probe it on
behalf of the others, introduce it to others, and carry its links to members that it cannot reach otherwise
(:mod:`gossip.discovery.meetings`).
"""

import math
from collections import Counter
from collections.abc import Mapping

from gossip.discovery.sightings import Sighting, host_outside, is_private
from gossip.effects import Effect, Notice, OpenPort, Send, TryDial
from gossip.ids import Address, PeerId
from gossip.membership.members import Members
from gossip.wire.messages import Gossip, Ping, Reach, Reached

ASKED_MEMBERS = 3  # Members asked in a round whether they can dial us. One may be unable to dial out, three rarely are.
PATIENCE_S = 10.0  # Wait after the first answer, since a swarm of two has no three members to ask.
TRY_EVERY_S = 10.0  # A member may ask us this often to dial its address.
TRY_S = 3.0  # The limit of such a dial. TCP repeats a lost first packet after 1 s.
# Time between a verdict and the next round. It doubles while the verdict stays the same.
ROUND_S, MAX_ROUND_S = 240.0, 3_600.0
UNANSWERED_S = 30.0  # Time until others are asked if no member answers in the first round.
MAX_HOMES = 3  # As many as a record may name.
HOME_PING_S = 20.0  # A third of the idle timeout, so that the link to a home is never idle.


class Reachability:
    """Detection of NAT: whether other members can dial us, and links to homes if they cannot.

    Three members answer in each round, and the verdict holds for some minutes. The next round asks three others. So no
    single member decides for good, neither a liar nor one that cannot dial out.

    A peer that cannot be dialled withdraws its address from its record. Members dial only the address in the record, so
    each round publishes the address again. This is why rounds become rarer while the verdict stays the same.

    A router with NAT has members inside our network and members outside, which see us at the router's address. Those
    inside can dial us and those outside cannot, so that only those outside are asked once there are any.

    If those outside cannot, our router may open a port (:class:`gossip.effects.OpenPort`). Its address is published
    like ours, and the same questions tell whether it serves. Homes are kept all the same, since a router may not turn
    connections from inside round, and housemates then meet by them.

    Args:
        members: The members, and our own record.
        linked_peers: The linked members, and when each last had us dial its address: -infinity for never.
        sightings: The addresses of both ends of links, as far as they are known.
        opens_ports: Ask the router for a port where nobody outside can dial us.
    """

    def __init__(
        self, members: Members, linked_peers: dict[PeerId, float], sightings: Mapping[PeerId, Sighting],
        opens_ports: bool = False,
    ) -> None:  # fmt: skip
        self.members, self.linked_peers, self.sightings = members, linked_peers, sightings
        self.opens_ports = opens_ports
        self.asked: set[PeerId] = set()  # Members asked in this round.
        self.asked_incarnation = 0  # The incarnation of our record when we asked.
        self.answers: dict[PeerId, bool] = {}  # This round's answers: True from a member that could dial us.
        self.asked_before: set[PeerId] = set()  # Members asked in the last round.
        self.homes: list[PeerId] = []  # Members to which we keep links; empty while our own address is published.
        self.inside: Address | None = None  # Our address in our own network, even while our record does not have it.
        self.mapped: Address | None = None  # The address of the port that our router has opened.
        self.useless: Address | None = None  # Such an address at which nobody could connect.
        self.is_told = False  # The user knows that nobody can dial us.
        self.verdict: bool | None = None  # The last verdict: True if others can dial us; None before the first.
        self.pause_s = ROUND_S  # Time from a verdict to the next round.
        self.next_ping_at = self.decide_at = self.next_round_at = math.inf
        self.is_decided = False  # True if this round has its verdict.

    @property
    def address(self) -> Address | None:
        """Return the address that a round publishes."""
        return self.mapped or self.inside

    @property
    def router(self) -> str | None:
        """Return the host at which most members outside see us."""
        return host_outside(self.sightings, self.inside, self.inside)

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
        self.inside = self.inside or me.address
        if self.mapped is not None and self.router not in (None, self.mapped.host):
            return self.withdraw(now)  # The router has another address now.
        if self.is_decided or me.address is None or len(self.asked) >= ASKED_MEMBERS or peer in self.asked:
            return []
        if not self.is_outside(peer) and any(map(self.is_outside, self.linked_peers)):
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
        # There is a router between us, and it drops connections. We wait for all members outside that we have asked.
        is_hidden = not ok and self.is_outside(sender) and not any(map(self.is_outside, self.asked - set(self.answers)))
        self.decide_at = now if has_majority or is_hidden else min(self.decide_at, now + PATIENCE_S)

    def is_outside(self, peer: PeerId) -> bool:
        """Return True if a member sees us at another address than that in our network, since a router is between."""
        sighting = self.sightings.get(peer)
        if sighting is None or sighting.ours is None or self.inside is None:
            return False
        host, mine = sighting.ours.host, self.inside.host
        return is_private(mine) and host != mine and (":" in host) == (":" in mine)

    def decide(self, now: float) -> list[Effect]:
        """End the round with a verdict. If others cannot dial us, withdraw our address and name homes instead.

        A tie counts as reachable, since a member that fails may be unable to dial out.
        """
        outside = [ok for peer, ok in self.answers.items() if self.is_outside(peer)]
        answers = outside or list(self.answers.values())
        earlier_verdict, self.verdict = self.verdict, 2 * sum(answers) >= len(answers)
        self.pause_s = min(2 * self.pause_s, MAX_ROUND_S) if self.verdict is earlier_verdict else ROUND_S
        self.is_decided = True
        self.decide_at, self.next_round_at = math.inf, now + self.pause_s
        if self.verdict:
            self.is_told = False
            text = f"The router opened {self.mapped} for this node, so that other members can dial it."
            return [Notice("mapped", text)] if self.mapped is not None and not earlier_verdict else []
        if self.members.me.address is None:
            return []
        if self.mapped is not None:
            self.useless = self.mapped
            effects = self.tell(f"The router opened {self.mapped}, but nobody can connect there.")
            return [OpenPort(0), *effects, *self.withdraw(now, asks_router=False)]
        return self.withdraw(now, asks_router=bool(outside))

    def withdraw(self, now: float, asks_router: bool = True) -> list[Effect]:
        """Withdraw our address, and ask our router for a port or tell the user."""
        self.mapped = None
        self.members.update_me(now, address=None)
        self.refresh_homes(now)
        if asks_router and self.opens_ports and self.inside is not None:
            self.useless = None
            return [OpenPort(self.inside.port)]
        return self.tell()

    def tell(self, detail: str = "") -> list[Effect]:
        """Tell the user, once, that nobody can dial us; ``detail`` says in a sentence what the router did."""
        if self.is_told:
            return []
        self.is_told = True
        text = (
            f"No member can open a connection to {self.inside}, so this node takes part by dialling out. "
            f"{detail}{' ' if detail else ''}Forward the port or set --advertise to let others dial it."
        )
        return [Notice("unreachable", text)]

    def on_port(self, address: Address | None, detail: str, now: float) -> list[Effect]:
        """Handle the answer of our router: the address that it opened, or None and a sentence that says why not.

        An address at which others do not see us belongs to another router before ours, or the router lies.
        """
        if address is None:
            if self.mapped is None:
                return [] if self.verdict else self.tell(detail)
            return [*self.tell(detail), *self.withdraw(now, asks_router=False)]
        seen = self.router
        if seen is None or address in (self.mapped, self.useless):
            return []
        if seen != address.host:
            detail = (
                f"The router opened {address}, but other members see this node at {seen}: another router is between."
            )
            return [OpenPort(0), *self.on_port(None, detail, now)]
        self.mapped = address
        self.members.update_me(now, address=address)
        # Answers about the earlier address may be on their way, and no member answers twice in so short a time.
        self.is_decided, self.asked, self.answers = True, set(), {}
        self.decide_at, self.next_round_at = math.inf, now + TRY_EVERY_S
        return []

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
        """Name homes in our record if others cannot dial us: linked members, those first that can be dialled."""
        members, linked = self.members, self.linked_peers
        if members.me.address is not None and self.mapped is None:
            return
        # Earlier homes come first, because records that name them are on their way.
        candidates = dict.fromkeys([*(home for home in self.homes if home in linked), *linked])
        records = [record for record in map(members.record, candidates) if record is not None]
        records.sort(key=lambda record: record.address is None)  # Others may be the only ones left.
        self.homes = homes = [record.id for record in records[:MAX_HOMES]]
        # The next ping is not postponed, however often links come and go.
        self.next_ping_at = min(self.next_ping_at, now + HOME_PING_S) if homes else math.inf
        if tuple(homes) != members.me.homes:
            members.update_me(now, homes=tuple(homes))
