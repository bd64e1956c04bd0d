"""The network of a random schedule: latencies and spikes, links that break like TCP's, addresses that swallow dials.

When a link breaks, each direction loses a suffix of its own, and each end learns of it at a time of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gossip.ids import Address
from tests.harness import network as harness
from tests.harness.world import address_of

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

JAM_S = 0.5  # half of the time between two questions about a doubt


class Link(harness.Link):
    """A link that still delivers some messages after it has broken."""

    __slots__ = ("arrived", "born", "jammed_until", "late", "limit", "said")

    def __init__(self, dialler: Host, other: Host, now: float) -> None:
        super().__init__(dialler, other, now)
        self.born = now
        self.jammed_until = now  # when the last message that takes over ``JAM_S`` arrives
        self.said = [0, 0]  # messages sent, by the sender's place
        self.arrived = [0, 0]  # messages taken off the wire, by the sender's place
        self.limit = [0, 0]  # messages that a broken link delivers in all
        self.late = [False, False]  # True if a broken link still delivers streams in flight

    def carries(self, to: Host) -> bool:
        """Return True if a stream that ends now arrives."""
        place = self.place(to)
        return self.open[place] and (not self.broken or self.late[1 - place])


class Network(harness.Network):
    """Latencies and cuts of one world, and every link in it."""

    world: World

    def __init__(self, world: World) -> None:
        super().__init__(world, latency_s=0.01, loss=0.0)
        self.swallowed_s = 2.0  # the hello's timeout, shortened with all other times
        self.spike_until, self.spike = 0.0, 1.0
        self.breaks: dict[str, float] = {}  # the chance that a link breaks as a message is sent, by its kind
        self.slow_streams = self.slow_pieces = 1.0

    def latency(self, *_: Host | None) -> float:
        world = self.world
        spike = self.spike if world.now < self.spike_until else 1.0
        return self.latency_s * spike * (0.5 + world.rng.random())

    def swallows(self, host: Host, address: Address, to: Host | None) -> bool:
        return address.port % 2 == 1 if to is None else self.parted(host, to) or bool(to.stopped)

    def connect(self, host: Host, to: Host) -> None:
        if host.id == to.id:  # a copy of the host, with its key
            host.peer.on_own_seed(address_of(to.number))
            return
        self.link(host, to)

    def link(self, host: Host, to: Host) -> None:
        """Link two hosts. Either may finish its Hello first; messages for the other wait in its socket."""
        link = Link(host, to, self.world.now)
        self.links[link] = None
        late = self.latency()
        first, second = (host, to) if self.world.rng.random() < 0.5 else (to, host)
        link.last[link.place(first)] += late
        records = {end: link.other(end).peer.membership.me for end in link.ends}
        first.up(link, records[first])
        second.later(late, self.connected, second, link, records[second])

    def connected(self, second: Host, link: Link, record: Any) -> None:
        first = link.other(second)
        if link.broken and not link.open[link.place(first)] and first.gone:
            return
        if link.broken:  # this end may have been told of the break before the link was up
            second.later(self.latency(), second.lost, link)
        second.up(link, record)

    # -- messages ------------------------------------------------------------------------------------------------
    def send(self, link: Link, host: Host, message: Any) -> None:
        link.said[link.place(host)] += 1
        super().send(link, host, message)
        arrives_s = link.last[link.place(host)]
        if arrives_s > self.world.now + JAM_S:
            link.jammed_until = max(link.jammed_until, arrives_s)
        chance = None if link.broken else self.breaks.get(type(message).__name__)
        if chance is not None and self.world.rng.random() < chance:
            self.cut_link(link)

    def deliver(self, link: Link, place: int, message: Any) -> None:
        link.arrived[place] += 1
        if link.broken and link.arrived[place] > link.limit[place]:
            return
        if link.open[1 - place]:
            link.ends[1 - place].received(link, link.ends[place], message)

    def streamed_s(self, link: Link, host: Host, chunk: bool = False) -> float:
        world = self.world
        begin = max(link.last[link.place(host)], world.now + self.latency())
        slow = self.slow_streams * self.slow_pieces if chunk else self.slow_streams
        return begin - world.now + slow * 0.08 * world.rng.random()

    # -- breaks --------------------------------------------------------------------------------------------------
    def cut_link(self, link: Link, slow: bool = False) -> None:
        """Break a link: a random part of what is in flight arrives, and each end notices at its own time.

        ``slow``: the ends notice by a timeout, and nothing arrives.
        """
        if link.broken:
            return
        link.broken = True
        rng = self.world.rng
        for place, end in enumerate(link.ends):
            waiting = link.said[place] - link.arrived[place]
            link.limit[place] = link.arrived[place] + (0 if slow else rng.randint(0, waiting))
            link.late[place] = not slow and rng.random() < 0.5
            after = rng.uniform(0.2, 4.0) if slow else rng.random() ** 3 * 0.5
            end.later(after, end.lost, link)

    def part(self, sides: dict[int, int]) -> None:
        self.sides = lambda number: sides.get(number, 0)
        for link in list(self.links):
            if self.parted(*link.ends):
                self.cut_link(link, slow=True)
