"""Group all-reduce in virtual time: members send each slice to its owner, and owners send the means back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gossip.averaging.all_reduce import GroupAverage
from gossip.ids import PeerId
from sim.engine.events import Events
from sim.engine.flows import Flow
from sim.engine.host import Floats, Host
from sim.engine.links import VirtualLinks

__all__ = ["GroupStreams"]

Key = tuple[Host, int]  # host, session
Handler = Callable[[Host, GroupAverage, int, Floats], None]

GATHERED = 214  # code in the event log


class GroupStreams:
    """The streams between the averagers of a group's members."""

    def __init__(self, events: Events, links: VirtualLinks) -> None:
        self.events, self.links = events, links
        self.streamed: dict[Key, dict[int, PeerId]] = {}  # members that we stream to, by place in the group
        self.under_way: dict[Key, dict[Flow, None]] = {}
        self.early: dict[Key, list[Callable[[], None]]] = {}  # streams that arrived before the group began here

    @property
    def idle(self) -> bool:
        return not (self.streamed or self.early)

    def gather(self, host: Host, group: GroupAverage) -> None:
        """Stream its slice to every linked member; a later call serves the members linked since."""
        key = host, group.session
        first, streamed = key not in self.streamed, self.streamed.setdefault(key, {})
        values = group.ours if host.liar is None else host.liar.sends(group.ours, group.session)
        for place, member in enumerate(group.members):
            if place == group.place or place in streamed or not self.links.linked(host, member):
                continue
            streamed[place] = member
            where = group.slices[place]
            self.stream(host, group, member, group.send(values[where], where.start), self.on_values)
            if group.mean is not None:
                self.stream(host, group, member, self.said(host, group), self.on_mean)
        if first:
            for arrive in self.early.pop(key, []):
                arrive()
            host.averager.average(group, partial(self.averaged, host, group))

    def stream(self, host: Host, group: GroupAverage, member: PeerId, values: Floats, handler: Handler) -> None:
        if not values.size:
            return
        to, key = self.links.by_id[member], (host, group.session)
        carrier = self.links.carrier
        size_bytes = carrier.network.bytes_of(group.codec.encoded_bytes(values.size))
        flow: Flow | None = None

        def gone() -> None:
            if flow is not None:
                self.under_way[key].pop(flow, None)

        number, place = key[1], group.place
        flow = carrier.stream(
            host, to, size_bytes, True, gone, self.on_stalled, number, self.arrive, number, place, values, handler
        )  # fmt: skip
        if flow is not None:
            self.under_way.setdefault(key, {})[flow] = None

    def arrive(self, host: Host, number: int, place: int, values: Floats, handler: Handler) -> None:
        """Handle a stream that has arrived, or keep it until the group begins on this host."""
        if host.gone:
            return
        group = host.averager.groups.get(number)
        if group is not None:
            handler(host, group, place, values)
        elif host.peer.view.has_exchange(number):
            self.early.setdefault((host, number), []).append(partial(self.arrive, host, number, place, values, handler))

    def on_values(self, host: Host, group: GroupAverage, place: int, values: Floats) -> None:
        """Take a member's values of the slice that this host owns."""
        group.take_values(place, values)
        host.averager.average(group, partial(self.averaged, host, group))

    def averaged(self, host: Host, group: GroupAverage) -> None:
        """Send the mean of the slice that this host owns to all members."""
        said = self.said(host, group)
        for _, member in sorted(self.streamed[host, group.session].items()):
            self.stream(host, group, member, said, self.on_mean)
        self.finish(host, group)

    def said(self, host: Host, group: GroupAverage) -> Floats:
        """Return the mean of this host's slice as the others decode it; an attacker falsifies it."""
        assert group.mean is not None
        mean = group.mean if host.liar is None else host.liar.sends(group.mean, group.session)
        return group.send(mean, group.slices[group.place].start)

    def on_mean(self, host: Host, group: GroupAverage, place: int, values: Floats) -> None:
        """Take the mean of a slice from the member that owns it."""
        group.take_mean(place, values)
        self.finish(host, group)

    def finish(self, host: Host, group: GroupAverage) -> None:
        if group.complete and not group.told:
            self.events.note(host.index, host.index, GATHERED)
        host.averager.gathered(group)

    def on_stalled(self, host: Host, sender: Host, number: int) -> None:
        """Close the link over which a stream has stalled, as a node does."""
        group = None if host.gone else host.averager.groups.get(number)
        if group is None or sender.id not in group.members:
            return
        place = group.members.index(sender.id)
        if (place in group.missing or place in group.awaited) and self.links.linked(host, sender.id):
            self.links.close(host, sender.id)

    def release(self, host: Host, session: int) -> None:
        key = host, session
        self.streamed.pop(key, None)
        self.early.pop(key, None)
        for flow in self.under_way.pop(key, {}):
            self.links.carrier.flows.stop(flow)

    def forget(self, host: Host) -> None:
        for key in [key for key in dict.fromkeys((*self.streamed, *self.under_way, *self.early)) if key[0] is host]:
            self.release(*key)
