"""Meetings: links between two members that cannot dial each other, by hole punching or through a relay.

Both have links to a common contact, which passes their messages on and says at which address it sees each of them:

    asker            contact            other
      | ask  --------->| ask ------------>|
      |<------- answer |<-------- answer  |
      | go   --------->| go  ------------>|
      |<- punch: both connect at once --->|    the asker half a round trip after its go, the other when the go arrives
      | relay -------->| relay ---------->|    if no connection comes about: both dial the contact, which joins them

This is DCUtR (Seemann, Inden and Vyzovitis, "Decentralized hole punching", DINPS 2022) with members in place of
relays. Each connects from the port of its link to the contact. A router that maps a port in the same way for all
destinations lets the other's connection in, once its own node has sent towards the other.
"""

import math
import random
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgpack

from gossip.discovery.sightings import Sighting, host_outside, is_private
from gossip.effects import Effect, MemberState, Punch, Send, Tunnel
from gossip.errors import ConfigError, ProtocolError
from gossip.ids import Address, MemberRecord, PeerId, parse_address
from gossip.membership.entry import TokenBucket
from gossip.membership.protocol import Membership
from gossip.recent import Recent
from gossip.wire.messages import Meet

STAGES = ("ask", "answer", "go", "relay")
DOMAIN = "gossip meeting 1"  # Domain separation: no other signature of the same key can pass as a stated address.
MEET_S = 1.0  # Time between two meetings that a node begins.
SAMPLED = 16  # Random members among which the next one to meet is searched.
MEETING_S = 10.0  # A meeting that has led to nothing after this time has failed.
MAX_MEETINGS = 8  # Meetings at the same time.
MAX_UNASKED = 2  # Of these, those by the relay of one member for which we have not asked.
# A member that could not be met is not asked again for this long. It doubles with each further failure.
RETRY_S, MAX_RETRY_S = 10.0, 600.0
MAX_FAILED = 1_024  # Members whose failures are remembered.
# Messages of one member that are passed on or heard: a meeting takes at most four, and a node begins one a second.
MESSAGES_PER_S, MESSAGES_BURST = 8.0, 32.0
JOIN_S = 15.0  # Time for both sides of a tunnel to dial its relay.


@dataclass(slots=True)
class Meeting:
    """A meeting in progress with a member."""

    contact: PeerId
    asks: bool  # We have asked.
    began_at: float
    stage: str = "ask"  # The last stage that is done; "answer" while both connect.
    address: Address | None = None  # Where to connect to.
    punch_at: float = math.inf
    refused_by: set[PeerId] = field(default_factory=set)  # Relays that carry as many tunnels as they may.


@dataclass(slots=True)
class Relayed:
    """A tunnel that we relay for two members."""

    ends: tuple[PeerId, PeerId]  # The side that asked for it comes first.
    since: float
    is_joined: bool = False  # Both have dialled us.


class Failures(NamedTuple):
    """The failed meetings with one member."""

    times: int
    retry_at: float


class Meetings:
    """The meetings of one peer, and those of others that it passes on or relays.

    Args:
        members: The membership, which signs and verifies; None where members do neither, and all can be dialled.
        linked_peers: The linked members.
        sightings: The addresses of both ends of links, as far as they are known.
        max_tunnels: The most tunnels to relay at the same time.
        rng: The source of random choices.
    """

    def __init__(
        self, members: Membership | None, linked_peers: Container[PeerId], sightings: Mapping[PeerId, Sighting],
        max_tunnels: int, rng: random.Random,
    ) -> None:  # fmt: skip
        self._members, self.linked_peers, self.sightings = members, linked_peers, sightings
        self.max_tunnels, self.rng = max_tunnels, rng
        self.listens_at: Address | None = None  # Our address in our own network.
        self.meetings: dict[PeerId, Meeting] = {}  # By the member to meet.
        self.failures = Recent[PeerId, Failures](MAX_FAILED)
        self.allowances: dict[PeerId, TokenBucket] = {}  # Of messages, by linked member.
        self.tunnels: dict[bytes, Relayed] = {}  # The tunnels that we relay, by name.
        self.next_at = math.inf  # The time to begin another meeting; infinite before the first sighting.

    @property
    def members(self) -> Membership:
        """Return the membership. Without one there are no sightings, and nothing here is called."""
        assert self._members is not None
        return self._members

    @property
    def my_id(self) -> PeerId:
        return self.members.me.id

    @property
    def is_public(self) -> bool:
        """Return True if our record states our own address, and not that of a port of our router."""
        return self.members.me.address is not None and self.members.me.address == self.listens_at

    @property
    def deadline(self) -> float:
        return min([self.next_at, *(meeting.punch_at for meeting in self.meetings.values())])

    # -- links ---------------------------------------------------------------------------------------------------
    def on_linked(self, peer: PeerId, now: float) -> None:
        """End the meeting with a member that is linked now."""
        self.meetings.pop(peer, None)
        self.failures.pop(peer, None)
        self.listens_at = self.listens_at or self.members.me.address
        self.next_at = min(self.next_at, now + MEET_S)

    def on_unlinked(self, peer: PeerId) -> None:
        self.allowances.pop(peer, None)

    # -- our own meetings ----------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Effect]:
        """Connect where it is time to, give up meetings that lead to nothing, and begin another."""
        effects: list[Effect] = []
        for peer, meeting in list(self.meetings.items()):
            if now >= meeting.punch_at:
                effects += self.punch(peer, meeting)
            elif now >= meeting.began_at + MEETING_S:
                # Members that seemed to be in one network may be in two behind one carrier: a relay is left.
                if meeting.asks and meeting.stage == "answer":
                    effects += self.on_not_met(peer, now)
                else:
                    self.fail(peer, now)
        if now >= self.next_at:
            self.next_at = now + MEET_S if self.sightings else math.inf
            unused = [name for name, one in self.tunnels.items() if not one.is_joined and now >= one.since + JOIN_S]
            for name in unused:
                del self.tunnels[name]
            effects += self.begin(now)
        return effects

    def begin(self, now: float) -> list[Effect]:
        """Ask a random member for a meeting, if neither can dial the other and a contact of both is known."""
        if self.is_public or len(self.meetings) >= MAX_MEETINGS:
            return []
        router = host_outside(self.sightings, self.listens_at, self.listens_at)
        alive = self.members.alive()
        for peer in self.rng.sample(alive, min(SAMPLED, len(alive))):
            record = self.members.record(peer)
            if record is None or not self.may_ask(record, router, now):
                continue
            contacts = [home for home in record.homes if home in self.linked_peers and self.outside(home) is not None]
            if contacts:
                contact = self.rng.choice(contacts)
                self.meetings[peer] = Meeting(contact, True, now)
                return [Send(contact, self.statement("ask", peer, contact))]
        return []

    def may_ask(self, record: MemberRecord, router: str | None, now: float) -> bool:
        """Return True if a meeting with this member may begin: neither can be dialled, or both have the same router.

        ``router`` is the host of our router, which need not turn connections from inside round.
        """
        peer, failed = record.id, self.failures.get(record.id)
        are_hidden = record.address is None and self.members.me.address is None
        are_housemates = record.address is not None and record.address.host == router
        return (
            (are_hidden or are_housemates) and peer not in self.linked_peers and peer not in self.meetings
            and (failed is None or now >= failed.retry_at)
        )  # fmt: skip

    def on_not_met(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle a connection that did not come about: after a punch the asker asks for a relay."""
        meeting = self.meetings.get(peer)
        if meeting is None:
            return []
        record = self.members.record(peer)
        if not meeting.asks or meeting.stage == "relay" or record is None:
            self.fail(peer, now)
            return []
        known = (home for home in (meeting.contact, *record.homes) if home not in meeting.refused_by)
        relays = [home for home in known if self.address_of(home) is not None]
        if not relays:
            self.fail(peer, now)
            return []
        meeting.stage, meeting.contact, meeting.began_at = "relay", relays[0], now
        name = self.rng.randbytes(16)
        return [Send(meeting.contact, Meet(self.my_id, peer, "relay", name=name))]

    def fail(self, peer: PeerId, now: float) -> None:
        """End a meeting that has failed. The next one that we ask for waits, longer each time."""
        if not self.meetings.pop(peer).asks:
            return  # Others began it, perhaps in this member's name.
        count = self.failures[peer].times if peer in self.failures else 0
        wait_s = min(RETRY_S * 2.0 ** min(count, 10), MAX_RETRY_S) * (0.75 + 0.5 * self.rng.random())
        self.failures[peer] = Failures(count + 1, now + wait_s)

    def punch(self, peer: PeerId, meeting: Meeting) -> list[Effect]:
        """Return the effect that connects to the other side, which does the same."""
        meeting.punch_at = math.inf
        assert meeting.address is not None
        return [Punch(peer, meeting.address, meeting.contact, meeting.asks)]

    def address_of(self, peer: PeerId) -> Address | None:
        record = self.members.record(peer)
        alive = self.members.state(peer) is MemberState.ALIVE
        return record.address if record is not None and alive else None

    def outside(self, contact: PeerId) -> Address | None:
        """Return our address as a contact outside our network sees it; None if most contacts see us at another host."""
        ours = self.sightings.get(contact, Sighting()).ours
        return ours if ours is not None and ours.host == host_outside(self.sightings, self.listens_at, ours) else None

    def statement(self, stage: str, target: PeerId, contact: PeerId) -> Meet:
        """Return a message that states our addresses, signed for this target."""
        outside = self.outside(contact)
        stated = "" if outside is None else str(outside)
        inside = "" if self.listens_at is None or not is_private(self.listens_at.host) else str(self.listens_at)
        signature = self.members.sign(payload(self.my_id, target, stated, inside))
        return Meet(self.my_id, target, stage, stated, inside, signature)

    # -- tunnels that we relay -----------------------------------------------------------------------------------
    def on_tunnel(self, name: bytes, is_open: bool) -> list[Effect]:
        """Note that both sides of a tunnel have dialled us, or that it has ended and another may take its place."""
        if not is_open:
            self.tunnels.pop(name, None)
        elif name in self.tunnels:
            self.tunnels[name].is_joined = True
        return []

    # -- messages ------------------------------------------------------------------------------------------------
    def on_meet(self, sender: PeerId, meet: Meet, now: float) -> list[Effect]:
        """Pass on a message of the sender, or handle one for us that the sender has passed on.

        Raises:
            ProtocolError: No correct member sends this.
        """
        if meet.stage not in STAGES or meet.origin == meet.target:
            raise ProtocolError("A member asked for a meeting that cannot be.")
        if self._members is None or sender not in self.linked_peers:
            return []
        bucket = self.allowances.get(sender)
        if bucket is None:
            bucket = self.allowances[sender] = TokenBucket(MESSAGES_PER_S, MESSAGES_BURST, now)
        if not bucket.take(now):
            return []
        if self.my_id not in (meet.origin, meet.target):
            return self.pass_on(sender, meet, now) if meet.origin == sender else []
        if meet.stage == "relay":  # A relay confirms to both sides that it takes their tunnel.
            return self.on_relayed(sender, meet, now)
        return self.hear(sender, meet, now) if meet.target == self.my_id else []

    def pass_on(self, sender: PeerId, meet: Meet, now: float) -> list[Effect]:
        """Pass a linked member's message on to its target, with the address at which we see the sender."""
        is_linked = meet.target in self.linked_peers
        if meet.stage == "relay":
            asked = sum(tunnel.ends[0] == sender for tunnel in self.tunnels.values())
            is_full = len(self.tunnels) >= self.max_tunnels or asked >= max(1, self.max_tunnels // 2)
            if is_full or not is_linked or len(meet.name) != 16 or meet.name in self.tunnels:
                return [Send(sender, replace(meet, name=b""))]  # Without a name it is refused.
            self.tunnels[meet.name] = Relayed((sender, meet.target), now)
            accepted = Meet(sender, meet.target, "relay", name=meet.name)
            return [Send(meet.target, accepted), Send(sender, accepted)]
        if not is_linked:
            return []
        theirs = self.sightings.get(sender, Sighting()).theirs
        return [Send(meet.target, replace(meet, seen="" if theirs is None else str(theirs), name=b""))]

    def on_relayed(self, relay: PeerId, meet: Meet, now: float) -> list[Effect]:
        """Join a tunnel that a relay has opened for us."""
        asks = meet.origin == self.my_id
        peer = meet.target if asks else meet.origin
        address, meeting = self.address_of(relay), self.meetings.get(peer)
        if asks and (meeting is None or meeting.stage != "relay" or meeting.contact != relay):
            return []  # We have not asked for it.
        if asks and meeting is not None and not meet.name:
            meeting.stage = "answer"
            meeting.refused_by.add(relay)
            return self.on_not_met(peer, now)
        if address is None or peer in self.linked_peers or len(meet.name) != 16 or self.members.record(peer) is None:
            return []
        if meeting is None:
            unasked = sum(not one.asks and one.contact == relay for one in self.meetings.values())
            if len(self.meetings) >= MAX_MEETINGS or unasked >= MAX_UNASKED:
                return []
            meeting = self.meetings[peer] = Meeting(relay, False, now)
        elif not asks and meeting.asks and (self.my_id < peer or meeting.contact != relay):
            return []  # Both sides have asked, and our own question goes first; or a third member alone says so.
        meeting.asks, meeting.stage, meeting.contact, meeting.punch_at = asks, "relay", relay, math.inf
        return [Tunnel(peer, relay, address, meet.name, asks)]

    def hear(self, contact: PeerId, meet: Meet, now: float) -> list[Effect]:
        """Handle a member's message that a contact has passed on to us."""
        origin = meet.origin
        record, meeting = self.members.record(origin), self.meetings.get(origin)
        if record is None or origin in self.linked_peers or self.is_public:
            return []
        if meet.stage == "go":
            if meeting is None or meeting.asks or meeting.contact != contact or meeting.address is None:
                return []
            return self.punch(origin, meeting)
        signed = payload(origin, meet.target, meet.stated, meet.inside)
        if not self.members.verify(record.public_key, signed, meet.signature):
            return []  # The contact or the origin may have changed it, and it is not known which.
        address, is_near = self.where(contact, meet)
        if self.members.me.address is not None and not is_near:
            return []  # It can dial us.
        if meet.stage == "answer":
            if meeting is None or not meeting.asks or meeting.contact != contact or meeting.stage != "ask":
                return []
            if address is None:
                return self.on_not_met(origin, now)
            meeting.stage, meeting.address = "answer", address
            if is_near:
                return []  # The other side dials us in our own network.
            meeting.punch_at = now + (now - meeting.began_at) / 2
            return [Send(contact, Meet(self.my_id, origin, "go"))]
        if meeting is not None and meeting.asks and self.my_id < origin:
            return []  # Both have asked, and our own question goes first.
        if meeting is None and len(self.meetings) >= MAX_MEETINGS:
            return []
        self.meetings[origin] = Meeting(contact, False, now, "answer", address)
        answer = Send(contact, self.statement("answer", origin, contact))
        return [answer, Punch(origin, address, None, True)] if is_near and address is not None else [answer]

    def where(self, contact: PeerId, meet: Meet) -> tuple[Address | None, bool]:
        """Return the address at which to reach a member, and True if it is one inside our own network.

        It is what the member itself has signed and what the contact sees: neither alone makes us connect anywhere. None
        without such an address.
        """
        ours = self.outside(contact)
        try:
            stated = parse_address(meet.stated) if meet.stated else None
            inside = parse_address(meet.inside) if meet.inside else None
        except ConfigError:
            return None, False
        if stated is None or ours is None or meet.seen != meet.stated:
            return None, False
        mine = self.listens_at  # Both sides decide alike: each knows both addresses inside.
        if stated.host == ours.host and inside and mine and is_private(inside.host) and is_private(mine.host):
            return inside, True
        return stated, False


def payload(origin: PeerId, target: PeerId, stated: str, inside: str) -> bytes:
    """Return the bytes that an origin signs: its addresses, for one target."""
    packed: bytes = msgpack.packb((DOMAIN, origin, target, stated, inside), use_bin_type=True)
    return packed
