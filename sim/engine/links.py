"""Links between simulated peers: dialling, messages, idle timeouts and broken connections.

A link is the one connection of a pair of peers, and :mod:`sim.engine.carrier` carries its traffic. It survives a
network partition. If a message arrives over a link that the receiver no longer holds, the sender's end breaks.

Opening a link takes the TCP handshake, the TLS handshake and both Hellos. The acceptor has its link after three
latencies and the dialler after four; TLS adds two. A lost SYN is retransmitted 1, 2, 3, 4, 5 and 7 s after the first
one. Peers therefore notice within seconds that a partition has healed. The machine of a peer that is gone refuses a
dial at once. A dial to a machine that is off fails at the Hello timeout.

When a peer is killed, the kernel resets its links and the partners learn of it one latency later. With TCP, 50 to
200 ms come first: the kernel frees the memory of a process that held torch before it closes the sockets. When a machine
loses power, the partners receive nothing.

With TCP, an end closes a link that carried nothing for ``idle_s`` and says that it was idle, which is no sign of a
death. If ``max_links`` are open, it closes the least recently used link in the same way. Messages that a partition held
back on such a link are lost with it. The next message then dials anew, while the old link would have waited for TCP's
next retransmission, which comes minutes late after minutes of partition. TCP itself gives up after 15 minutes without
an answer, longer than any link lives.

A dial takes at least four latencies (six with TLS). They must stay below ``hello_timeout_s``, as on a real node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gossip.config import Config
from gossip.effects import Dial, Effect, Send, TryDial
from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire import frames
from gossip.wire.messages import MESSAGES, Fetch, Invite, Message, Offer, Outcome
from sim.engine.carrier import Carrier
from sim.engine.events import Events
from sim.engine.host import Host
from sim.world.line import Line
from sim.world.network import NetworkModel
from sim.world.tcp import syn_again_s

__all__ = ["VirtualLinks"]

# One message in WEIGHED is encoded, to estimate the size of all of them. It is a prime because an exchange is four
# messages in a fixed order: every 64th message was nearly always of one kind, which missed a tenth of the bytes.
WEIGHED = 61
PENDING_MESSAGES = 32  # kept for a peer that is being dialled, as on a real node

CLOSED_S = 0.05, 0.2  # delay between kill -9 and closed sockets; 52 to 214 ms were measured with torch loaded

# A node checks for idle links every 0.75 s. Here a check scans all links of a host, so it runs less often. A link that
# closes after 63 s instead of 60 does not change the results.
LOOK_S = 3.0

CODES = {kind: code for code, kind in enumerate(MESSAGES.values())}  # codes in the event log
LINKED, BROKEN, IDLE = 200, 201, 202


def unobserved(host: Host) -> None:
    """Do nothing; the default until the swarm sets the callback for the training loop."""


class Dialling:
    """An attempt of ``host`` to open a link to ``to``, with the lines that the link will use.

    With an ``asker`` it only tests whether the address answers. If a pair has two links, the higher number wins.
    """

    __slots__ = ("asker", "back", "began", "expect", "host", "number", "out", "over", "overdue", "to", "tries")

    def __init__(
        self, host: Host, to: Host, expect: PeerId | None, asker: PeerId | None, number: int, began: float,
        overdue: float,
    ) -> None:  # fmt: skip
        self.host, self.to, self.expect, self.asker, self.number = host, to, expect, asker, number
        self.began, self.overdue = began, overdue
        self.tries = 0
        self.over = False  # it has failed, or its host has the link
        self.out: Line | None = None
        self.back: Line | None = None


class Dials:
    """The dialler of all hosts. It calls ``begin(host, partner, record, dial, line)`` for each end of a new link."""

    def __init__(
        self, carrier: Carrier, config: Config, perform: Callable[[Host, list[Effect]], None],
        begin: Callable[[Host, Host, MemberRecord, Dialling, Line | None], None],
    ) -> None:  # fmt: skip
        self.carrier, self.events, self.transport = carrier, carrier.events, carrier.transport
        self.config, self.perform, self.begin = config, perform, begin
        self.by_address: dict[Address, Host] = {}
        self.number = 0

    def open(self, host: Host, address: Address, expect: PeerId | None) -> None:
        if address in host.dialling or address == host.address:
            return
        host.dialling.add(address)
        self.knock(self.dial(host, self.by_address[address], expect, None))

    def try_dial(self, host: Host, effect: TryDial) -> None:
        self.knock(self.dial(host, self.by_address[effect.address], None, effect.asker))

    def dial(self, host: Host, to: Host, expect: PeerId | None, asker: PeerId | None) -> Dialling:
        self.number += 1
        now = self.events.now
        dial = Dialling(host, to, expect, asker, self.number, now, now + self.config.hello_timeout_s)
        if self.transport is not None:
            dial.out, dial.back = self.carrier.fresh(host, to), self.carrier.fresh(to, host)
        return dial

    # -- TCP -----------------------------------------------------------------------------------------------------
    def knock(self, dial: Dialling) -> None:
        """Send the SYN, the first packet of a connection."""
        if self.carrier.passes(dial.out, dial.host, dial.to):
            self.events.push(self.carrier.after(dial.host, dial.to), self.on_knock, dial)
        else:
            self.knock_again(dial)

    def knock_again(self, dial: Dialling) -> None:
        """Retransmit an unanswered SYN as the kernel does, until the dial is overdue."""
        again = max(dial.began + syn_again_s(dial.tries), self.events.now)
        if self.transport is None or again >= dial.overdue:
            self.events.push(dial.overdue, self.on_failed, dial)
        else:
            dial.tries += 1
            self.events.push(again, self.knock, dial)

    def on_knock(self, dial: Dialling) -> None:
        """Answer the SYN from the acceptor's machine; refuse it if the peer is gone."""
        host, to = dial.host, dial.to
        if to.silent or not self.carrier.passes(dial.back, to, host):
            self.knock_again(dial)
        else:
            self.events.push(self.carrier.after(to, host), self.on_failed if to.gone else self.on_connected, dial)

    # -- Hello ---------------------------------------------------------------------------------------------------
    def on_connected(self, dial: Dialling) -> None:
        """Send the dialler's Hello; with TLS it arrives a round trip later."""
        host, to = dial.host, dial.to
        if host.gone:
            return
        if dial.asker is not None:
            self.perform(host, host.peer.on_dial_tried(dial.asker, True, self.events.now))
            return
        if dial.expect is None:
            host.peer.on_seed_answered(to.address)
        if self.transport is not None and self.transport.tls and dial.out is not None:
            dial.out.free_at = max(dial.out.free_at, self.events.now + 3 * self.carrier.latency(host.index, to.index))
        self.hello(dial, dial.out, host, to, self.on_accepted)

    def hello(
        self, dial: Dialling, line: Line | None, host: Host, to: Host, handler: Callable[[Dialling, MemberRecord], None]
    ) -> None:
        """Send a Hello; the dial fails when it is overdue without one."""
        record = host.peer.membership.me
        if line is not None:
            direct = self.carrier.after(host, to)
            if self.carrier.message(line, host, to, handler, dial, record) > direct:  # a cut may keep it
                self.events.push(dial.overdue, self.on_failed, dial)
        elif self.carrier.cut(host, to):
            self.events.push(dial.overdue, self.on_failed, dial)
        else:
            self.events.push(self.carrier.after(host, to), handler, dial, record)

    def on_accepted(self, dial: Dialling, record: MemberRecord) -> None:
        """Send the acceptor's Hello and begin its end of the link."""
        host, to = dial.host, dial.to
        if dial.over or to.silent:
            self.events.push(max(dial.overdue, self.events.now), self.on_failed, dial)
        elif to.gone:
            self.events.push(self.carrier.after(to, host), self.on_failed, dial)
        elif dial.back is None and self.carrier.cut(host, to):
            self.events.push(dial.overdue, self.on_failed, dial)
        elif dial.back is None or not host.gone or host.silent:  # otherwise the dialler's machine has closed its socket
            if dial.out is not None and dial.back is not None:
                dial.out.back, dial.back.back = dial.back, dial.out
            self.hello(dial, dial.back, to, host, self.on_welcomed)
            self.begin(to, host, record, dial, dial.back)

    def on_welcomed(self, dial: Dialling, record: MemberRecord) -> None:
        host, to = dial.host, dial.to
        if dial.over:
            return
        dial.over = True
        host.dialling.discard(to.address)
        if not host.gone:
            self.begin(host, to, record, dial, dial.out)

    def on_failed(self, dial: Dialling) -> None:
        host, expect = dial.host, dial.expect
        if host.gone or dial.over:
            return
        dial.over = True
        if dial.asker is not None:
            self.perform(host, host.peer.on_dial_tried(dial.asker, False, self.events.now))
            return
        host.dialling.discard(dial.to.address)
        if expect is not None:
            host.pending.pop(expect, None)
        self.perform(host, host.peer.on_dial_failed(expect, self.events.now))


class VirtualLinks:
    """The links of all hosts: performs Send, Dial and TryDial, and returns the peers' reactions to ``perform``."""

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, perform: Callable[[Host, list[Effect]], None]
    ) -> None:
        self.events, self.network, self.config, self.perform = events, network, config, perform
        self.carrier = Carrier(events, network, config.stall_s)
        self.dials = Dials(self.carrier, config, perform, self.begin)
        self.transport, self.cut, self.after = self.carrier.transport, self.carrier.cut, self.carrier.after
        self.by_id: dict[PeerId, Host] = {}
        self.seen: Callable[[Host], None] = unobserved
        self.posted = 0
        self.message_bytes = 0  # sent, estimated from one frame in WEIGHED

    def add(self, host: Host) -> None:
        before = self.by_id.get(host.id)
        assert before is None or before.gone, "two peers have one name"
        self.by_id[host.id] = self.dials.by_address[host.address] = host

    def linked(self, host: Host, partner: PeerId) -> bool:
        """Return True if this end holds a link to the partner."""
        return partner in host.links

    # -- messages ------------------------------------------------------------------------------------------------
    def send(self, host: Host, effect: Send) -> None:
        to = effect.to
        if to in host.links:
            self.post(host, self.by_id[to], effect.message)
            return
        record = host.peer.membership.record(to)
        if record is None or record.address is None:
            return
        waiting = host.pending.get(to)
        if waiting is None:
            waiting = host.pending[to] = deque(maxlen=PENDING_MESSAGES)
        waiting.append(effect.message)
        self.dials.open(host, record.address, to)

    def post(self, host: Host, to: Host, message: Message) -> None:
        self.posted += 1
        if self.posted % WEIGHED == 0:
            self.message_bytes += WEIGHED * len(frames.encode(message))
        carrier = self.carrier
        if self.transport is not None:
            line = host.lines.get(to.id) or carrier.to(host, to)
            carrier.message(line, host, to, self.on_message, to, host, message)
        elif (carrier.group_of is None or not carrier.cut(host, to)) and not self.network.loses(host.rng):
            self.events.push(carrier.after(host, to), self.on_message, to, host, message)

    def on_message(self, host: Host, sender: Host, message: Message) -> None:
        if host.gone:
            return
        if sender.id not in host.links:
            self.reset(host, sender)
            return
        self.deliver(host, sender, message)

    def deliver(self, host: Host, sender: Host, message: Message) -> None:
        kind = type(message)
        if kind is Offer or kind is Fetch or kind is Invite or kind is Outcome:
            self.seen(host)
        self.events.note(host.index, sender.index, CODES[kind])
        self.perform(host, host.peer.receive(sender.id, message, self.events.now))

    # -- opening links -------------------------------------------------------------------------------------------
    def dial(self, host: Host, effect: Dial) -> None:
        self.dials.open(host, effect.address, effect.expect)

    def try_dial(self, host: Host, effect: TryDial) -> None:
        self.dials.try_dial(host, effect)

    def begin(self, host: Host, partner: Host, record: MemberRecord, dial: Dialling, line: Line | None) -> None:
        if line is not None and partner.id not in host.links and not self.room(host):
            host.pending.pop(partner.id, None)
            self.carrier.message(line, host, partner, self.on_broken, partner, host.id, dial.number)
            return
        if dial.number > host.links.get(partner.id, 0):  # two peers that dialled each other use the newer link
            host.links[partner.id] = dial.number
            if line is not None:
                host.lines[partner.id] = line
                if not host.watched:
                    host.watched = True
                    self.events.push(self.events.now + self.config.internal.idle_s, self.look, host)
        self.events.note(host.index, partner.index, LINKED)
        waiting = host.pending.pop(partner.id, ())
        self.perform(host, host.peer.on_linked(partner.id, record, self.events.now))
        for message in waiting:
            if host.peer.view.should_send(partner.id, message):
                self.post(host, partner, message)

    # -- closing idle links --------------------------------------------------------------------------------------
    def look(self, host: Host) -> None:
        """Close the idle links, and schedule the next check for when another link may become idle."""
        if host.gone:
            return
        now, idle_s, lines = self.events.now, self.config.internal.idle_s, host.lines
        oldest, idle = now, []
        for partner in host.links:
            last_at = lines[partner].last_at
            if now - last_at > idle_s:
                idle.append(partner)
            elif last_at < oldest:
                oldest = last_at
        if idle:
            engaged = set(host.peer.view.session_peers())
            for partner in idle:
                if partner not in engaged:
                    self.retire(host, partner)
        self.events.push(max(oldest + idle_s, now + LOOK_S), self.look, host)

    def room(self, host: Host) -> bool:
        """Return True if another link fits; if necessary, close the least recently used idle one for it."""
        links, lines = host.links, host.lines
        if len(links) < self.config.internal.max_links:
            return True
        kept = {*host.peer.view.session_peers(), *host.peer.reach.homes}
        idle = [partner for partner in links if partner not in kept]
        if idle:
            self.retire(host, min(idle, key=lambda partner: lines[partner].last_at))
        return bool(idle)

    def retire(self, host: Host, partner: PeerId) -> None:
        """Close this end as idle. Messages that the other end sent during a partition are dropped."""
        number, line, other = host.links[partner], host.lines[partner], self.by_id[partner]
        if line.back is not None:
            self.carrier.drop(line.back)
        self.carrier.message(line, host, other, self.on_idle, other, host.id, number)
        self.on_idle(host, partner, number)

    def on_idle(self, host: Host, partner: PeerId, number: int) -> None:
        """Close the link as idle, without suspecting the partner."""
        if self.forgets(host, partner, number, IDLE):
            host.lines.pop(partner).back = None
            self.broken(host, partner, "idle")

    # -- broken links --------------------------------------------------------------------------------------------
    def hang_up(self, host: Host, partner: PeerId) -> None:
        """Tell the partner that this end is closed, one latency later or when TCP gets through after a partition."""
        self.tell(host, self.by_id[partner], host.links.get(partner, 0))

    def reset(self, host: Host, sender: Host) -> None:
        """Break the sender's end: its message came over a link that this host no longer holds."""
        self.tell(host, sender, sender.links.get(host.id, 0))

    def tell(self, host: Host, other: Host, number: int) -> None:
        """Notify ``other`` that the link ``number`` is gone; it ignores this if its own link is newer."""
        if self.transport is not None:
            line = host.lines.get(other.id) or self.carrier.to(host, other)
            self.carrier.message(line, host, other, self.on_broken, other, host.id, number)
        elif not self.cut(host, other):
            self.events.push(self.after(host, other), self.on_broken, other, host.id, number)

    def close(self, host: Host, partner: PeerId) -> None:
        """Close both ends."""
        number = host.links.get(partner, 0)
        self.hang_up(host, partner)
        self.on_broken(host, partner, number)

    def on_broken(self, host: Host, partner: PeerId, number: int) -> None:
        if self.forgets(host, partner, number, BROKEN):
            self.broken(host, partner)

    def forgets(self, host: Host, partner: PeerId, number: int, event: int) -> bool:
        """Drop the link if it is ``number`` or older, and return True if one was dropped."""
        if host.gone or partner not in host.links or host.links[partner] > number:
            return False
        del host.links[partner]
        self.events.note(host.index, self.by_id[partner].index, event)
        return True

    def broken(self, host: Host, partner: PeerId, code: str = "broken") -> None:
        """Fail the peer's sessions with the partner, and report the lost link to it."""
        peer = host.peer
        for session in peer.view.pairs_with(partner):
            self.perform(host, peer.on_failed(session, code, self.events.now))
        self.perform(host, peer.on_unlinked(partner, self.events.now, orderly=code == "idle"))

    def killed(self, host: Host) -> None:
        """Close the links of a killed host; with a silent host, its machine is off and the partners learn nothing."""
        if host.silent:
            return
        partners = self.partners(host)
        if self.transport is None:
            self.closed(host, partners)
        else:
            low, high = CLOSED_S
            self.events.push(self.events.now + low + (high - low) * host.rng.random(), self.closed, host, partners)

    def partners(self, host: Host) -> list[PeerId]:
        """Return the peers that learn that this host has died."""
        return list(host.links)

    def closed(self, host: Host, partners: list[PeerId]) -> None:
        """Close the sockets of a killed host towards these partners."""
        for partner in partners:
            self.hang_up(host, partner)
