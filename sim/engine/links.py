"""Who is linked with whom, and the messages on their way.

A link is one connection for each pair. Opening it takes what TCP and Hello take: the acceptor has it after three
latencies, the dialler after four. What a cut pair sends each other is lost without a word (TCP would deliver it late,
after its retransmission timer: this is the stricter), and so a link outlives a cut; a dial across one fails when the
Hello is overdue. A killed peer's partners see their links break a latency later, as a kernel tells them; a message over
a link that its receiver does not hold any more breaks it for the sender.

A dial takes four latencies at most, so that they must stay below a quarter of ``hello_timeout_s``, as a node's do.
Not modelled, being a node's own housekeeping: the closing of idle links, and the bound on their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from gossip.config import Config
from gossip.effects import Dial, Effect, Send, TryDial
from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire import frames
from gossip.wire.messages import MESSAGES, Fetch, Invite, Message, Offer, Outcome
from sim.engine.events import Events
from sim.engine.host import Host
from sim.world.network import NetworkModel

__all__ = ["VirtualLinks"]

# Every so manieth message is encoded, to know what all of them weigh. A prime: an exchange is four messages in one
# order, and every 64th was nearly always of one kind (a tenth of their bytes was missed).
WEIGHED = 61
PENDING_MESSAGES = 32  # kept for a peer that is being dialled, as a node keeps them

CODES = {kind: code for code, kind in enumerate(MESSAGES.values())}  # in the log of events
LINKED, BROKEN = 200, 201


def nobody_asks(host: Host) -> None:
    """Until the swarm says how to see a training loop."""


class VirtualLinks:
    """Performs Send, Dial and TryDial, and reports what becomes of them through ``perform``."""

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, perform: Callable[[Host, list[Effect]], None]
    ) -> None:
        self.events, self.network, self.config, self.perform = events, network, config, perform
        self.by_id: dict[PeerId, Host] = {}
        self.by_address: dict[Address, Host] = {}
        self.seen: Callable[[Host], None] = nobody_asks
        self.group_of: dict[int, int] | None = None  # by row, while the network is cut into groups
        self.latency = network.latency
        self.posted = 0
        self.message_bytes = 0  # sent, estimated from one frame in WEIGHED

    def add(self, host: Host) -> None:
        before = self.by_id.get(host.id)
        assert before is None or before.gone, "two peers have one name"
        self.by_id[host.id] = self.by_address[host.address] = host

    def linked(self, host: Host, partner: PeerId) -> bool:
        """Whether this end holds a link to the partner."""
        return partner in host.links

    # -- the network ---------------------------------------------------------------------------------------------
    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        self.group_of = {row: number for number, group in enumerate(groups, 1) for row in group}

    def heal(self) -> None:
        self.group_of = None

    def cut(self, a: Host, b: Host) -> bool:
        return self.group_of is not None and self.group_of.get(a.row, 0) != self.group_of.get(b.row, 0)

    def after(self, sender: Host, receiver: Host) -> float:
        """When what is sent now arrives."""
        return self.events.now + self.latency(sender.index, receiver.index)

    # -- messages ------------------------------------------------------------------------------------------------
    def send(self, host: Host, effect: Send) -> None:
        to = effect.to
        if to in host.links:
            self.post(host, self.by_id[to], effect.message)
            return
        record = host.peer.member(to)
        if record is None or record.address is None:
            return
        waiting = host.pending.get(to)
        if waiting is None:
            waiting = host.pending[to] = deque(maxlen=PENDING_MESSAGES)
        waiting.append(effect.message)
        self.open(host, record.address, to)

    def post(self, host: Host, to: Host, message: Message) -> None:
        self.posted += 1
        if self.posted % WEIGHED == 0:
            self.message_bytes += WEIGHED * len(frames.encode(message))
        if (self.group_of is None or not self.cut(host, to)) and not self.network.loses(host.rng):
            self.events.push(self.after(host, to), self.on_message, to, host, message)

    def on_message(self, host: Host, sender: Host, message: Message) -> None:
        if host.gone:
            return
        if sender.id not in host.links:
            self.hang_up(host, sender.id)
            return
        self.deliver(host, sender, message)

    def deliver(self, host: Host, sender: Host, message: Message) -> None:
        kind = type(message)
        if kind is Offer or kind is Fetch or kind is Invite or kind is Outcome:
            self.seen(host)
        self.events.note(host.index, sender.index, CODES[kind])
        self.perform(host, host.peer.receive(sender.id, message, self.events.now))

    # -- a link's beginning --------------------------------------------------------------------------------------
    def dial(self, host: Host, effect: Dial) -> None:
        self.open(host, effect.address, effect.expect)

    def open(self, host: Host, address: Address, expect: PeerId | None) -> None:
        if address in host.dialling or address == host.address:
            return
        host.dialling.add(address)
        to = self.by_address[address]
        overdue = self.events.now + self.config.hello_timeout_s
        if self.group_of is not None and self.cut(host, to):
            self.events.push(overdue, self.on_failed, host, to, expect)
        else:
            self.events.push(self.after(host, to), self.on_knock, host, to, expect, overdue)

    def on_knock(self, host: Host, to: Host, expect: PeerId | None, overdue: float) -> None:
        """The acceptor's machine answers, or refuses where nobody listens."""
        if self.group_of is not None and self.cut(host, to):
            self.events.push(overdue, self.on_failed, host, to, expect)
        elif to.gone:
            self.events.push(self.after(to, host), self.on_failed, host, to, expect)
        else:
            self.events.push(self.after(to, host), self.on_connected, host, to, expect, overdue)

    def on_connected(self, host: Host, to: Host, expect: PeerId | None, overdue: float) -> None:
        """The dialler says Hello."""
        if host.gone:
            return
        if expect is None:
            host.peer.seed_answered(to.address)
        if self.group_of is not None and self.cut(host, to):
            self.events.push(overdue, self.on_failed, host, to, expect)
        else:
            record = host.peer.record
            self.events.push(self.after(host, to), self.on_accepted, host, to, record, expect, overdue)

    def on_accepted(
        self, host: Host, to: Host, record: MemberRecord, expect: PeerId | None, overdue: float
    ) -> None:  # fmt: skip
        """The acceptor says Hello too, and has its link."""
        if self.group_of is not None and self.cut(host, to):
            self.events.push(overdue, self.on_failed, host, to, expect)
        elif to.gone:
            self.events.push(self.after(to, host), self.on_failed, host, to, expect)
        else:
            self.events.push(self.after(to, host), self.on_welcomed, host, to, to.peer.record)
            self.begin(to, host, record)

    def on_welcomed(self, host: Host, to: Host, record: MemberRecord) -> None:
        host.dialling.discard(to.address)
        if not host.gone:
            self.begin(host, to, record)

    def on_failed(self, host: Host, to: Host, expect: PeerId | None) -> None:
        if host.gone:
            return
        host.dialling.discard(to.address)
        if expect is not None:
            host.pending.pop(expect, None)
        self.perform(host, host.peer.dial_failed(expect, self.events.now))

    def begin(self, host: Host, partner: Host, record: MemberRecord) -> None:
        host.links[partner.id] = None
        self.events.note(host.index, partner.index, LINKED)
        waiting = host.pending.pop(partner.id, ())
        self.perform(host, host.peer.linked(partner.id, record, self.events.now))
        for message in waiting:
            if host.peer.meant(partner.id, message):
                self.post(host, partner, message)

    def try_dial(self, host: Host, effect: TryDial) -> None:
        to = self.by_address[effect.address]
        if self.group_of is not None and self.cut(host, to):
            self.events.push(self.events.now + self.config.hello_timeout_s, self.on_tried, host, effect.asker, False)
        else:
            self.events.push(self.after(host, to), self.on_tried_knock, host, effect.asker, to)

    def on_tried_knock(self, host: Host, asker: PeerId, to: Host) -> None:
        self.events.push(self.after(to, host), self.on_tried, host, asker, not to.gone)

    def on_tried(self, host: Host, asker: PeerId, ok: bool) -> None:
        if not host.gone:
            self.perform(host, host.peer.dial_tried(asker, ok, self.events.now))

    # -- its end -------------------------------------------------------------------------------------------------
    def hang_up(self, host: Host, partner: PeerId) -> None:
        """This end is closed, and the other one learns it a latency later, unless they are cut off."""
        other = self.by_id[partner]
        if not self.cut(host, other):
            self.events.push(self.after(host, other), self.on_broken, other, host.id)

    def close(self, host: Host, partner: PeerId) -> None:
        """Close both ends."""
        self.hang_up(host, partner)
        self.on_broken(host, partner)

    def on_broken(self, host: Host, partner: PeerId) -> None:
        if host.gone or partner not in host.links:
            return
        del host.links[partner]
        self.events.note(host.index, self.by_id[partner].index, BROKEN)
        self.broken(host, partner)

    def broken(self, host: Host, partner: PeerId) -> None:
        """Its sessions with the partner end, and it learns why."""
        peer = host.peer
        for session in peer.pairs_with(partner):
            self.perform(host, peer.failed(session, "broken", self.events.now))
        self.perform(host, peer.unlinked(partner, self.events.now))

    def killed(self, host: Host) -> None:
        """Its machine tells its partners that their links are gone."""
        for partner in host.links:
            self.hang_up(host, partner)
