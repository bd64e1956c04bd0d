"""The network of an explored schedule: links as TCP has them, dials, and what cuts them off.

A link carries messages in order in each direction. When it breaks, each direction loses a suffix of its own, and each
end learns of it at a time of its own. Chunks do not hold up control messages, and so a stream has a time of its own,
behind what was said before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gossip.ids import Address, PeerId

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

__all__ = ["Link", "Network"]

SWALLOWED_S = 2.0  # a dial to an address that answers nothing: the hello's timeout, shortened with all other times


class Link:
    """Between ``ends[0]``, who dialled, and ``ends[1]``."""

    __slots__ = ("arrived", "born", "broken", "ends", "last", "late", "limit", "open", "orderly", "said")

    def __init__(self, dialler: Host, other: Host, now: float) -> None:
        self.ends = (dialler, other)
        self.open = [False, False]  # whether the end at this place has it
        self.born = now
        self.broken = False
        self.orderly = False
        self.said = [0, 0]  # messages sent from this place
        self.arrived = [0, 0]  # of these, taken off the wire
        self.limit = [0, 0]  # of a broken one: how many arrive still,
        self.late = [False, False]  # and whether the streams on their way do
        self.last = [now, now]  # when the latest from this place arrives

    def place(self, host: Host) -> int:
        return 0 if self.ends[0] is host else 1

    def other(self, host: Host) -> Host:
        return self.ends[1] if self.ends[0] is host else self.ends[0]


class Network:
    """Latencies and cuts of one world, and every link in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.latency_s = 0.01
        self.spike_until, self.spike = 0.0, 1.0
        self.sides: dict[int, int] | None = None  # of a partition: which host number is on which side
        self.links: dict[Link, None] = {}
        self.breaks: dict[str, float] = {}  # by a message's kind: how often its link breaks as it is sent
        self.slow_streams = 1.0

    def latency(self) -> float:
        world = self.world
        spike = self.spike if world.now < self.spike_until else 1.0
        return self.latency_s * spike * (0.5 + world.rng.random())

    def cut(self, a: Host, b: Host) -> bool:
        return self.sides is not None and self.sides.get(a.number, 0) != self.sides.get(b.number, 0)

    # -- dials ---------------------------------------------------------------------------------------------------
    def dial(self, host: Host, address: Address, expect: PeerId | None) -> None:
        if address in host.dialling:
            host.dialling[address][expect] = None
            return
        host.dialling[address] = {expect: None}
        to = self.world.at(address)
        silent = address.port % 2 == 1 if to is None else self.cut(host, to) or bool(to.stopped)
        delay = SWALLOWED_S if silent else 2 * self.latency()
        host.later(delay, self.dialled, host, address, to, silent)

    def dialled(self, host: Host, address: Address, to: Host | None, silent: bool) -> None:
        hoped = host.dialling.pop(address, {})
        to = to if to is not None and not to.gone else self.world.at(address)
        good = to is not None and not silent and not to.gone and to.dialable and to is not host
        if to is None or not good or self.cut(host, to) or host.left or to.left:
            for peer in hoped:
                host.dial_failed(peer)
            return
        wrong = [peer for peer in hoped if peer not in (None, to.id)]
        for peer in wrong:
            host.dial_failed(peer)
        if len(wrong) == len(hoped):
            return
        link = Link(host, to, self.world.now)
        self.links[link] = None
        # Either may finish its Hello first; what the other says meanwhile waits in its socket.
        late = self.latency()
        first, second = (host, to) if self.world.rng.random() < 0.5 else (to, host)
        link.last[link.place(second)] = self.world.now
        link.last[link.place(first)] = self.world.now + late
        records = {end: link.other(end).peer.membership.me for end in link.ends}
        first.up(link, records[first])
        second.later(late, second.up, link, records[second])

    # -- messages ------------------------------------------------------------------------------------------------
    def send(self, link: Link, host: Host, message: Any) -> None:
        place, world = link.place(host), self.world
        link.said[place] += 1
        if not link.broken:
            at = max(link.last[place], world.now + self.latency())
            link.last[place] = at
            to = link.ends[1 - place]
            to.later(at - world.now, self.deliver, link, place, link.said[place], message)
            chance = self.breaks.get(type(message).__name__)
            if chance is not None and world.rng.random() < chance:
                self.cut_link(link)

    def deliver(self, link: Link, place: int, number: int, message: Any) -> None:
        link.arrived[place] = number
        if link.broken and number > link.limit[place]:
            return
        to = link.ends[1 - place]
        if link.open[1 - place]:
            to.received(link, link.ends[place], message)

    @staticmethod
    def carries(link: Link, to: Host) -> bool:
        """Whether a stream that arrives now does."""
        place = link.place(to)
        return link.open[place] and (not link.broken or link.late[1 - place])

    def streamed_s(self, link: Link, host: Host) -> float:
        """How long from now until a whole stream of this end has arrived."""
        place, world = link.place(host), self.world
        begin = max(link.last[place], world.now + self.latency())
        return begin - world.now + self.slow_streams * 0.08 * world.rng.random()

    # -- breaks --------------------------------------------------------------------------------------------------
    def cut_link(self, link: Link, slow: bool = False) -> None:
        """It breaks: of each direction a random part of what is on its way arrives, and each end notices at its time
        (``slow``: by a timeout, and nothing arrives)."""
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

    def retire(self, link: Link, host: Host) -> None:
        """Closed for want of use by one end: the other learns it behind all that was said."""
        link.orderly = True
        place = link.place(host)
        host.lost(link)
        other = link.ends[1 - place]
        other.later(max(0.0, link.last[place] - self.world.now) + self.latency(), other.lost, link)

    def partition(self, sides: dict[int, int] | None) -> None:
        self.sides = sides
        for link in list(self.links):
            if self.cut(*link.ends):
                self.cut_link(link, slow=True)
