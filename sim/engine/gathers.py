"""Group all-reduce in virtual time: members send each slice to its owner, and owners send the means back.

The vector is cut into as many slices as the group has members. A member's *place* is its index in the group, and it
owns the slice with that index. A *session* is the number of one group's exchange.
"""

from collections.abc import Callable
from functools import partial

from gossip.averaging.all_reduce import GroupAverage
from gossip.ids import PeerId
from sim.engine.carrier import StreamCallbacks
from sim.engine.events import Events
from sim.engine.host import Floats, FlowTransfer, Host
from sim.engine.links import VirtualLinks

# Called on arrival with the receiver, its transfer and group, the sender's place in the group, and the values.
ArrivalHandler = Callable[[Host, FlowTransfer, GroupAverage, int, Floats], None]

GATHERED = 214  # Code in the event log: a member has the means of all slices.


class GroupStreams:
    """The streams between the averagers of a group's members."""

    def __init__(self, events: Events, links: VirtualLinks) -> None:
        self.events, self.links = events, links

    def gather(self, host: Host, transfer: FlowTransfer, group: GroupAverage) -> None:
        """Stream to every linked member the slice that it owns; a later call serves the members linked since."""
        is_first_call = transfer.receivers is None
        receivers = transfer.receivers = transfer.receivers or {}
        attacker = host.attacker
        values = group.ours if attacker is None else attacker.false_values(group.ours, group.session)
        for place, member in enumerate(group.members):
            if place == group.place or place in receivers or not self.links.is_linked(host, member):
                continue
            receivers[place] = member
            owned = group.slices[place]
            part = group.as_received(values[owned], owned.start)
            self.stream(host, transfer, group, member, part, self.on_values)
            if group.slice_mean is not None:
                self.stream(host, transfer, group, member, self.encoded_mean(host, group), self.on_mean)
        if is_first_call:
            early, transfer.early = transfer.early, []
            for arrive in early:
                arrive()
            host.averager.average_slice(group, partial(self.on_averaged, host, transfer, group))

    def stream(
        self, host: Host, transfer: FlowTransfer, group: GroupAverage, member: PeerId, values: Floats,
        handler: ArrivalHandler,
    ) -> None:  # fmt: skip
        """Stream values to a member; when they arrive, ``handler`` gets them with this host's place in the group."""
        if not values.size:
            return
        receiver, session, carrier = self.links.by_id[member], group.session, self.links.carrier
        size_bytes = carrier.network.bytes_of(group.codec.encoded_bytes(values.size))
        # By a key and not by the flow itself: a flow whose callback held it would stay in memory, since no cycles are
        # collected while a simulation runs.
        key = member, handler.__name__
        callbacks = StreamCallbacks(
            partial(transfer.group_flows.pop, key, None),
            partial(self.on_arrived, receiver, session, group.place, values, handler),
            partial(self.on_stalled, receiver, host, session),
        )
        flow = carrier.stream(host, receiver, size_bytes, duplex=True, callbacks=callbacks)
        if flow is not None:
            transfer.group_flows[key] = flow

    def on_arrived(self, host: Host, session: int, place: int, values: Floats, handler: ArrivalHandler) -> None:
        """Pass a stream to its handler, or keep it until the group begins on this host."""
        transfer = None if host.gone else host.averager.transfers.get(session)
        if transfer is None:
            return
        if transfer.group is not None:
            handler(host, transfer, transfer.group, place, values)
        elif host.peer.view.has_exchange(session):
            transfer.early.append(partial(self.on_arrived, host, session, place, values, handler))

    def on_values(
        self, host: Host, transfer: FlowTransfer, group: GroupAverage, place: int, values: Floats
    ) -> None:  # fmt: skip
        """Take a member's values of the slice that this host owns."""
        group.take_values(place, values)
        host.averager.average_slice(group, partial(self.on_averaged, host, transfer, group))

    def go_on(self, host: Host, transfer: FlowTransfer, group: GroupAverage) -> None:
        """Go on with a group whose late members were left out."""
        host.averager.average_slice(group, partial(self.on_averaged, host, transfer, group))
        self.report_gathered(host, group)

    def on_averaged(self, host: Host, transfer: FlowTransfer, group: GroupAverage) -> None:
        """Send the mean of the slice that this host owns to all members."""
        mean = self.encoded_mean(host, group)
        for _, member in sorted((transfer.receivers or {}).items()):
            self.stream(host, transfer, group, member, mean, self.on_mean)
        self.report_gathered(host, group)

    def encoded_mean(self, host: Host, group: GroupAverage) -> Floats:
        """Return the mean of this host's slice as the others decode it; an attacker falsifies it."""
        assert group.slice_mean is not None
        mean = (
            group.slice_mean if host.attacker is None else host.attacker.false_values(group.slice_mean, group.session)
        )
        return group.as_received(mean, group.slices[group.place].start)

    def on_mean(
        self, host: Host, transfer: FlowTransfer, group: GroupAverage, place: int, values: Floats
    ) -> None:  # fmt: skip
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
        transfer = None if host.gone else host.averager.transfers.get(session)
        group = None if transfer is None else transfer.group
        if group is None or sender.id not in group.members:
            return
        place = group.members.index(sender.id)
        if (place in group.missing_values or place in group.missing_means) and self.links.is_linked(host, sender.id):
            self.links.close(host, sender.id)
