"""Group all-reduce in virtual time: members send each slice to its owner, and owners send the means back.

The vector is cut into as many slices as the group has members. A member's *place* is its index in the group, and it
owns the slice with that index. A *session* is the number of one group's exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gossip.averaging.all_reduce import GroupAverage
from gossip.ids import PeerId
from sim.engine.carrier import StreamCallbacks
from sim.engine.events import Events
from sim.engine.flows import Flow
from sim.engine.host import Floats, Host
from sim.engine.links import VirtualLinks

__all__ = ["GroupStreams"]

Key = tuple[Host, int]  # Host and session.
# Called on arrival with the receiver, its group, the sender's place in the group, and the values.
ArrivalHandler = Callable[[Host, GroupAverage, int, Floats], None]

GATHERED = 214  # Code in the event log: a member has the means of all slices.


class GroupStreams:
    """The streams between the averagers of a group's members."""

    def __init__(self, events: Events, links: VirtualLinks) -> None:
        self.events, self.links = events, links
        self.receivers: dict[Key, dict[int, PeerId]] = {}  # Members that a host streams to, by place in the group.
        self.flows: dict[Key, dict[Flow, None]] = {}  # Open streams; the inner dict serves as an ordered set.
        self.early: dict[Key, list[Callable[[], None]]] = {}  # Streams that arrived before the group began here.

    @property
    def is_idle(self) -> bool:
        return not (self.receivers or self.early)

    def gather(self, host: Host, group: GroupAverage) -> None:
        """Stream to every linked member the slice that it owns; a later call serves the members linked since."""
        key = host, group.session
        is_first_call, receivers = key not in self.receivers, self.receivers.setdefault(key, {})
        attacker = host.attacker
        values = group.ours if attacker is None else attacker.false_values(group.ours, group.session)
        for place, member in enumerate(group.members):
            if place == group.place or place in receivers or not self.links.is_linked(host, member):
                continue
            receivers[place] = member
            owned = group.slices[place]
            self.stream(host, group, member, group.as_received(values[owned], owned.start), self.on_values)
            if group.slice_mean is not None:
                self.stream(host, group, member, self.encoded_mean(host, group), self.on_mean)
        if is_first_call:
            for arrive in self.early.pop(key, []):
                arrive()
            host.averager.average_slice(group, partial(self.on_averaged, host, group))

    def stream(self, host: Host, group: GroupAverage, member: PeerId, values: Floats, handler: ArrivalHandler) -> None:
        """Stream values to a member; when they arrive, ``handler`` gets them with this host's place in the group."""
        if not values.size:
            return
        receiver, session, carrier = self.links.by_id[member], group.session, self.links.carrier
        size_bytes = carrier.network.bytes_of(group.codec.encoded_bytes(values.size))
        flow: Flow | None = None

        def on_sent() -> None:
            if flow is not None:
                self.flows[host, session].pop(flow, None)

        callbacks = StreamCallbacks(
            on_sent,
            partial(self.on_arrived, receiver, session, group.place, values, handler),
            partial(self.on_stalled, receiver, host, session),
        )
        flow = carrier.stream(host, receiver, size_bytes, duplex=True, callbacks=callbacks)
        if flow is not None:
            self.flows.setdefault((host, session), {})[flow] = None

    def on_arrived(self, host: Host, session: int, place: int, values: Floats, handler: ArrivalHandler) -> None:
        """Pass a stream to its handler, or keep it until the group begins on this host."""
        if host.gone:
            return
        group = host.averager.groups.get(session)
        if group is not None:
            handler(host, group, place, values)
        elif host.peer.view.has_exchange(session):
            arrive = partial(self.on_arrived, host, session, place, values, handler)
            self.early.setdefault((host, session), []).append(arrive)

    def on_values(self, host: Host, group: GroupAverage, place: int, values: Floats) -> None:
        """Take a member's values of the slice that this host owns."""
        group.take_values(place, values)
        host.averager.average_slice(group, partial(self.on_averaged, host, group))

    def go_on(self, host: Host, group: GroupAverage) -> None:
        """Go on with a group whose late members were left out."""
        host.averager.average_slice(group, partial(self.on_averaged, host, group))
        self.report_gathered(host, group)

    def on_averaged(self, host: Host, group: GroupAverage) -> None:
        """Send the mean of the slice that this host owns to all members."""
        mean = self.encoded_mean(host, group)
        for _, member in sorted(self.receivers[host, group.session].items()):
            self.stream(host, group, member, mean, self.on_mean)
        self.report_gathered(host, group)

    def encoded_mean(self, host: Host, group: GroupAverage) -> Floats:
        """Return the mean of this host's slice as the others decode it; an attacker falsifies it."""
        assert group.slice_mean is not None
        mean = (
            group.slice_mean if host.attacker is None else host.attacker.false_values(group.slice_mean, group.session)
        )
        return group.as_received(mean, group.slices[group.place].start)

    def on_mean(self, host: Host, group: GroupAverage, place: int, values: Floats) -> None:
        """Take the mean of a slice from the member that owns it."""
        group.take_mean(place, values)
        self.report_gathered(host, group)

    def report_gathered(self, host: Host, group: GroupAverage) -> None:
        """Let the averager look whether its group is complete."""
        if group.is_complete and not group.is_reported:
            self.events.log(host.index, host.index, GATHERED)
        host.averager.report_gathered(group)

    def on_stalled(self, host: Host, sender: Host, session: int) -> None:
        """Close the link over which a stream has stalled, as a node does."""
        group = None if host.gone else host.averager.groups.get(session)
        if group is None or sender.id not in group.members:
            return
        place = group.members.index(sender.id)
        if (place in group.missing_values or place in group.missing_means) and self.links.is_linked(host, sender.id):
            self.links.close(host, sender.id)

    def release(self, host: Host, session: int) -> None:
        """Forget a session that has ended on this host, and stop its streams from there."""
        key = host, session
        self.receivers.pop(key, None)
        self.early.pop(key, None)
        for flow in self.flows.pop(key, {}):
            self.links.carrier.flows.stop(flow)

    def on_killed(self, host: Host) -> None:
        """Stop the streams of a host that died."""
        keys = dict.fromkeys((*self.receivers, *self.flows, *self.early))  # Each key once, in a repeatable order.
        for key in [key for key in keys if key[0] is host]:
            self.release(*key)
