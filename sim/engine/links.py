"""Links between simulated peers: dialling, messages, idle timeouts and broken connections.

A link is the one connection of a pair of peers, and :mod:`sim.engine.carrier` carries its traffic. It survives a
network partition. If a message arrives over a link that the receiver no longer holds, the sender's end breaks.

To *dial* is to open a link. It takes the TCP handshake, the TLS handshake and a Hello each way, the message by which a
peer presents itself. The acceptor has its link after three latencies and the dialler after four; TLS adds two. A *line*
is one direction of the TCP connection. A lost SYN is retransmitted 1, 2, 3, 4, 5 and 7 s after the first one. Peers
therefore notice within seconds that a partition has healed. The machine of a peer that is gone refuses a dial at once.
A dial to a machine that is off fails at the Hello timeout.

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

from collections import deque
from collections.abc import Callable

from gossip.config import Config
from gossip.discovery.reachability import TRY_S
from gossip.discovery.sightings import Sighting
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

# One message in so many is encoded, to estimate the size of all of them. It is a prime because an exchange is four
# messages in a fixed order: every 64th message was nearly always of one kind, which missed a tenth of the bytes.
MESSAGES_PER_SAMPLE = 61
PENDING_MESSAGES = 32  # Messages kept for a peer that is being dialled, as on a real node.

# Seconds from kill -9 until the kernel closes the sockets; 52 to 214 ms were measured with torch loaded.
SOCKETS_CLOSE_S = 0.05, 0.2

# A node checks for idle links every 0.75 s. Here a check scans all links of a host, so it runs less often. A link that
# closes after 63 s instead of 60 does not change the results.
IDLE_CHECK_S = 3.0

CODES = {kind: code for code, kind in enumerate(MESSAGES.values())}  # Codes of messages in the event log.
LINKED, BROKEN, IDLE = 200, 201, 202  # Codes of events in the event log.


class DialAttempt:
    """An attempt of ``dialler`` to open a link to ``acceptor``, with the lines that the link will use.

    ``expected`` is the acceptor's id; None if the dialler knows only the address, as that of a seed. With an ``asker``
    the dial only tests for that peer whether the address answers; ``asker`` is None for a link. If a pair has two
    links, the higher ``number`` wins.
    """

    def __init__(
        self, dialler: Host, acceptor: Host, expected: PeerId | None, asker: PeerId | None, number: int,
        began_at: float, deadline: float,
    ) -> None:  # fmt: skip
        self.dialler, self.acceptor, self.expected = dialler, acceptor, expected
        self.asker, self.number = asker, number
        self.began_at, self.deadline = began_at, deadline
        self.syns = 0  # SYNs that were sent again.
        self.is_over = False  # True once it has failed, or its dialler has the link.
        self.is_hidden = False  # True if neither side can be dialled, so that both wait for the link.
        self.line_out: Line | None = None  # From the dialler; None without TCP.
        self.line_back: Line | None = None  # To the dialler; None without TCP.


class Dials:
    """The dialler of all hosts. It calls ``open_end(host, partner, record, dial, line)`` for each end of a new link."""

    def __init__(
        self, carrier: Carrier, config: Config, perform: Callable[[Host, list[Effect]], None],
        open_end: Callable[[Host, Host, MemberRecord, DialAttempt, Line | None], None],
    ) -> None:  # fmt: skip
        self.carrier, self.events, self.transport = carrier, carrier.events, carrier.transport
        self.config, self.perform, self.open_end = config, perform, open_end
        self.by_address: dict[Address, Host] = {}
        self.number = 0  # Number of the latest dial.

    def open(self, host: Host, address: Address, expected: PeerId | None) -> None:
        """Dial an address, unless this host is dialling it already or has it itself."""
        if address in host.dialled or address == host.address:
            return
        host.dialled.add(address)
        self.send_syn(self.new_dial(host, self.by_address[address], expected, None))

    def try_dial(self, host: Host, effect: TryDial) -> None:
        """Dial an address only to report to the asker whether it answers."""
        self.send_syn(self.new_dial(host, self.by_address[effect.address], None, effect.asker))

    def new_dial(self, host: Host, acceptor: Host, expected: PeerId | None, asker: PeerId | None) -> DialAttempt:
        self.number += 1
        now = self.events.now
        longest_s = self.config.hello_timeout_s if asker is None else TRY_S
        dial = DialAttempt(host, acceptor, expected, asker, self.number, now, now + longest_s)
        if self.transport is not None:
            dial.line_out = self.carrier.new_line(host, acceptor)
            dial.line_back = self.carrier.new_line(acceptor, host)
        return dial

    # -- TCP -----------------------------------------------------------------------------------------------------
    def send_syn(self, dial: DialAttempt) -> None:
        """Send the SYN, the first packet of a connection."""
        if self.carrier.delivers_packet(dial.line_out, dial.dialler, dial.acceptor):
            self.events.push(self.carrier.arrival(dial.dialler, dial.acceptor), self.on_syn, dial)
        else:
            self.resend_syn(dial)

    def resend_syn(self, dial: DialAttempt) -> None:
        """Retransmit an unanswered SYN as the kernel does, until the deadline of the dial."""
        again_at = max(dial.began_at + syn_again_s(dial.syns), self.events.now)
        if self.transport is None or again_at >= dial.deadline:
            self.events.push(dial.deadline, self.on_failed, dial)
        else:
            dial.syns += 1
            self.events.push(again_at, self.send_syn, dial)

    def on_syn(self, dial: DialAttempt) -> None:
        """Answer the SYN from the acceptor's machine; refuse it if the peer is gone. A router drops it."""
        dialler, acceptor, nat = dial.dialler, dial.acceptor, self.carrier.network.nat
        is_lost = acceptor.silent or (nat is not None and not nat.is_dialable(acceptor.name))
        if is_lost or not self.carrier.delivers_packet(dial.line_back, acceptor, dialler):
            self.resend_syn(dial)
        else:
            handler = self.on_failed if acceptor.gone else self.on_connected
            self.events.push(self.carrier.arrival(acceptor, dialler), handler, dial)

    # -- Hello ---------------------------------------------------------------------------------------------------
    def on_connected(self, dial: DialAttempt) -> None:
        """Send the dialler's Hello, with TLS after another round trip; a mere test of the address ends here."""
        dialler, acceptor, line = dial.dialler, dial.acceptor, dial.line_out
        if dialler.gone:
            return
        if dial.asker is not None:
            self.perform(dialler, dialler.peer.on_dial_tried(dial.asker, True, self.events.now))
            return
        if self.transport is not None and self.transport.tls and line is not None:
            latency = self.carrier.latency(dialler.index, acceptor.index)
            line.free_at = max(line.free_at, self.events.now + 3 * latency)  # Two for TLS, and one for the Hello.
        self.send_hello(dial, line, dialler, acceptor, self.on_dialler_hello)

    def send_hello(
        self, dial: DialAttempt, line: Line | None, sender: Host, receiver: Host,
        handler: Callable[[DialAttempt, MemberRecord], None],
    ) -> None:  # fmt: skip
        """Send a Hello; if none arrives, the dial fails at its deadline."""
        record, undelayed = sender.peer.membership.me, self.carrier.arrival(sender, receiver)
        if line is not None:
            arrives = self.carrier.send_segment(line, sender, receiver, handler, dial, record)
            if arrives > undelayed:  # It is late, and a partition may hold it for ever.
                self.events.push(dial.deadline, self.on_failed, dial)
        elif self.carrier.is_cut(sender, receiver):
            self.events.push(dial.deadline, self.on_failed, dial)
        else:
            self.events.push(undelayed, handler, dial, record)

    def on_dialler_hello(self, dial: DialAttempt, record: MemberRecord) -> None:
        """Send the acceptor's Hello and open its end of the link."""
        dialler, acceptor, line_out, line_back = dial.dialler, dial.acceptor, dial.line_out, dial.line_back
        if dial.is_over or acceptor.silent:
            self.events.push(max(dial.deadline, self.events.now), self.on_failed, dial)
        elif acceptor.gone:
            self.events.push(self.carrier.arrival(acceptor, dialler), self.on_failed, dial)
        elif line_back is None and self.carrier.is_cut(dialler, acceptor):
            self.events.push(dial.deadline, self.on_failed, dial)
        elif line_back is None or not dialler.gone or dialler.silent:  # Else the dialler's machine closed its socket.
            if line_out is not None and line_back is not None:
                line_out.back, line_back.back = line_back, line_out
            self.send_hello(dial, line_back, acceptor, dialler, self.on_acceptor_hello)
            self.open_end(acceptor, dialler, record, dial, line_back)

    def on_acceptor_hello(self, dial: DialAttempt, record: MemberRecord) -> None:
        """Open the dialler's end of the link."""
        if dial.is_over:
            return
        dial.is_over = True
        dial.dialler.dialled.discard(dial.acceptor.address)
        if not dial.dialler.gone:
            self.open_end(dial.dialler, dial.acceptor, record, dial, dial.line_out)

    def on_failed(self, dial: DialAttempt) -> None:
        """Report the failed dial to the dialler's peer, and drop the messages that waited for the link."""
        host, expected = dial.dialler, dial.expected
        if host.gone or dial.is_over:
            return
        dial.is_over = True
        if dial.asker is not None:
            self.perform(host, host.peer.on_dial_tried(dial.asker, False, self.events.now))
            return
        if dial.is_hidden:
            for side, other in ((host, dial.acceptor), (dial.acceptor, host)):
                if not side.gone and other.id not in side.links:
                    self.perform(side, side.peer.on_not_met(other.id, self.events.now))
            return
        host.dialled.discard(dial.acceptor.address)
        if expected is not None:
            host.pending.pop(expected, None)
        self.perform(host, host.peer.on_dial_failed(expected, self.events.now))


class VirtualLinks:
    """The links of all hosts: performs Send, Dial and TryDial, and returns the peers' reactions to ``perform``.

    ``before_answer(host)`` is called before a peer gets a message that it answers with its counts.
    """

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, perform: Callable[[Host, list[Effect]], None],
        before_answer: Callable[[Host], None],
    ) -> None:  # fmt: skip
        self.before_answer = before_answer
        self.events, self.network, self.config, self.perform = events, network, config, perform
        self.carrier = Carrier(events, network, config.stall_s)
        self.dials = Dials(self.carrier, config, perform, self.open_end)
        self.transport = self.carrier.transport
        self.by_id: dict[PeerId, Host] = {}
        self.posted_messages = 0
        self.message_bytes = 0  # Sent bytes, estimated from one frame in MESSAGES_PER_SAMPLE.

    def add(self, host: Host) -> None:
        before = self.by_id.get(host.id)
        assert before is None or before.gone, "two peers have one name"
        self.by_id[host.id] = self.dials.by_address[host.address] = host

    def is_linked(self, host: Host, partner: PeerId) -> bool:
        """Return True if this end holds a link to the partner."""
        return partner in host.links

    # -- messages ------------------------------------------------------------------------------------------------
    def send(self, host: Host, effect: Send) -> None:
        """Send a message over the link; without one, keep the message and dial."""
        to = effect.to
        if to in host.links:
            self.post(host, self.by_id[to], effect.message)
            return
        record = host.peer.membership.record(to)
        if record is None or record.address is None:
            return
        host.pending.setdefault(to, deque(maxlen=PENDING_MESSAGES)).append(effect.message)
        self.dials.open(host, record.address, to)

    def post(self, host: Host, to: Host, message: Message) -> None:
        """Put a message on the open link to another host."""
        self.posted_messages += 1
        if self.posted_messages % MESSAGES_PER_SAMPLE == 0:
            size_bytes = MESSAGES_PER_SAMPLE * len(frames.encode(message))
            self.message_bytes += size_bytes
            if (relay := self.carrier.relay_of(host.index, to.index)) is not None:
                self.carrier.flows.count_relayed(relay, size_bytes)
        carrier = self.carrier
        if self.transport is not None:
            line = host.lines.get(to.id) or carrier.line_to(host, to)
            carrier.send_segment(line, host, to, self.on_message, to, host, message)
        elif (carrier.group_of is None or not carrier.is_cut(host, to)) and not self.network.loses(host.rng):
            self.events.push(carrier.arrival(host, to), self.on_message, to, host, message)

    def on_message(self, host: Host, sender: Host, message: Message) -> None:
        """Deliver a message that arrived on an open link; break the sender's end of another one."""
        if host.gone:
            return
        if sender.id not in host.links:
            self.reset(host, sender)
            return
        self.deliver(host, sender, message)

    def deliver(self, host: Host, sender: Host, message: Message) -> None:
        kind = type(message)
        if kind is Offer or kind is Fetch or kind is Invite or kind is Outcome:
            self.before_answer(host)
        self.events.log(host.index, sender.index, CODES[kind])
        self.perform(host, host.peer.receive(sender.id, message, self.events.now))

    # -- opening links -------------------------------------------------------------------------------------------
    def dial(self, host: Host, effect: Dial) -> None:
        self.dials.open(host, effect.address, effect.expect)

    def open_end(self, host: Host, partner: Host, record: MemberRecord, dial: DialAttempt, line: Line | None) -> None:
        """Open this host's end of a new link, and send the messages that waited for it."""
        if line is not None and partner.id not in host.links and not self.make_room(host):
            host.pending.pop(partner.id, None)
            self.carrier.send_segment(line, host, partner, self.on_broken, partner, host.id, dial.number)
            return
        if dial.number > host.links.get(partner.id, 0):  # Two peers that dialled each other use the newer link.
            host.links[partner.id] = dial.number
            if line is not None:
                host.lines[partner.id] = line
                if not host.is_watched:
                    host.is_watched = True
                    self.events.push(self.events.now + self.config.internal.idle_s, self.on_idle_check, host)
        self.events.log(host.index, partner.index, LINKED)
        waiting = host.pending.pop(partner.id, ())
        self.perform(host, host.peer.on_linked(partner.id, record, self.events.now, self.sighting(host, partner)))
        for message in waiting:
            if host.peer.view.should_send(partner.id, message):
                self.post(host, partner, message)

    def sighting(self, host: Host, partner: Host) -> Sighting | None:
        """Return where both ends of a link see each other; None where there are no routers."""
        nat, way = self.network.nat, self.carrier.tunnels.get((host.index, partner.index))
        if nat is None:
            return None
        if way is not None:
            return Sighting(way.relay.address, way.relay.address)
        return Sighting(nat.outside(partner.name), nat.outside(host.name))

    # -- closing idle links --------------------------------------------------------------------------------------
    def on_idle_check(self, host: Host) -> None:
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
                    self.close_idle(host, partner)
        self.events.push(max(oldest + idle_s, now + IDLE_CHECK_S), self.on_idle_check, host)

    def make_room(self, host: Host) -> bool:
        """Close the least recently used idle link if all are taken; return False if no further link fits."""
        links, lines = host.links, host.lines
        if len(links) < self.config.internal.max_links:
            return True
        # The partners of exchanges, and the peers through which others reach this one.
        needed = {*host.peer.view.session_peers(), *host.peer.reach.homes}
        idle = [partner for partner in links if partner not in needed]
        if idle:
            self.close_idle(host, min(idle, key=lambda partner: lines[partner].last_at))
        return bool(idle)

    def close_idle(self, host: Host, partner: PeerId) -> None:
        """Close both ends of an idle link. Messages that the other end sent during a partition are dropped."""
        number, line, other = host.links[partner], host.lines[partner], self.by_id[partner]
        if line.back is not None:
            self.carrier.drop_held(line.back)
        self.carrier.send_segment(line, host, other, self.on_idle, other, host.id, number)
        self.on_idle(host, partner, number)

    def on_idle(self, host: Host, partner: PeerId, number: int) -> None:
        """Close this end of an idle link, without suspecting the partner."""
        if self.remove_link(host, partner, number, IDLE):
            host.lines.pop(partner).back = None
            self.report_unlinked(host, partner, "idle")

    # -- broken links --------------------------------------------------------------------------------------------
    def close(self, host: Host, partner: PeerId) -> None:
        """Close both ends, as after a failure of the partner."""
        number = host.links.get(partner, 0)
        self.hang_up(host, partner)
        self.on_broken(host, partner, number)

    def hang_up(self, host: Host, partner: PeerId) -> None:
        """Tell the partner that this end is closed, one latency later or when TCP gets through after a partition."""
        self.break_other_end(host, self.by_id[partner], host.links.get(partner, 0))

    def reset(self, host: Host, sender: Host) -> None:
        """Break the sender's end: its message came over a link that this host no longer holds."""
        self.break_other_end(host, sender, sender.links.get(host.id, 0))

    def break_other_end(self, host: Host, other: Host, number: int) -> None:
        """Notify ``other`` that the link ``number`` is gone; it ignores this if its own link is newer."""
        if self.transport is not None:
            line = host.lines.get(other.id) or self.carrier.line_to(host, other)
            self.carrier.send_segment(line, host, other, self.on_broken, other, host.id, number)
        elif not self.carrier.is_cut(host, other):
            self.events.push(self.carrier.arrival(host, other), self.on_broken, other, host.id, number)

    def on_broken(self, host: Host, partner: PeerId, number: int) -> None:
        if self.remove_link(host, partner, number, BROKEN):
            self.report_unlinked(host, partner)

    def remove_link(self, host: Host, partner: PeerId, number: int, event: int) -> bool:
        """Remove the link if it is ``number`` or older, and return True if one was removed."""
        if host.gone or partner not in host.links or host.links[partner] > number:
            return False
        del host.links[partner]
        self.end_tunnel(host, self.by_id[partner])
        self.events.log(host.index, self.by_id[partner].index, event)
        return True

    def report_unlinked(self, host: Host, partner: PeerId, code: str = "broken") -> None:
        """Fail the peer's sessions with the partner, and report the lost link to it."""
        peer = host.peer
        for session in peer.view.pairs_with(partner):
            self.perform(host, peer.on_failed(session, code, self.events.now))
        self.perform(host, peer.on_unlinked(partner, self.events.now, orderly=code == "idle"))

    def end_tunnel(self, host: Host, other: Host) -> None:
        """End the tunnel of a pair, if it has one, so that its relay may pass another one on."""
        way = self.carrier.tunnels.pop((host.index, other.index), None)
        if way is not None:
            del self.carrier.tunnels[other.index, host.index]
            if not way.relay.gone:
                self.perform(way.relay, way.relay.peer.on_tunnel(way.name, False))

    def on_killed(self, host: Host) -> None:
        """Close the links of a killed host; with a silent host, its machine is off and the partners learn nothing.

        Tunnels through it break as soon as their ends can know, even if its machine is off.
        """
        for end, other, relay, _ in self.carrier.tunnels.values():
            if relay is host:
                number = end.links.get(other.id, 0)
                self.events.push(self.carrier.arrival(host, end), self.on_broken, end, other.id, number)
        if host.silent:
            return
        partners = self.partners_of(host)
        if self.transport is None:
            self.close_sockets(host, partners)
        else:
            low, high = SOCKETS_CLOSE_S
            when = self.events.now + low + (high - low) * host.rng.random()
            self.events.push(when, self.close_sockets, host, partners)

    def partners_of(self, host: Host) -> list[PeerId]:
        """Return the peers that learn that this host has died."""
        return list(host.links)

    def close_sockets(self, host: Host, partners: list[PeerId]) -> None:
        for partner in partners:
            self.hang_up(host, partner)
