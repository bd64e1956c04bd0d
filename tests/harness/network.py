"""TCP-like links, dials, lost messages and partitions between hosts.

A link carries messages in order in each direction. Chunks do not delay control messages, so the arrival of a stream is
computed separately, after all earlier messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossip.ids import Address, PeerId

if TYPE_CHECKING:
    from tests.harness.host import Host
    from tests.harness.world import World


class Link:
    """A connection between ``ends[0]``, which dialled, and ``ends[1]``."""

    __slots__ = ("broken", "ends", "last", "open", "orderly")

    def __init__(self, dialler: Host, other: Host, now: float) -> None:
        self.ends = (dialler, other)
        self.open = [False, False]  # True if the end at this place holds the link.
        self.broken = self.orderly = False
        self.last = [now, now]  # The arrival time of the latest message from this place.

    def place(self, host: Host) -> int:
        return 0 if self.ends[0] is host else 1

    def other(self, host: Host) -> Host:
        return self.ends[1] if self.ends[0] is host else self.ends[0]

    def carries(self, to: Host) -> bool:
        """Return True if a message that is due at this end now arrives."""
        return self.open[self.place(to)] and not self.broken


class Network:
    """A network without faults by default; tests set attributes or override methods to add them."""

    def __init__(self, world: World, latency_s: float, loss: float) -> None:
        self.world, self.latency_s, self.loss = world, latency_s, loss
        self.stream_s, self.chunk_s, self.swallowed_s = 0.05, 0.01, 3.0  # The last is the timeout of a dial.
        self.sides: Callable[[int], int] | None = None  # In a partition: maps a host's number to its side.
        self.fault: Callable[[Host, Host, Any], bool] = lambda sender, to, message: False  # True loses the message.
        self.links: dict[Link, None] = {}

    def latency(self, a: Host, b: Host | None) -> float:
        return self.latency_s

    def parted(self, a: Host, b: Host) -> bool:
        return self.sides is not None and self.sides(a.number) != self.sides(b.number)

    def swallows(self, host: Host, address: Address, to: Host | None) -> bool:
        """Return True if a dial to this address gets no answer, not even a refusal."""
        there = self.world.listening.get(address)
        return there is not None and (there.dark or self.parted(host, there))

    # -- dials -------------------------------------------------------------------------------------------------------
    def dial(self, host: Host, address: Address, expect: PeerId | None) -> None:
        if address in host.dialling:
            host.dialling[address][expect] = None
            return
        host.dialling[address] = {expect: None}
        to = self.world.at(address)
        silent = self.swallows(host, address, to)
        delay_s = self.swallowed_s if silent else 2 * self.latency(host, to)
        host.later(delay_s, self.dialled, host, address, to, silent)

    def dialled(self, host: Host, address: Address, to: Host | None, silent: bool) -> None:
        hoped = host.dialling.pop(address, {})
        to = to if to is not None and not to.gone else self.world.at(address)
        refused = silent or to is None or not to.dialable or to is host or self.parted(host, to) or host.left or to.left
        failed = [peer for peer in hoped if to is None or refused or peer not in (None, to.id)]
        for peer in failed:
            host.waiting.pop(peer, None)
            host.call("on_dial_failed", peer)
        if to is not None and len(failed) < len(hoped):
            self.connect(host, to)

    def connect(self, host: Host, to: Host) -> None:
        link = Link(host, to, self.world.now)
        self.links[link] = None
        host.up(link, to.peer.membership.me)
        to.up(link, host.peer.membership.me)

    # -- what is carried ---------------------------------------------------------------------------------------------
    def send(self, link: Link, host: Host, message: Any) -> None:
        place, world, to = link.place(host), self.world, link.other(host)
        if link.broken or self.fault(host, to, message) or (self.loss and world.rng.random() < self.loss):
            return
        at = link.last[place] = max(link.last[place], world.now + self.latency(host, to))
        to.later(at - world.now, self.deliver, link, place, message)

    def deliver(self, link: Link, place: int, message: Any) -> None:
        to = link.ends[1 - place]
        if link.carries(to) and not self.parted(*link.ends):
            to.received(link, link.ends[place], message)

    def streamed_s(self, link: Link, host: Host, chunk: bool = False) -> float:
        """Return the seconds until a whole stream of this end, or one chunk of a donor's stream, has arrived."""
        now, taken_s = self.world.now, self.chunk_s if chunk else self.stream_s * (1 + self.world.rng.random())
        return max(link.last[link.place(host)], now + self.latency(host, link.other(host))) - now + taken_s

    # -- breaks ------------------------------------------------------------------------------------------------------
    def cut_link(self, link: Link) -> None:
        """Break the link: messages on their way are lost, and each end notices a little later."""
        if not link.broken:
            link.broken = True
            for end in link.ends:
                end.later(self.latency(end, link.other(end)), end.lost, link)

    def retire(self, link: Link, host: Host) -> None:
        """Close an unused link at one end; the other end learns it after all earlier messages."""
        link.orderly = True
        place, other = link.place(host), link.other(host)
        host.lost(link)
        other.later(max(0.0, link.last[place] - self.world.now) + self.latency(host, other), other.lost, link)

    def partition(self, sides: Callable[[int], int] | None) -> None:
        """Cut the links between hosts of different sides and let no dial through; None heals the partition."""
        self.sides = sides
        for link in list(self.links):
            if self.parted(*link.ends):
                self.cut_link(link)
