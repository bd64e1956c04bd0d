"""The quiet after the last fault: the claims that must come true some time after nothing breaks any more."""

from gossip.effects import MemberState
from gossip.state_transfer.joining import Phase
from tests.harness.world import address_of
from tests.simulation.host import Host
from tests.simulation.world import World

MAX_FOUND = 6  # Violations to list.


class Quiet:
    """The quiet of one world, which begins when this object is made.

    ``has_liars``: there were attackers, so that members of one run may hold different bases.
    """

    def __init__(self, world: World, has_liars: bool) -> None:
        self.world, self.has_liars = world, has_liars
        self.groups = self.connected_groups()

    def connected_groups(self) -> dict[Host, Host]:
        """Return for each honest host the representative of all hosts that it can find, directly or through others."""
        honest = self.world.honest
        group = {host: host for host in honest}
        for host in honest:
            for other in honest:
                record = host.peer.membership.record(other.id)
                named = (record is not None and record.address is not None) or address_of(other.number) in host.seeds
                if other is not host and named and other.dialable and group[host] is not group[other]:
                    one, with_it = group[other], group[host]
                    for third in honest:
                        if group[third] is one:
                            group[third] = with_it
        return group

    def can_find(self, host: Host, other: Host) -> bool:
        """Return True if the two hosts can find each other."""
        return self.groups.get(other) is self.groups.get(host)

    def wrong(self) -> list[str]:
        """Return what is not well yet, at most ``MAX_FOUND`` sentences."""
        found: list[str] = []
        honest = self.world.honest
        # Two runs may stay where a trial of the other weights has failed.
        must_merge = not any(host.peer.joining.failed_trials for host in honest)
        for host in honest:
            found += self.wrong_weights(host, must_merge)
            for other in self.world.by_id.values():
                if other is not host and not other.liar and (other.gone or self.can_find(host, other)):
                    found += self.wrong_state(host, other)
        return found[:MAX_FOUND]

    def wrong_weights(self, host: Host, must_merge: bool) -> list[str]:
        """Return what is not well with a host's weights and sessions."""
        found: list[str] = []
        peer, ready = host.peer, host.peer.view.ready
        near = [other for other in self.world.honest if self.can_find(host, other)]
        ready_near = [other for other in near if other.peer.view.ready]
        # A host that must join cannot if no other one is ready.
        if not ready and not (host.must_join and not ready_near):
            found.append(f"{host!r} has no weights")
        is_adopting = host.adoption is not None or host.restoring or host.kept is not None
        if peer.joining.phase is not Phase.IDLE or is_adopting:
            found.append(f"{host!r} is joining")
        if peer.exchanges.table or peer.donating.table or host.sessions:
            found.append(f"{host!r} has something under way")
        rivals = [other for other in ready_near if ready and other.run_id != host.run_id]
        if rivals and must_merge:
            found.append(f"{host!r} and {rivals[0]!r} are of different runs")
        same_run = [other for other in ready_near if ready and other.run_id == host.run_id]
        if not self.has_liars and any(other.base != host.base for other in same_run):
            found.append(f"{host!r} has another base than its run")
        return found

    @staticmethod
    def wrong_state(host: Host, other: Host) -> list[str]:
        """Return what is wrong with the state in which a host holds another."""
        membership = host.peer.membership
        state, was_contacted = membership.state(other.id), membership.was_contacted(other.id)
        can_meet = host.dialable or other.dialable
        if not other.gone and (state is not MemberState.ALIVE or (can_meet and not was_contacted)):
            return [f"{host!r} holds {other!r} to be {state}{'' if was_contacted else ', by hearsay'}"]
        if other.gone and was_contacted and state in (MemberState.ALIVE, MemberState.SUSPECT):
            return [f"{host!r} holds {other!r}, which is gone, to be {state}"]
        return []
