"""The address book of a node: the members that it knows, which the state directory keeps for its next start."""

from collections.abc import Callable

from gossip.ids import Address
from gossip.peer import Peer
from node.faults import Faults
from node.identity.statedir import Memory, StateDir

# The book is also written when the number of members has doubled.
FIRST_SAVE_S = 1.0  # Seconds from the start to the first write. Each further pause is twice as long, up to SAVE_S.
SAVE_S = 30.0


class AddressBook:
    """The address book of one node, and the number of its present life, the *incarnation*.

    It is written soon after the start, and whenever many members are new. So a node that is killed in its first seconds
    also finds its swarm again.
    """

    def __init__(self, state_dir: StateDir, faults: Faults, notify: Callable[[str, str], None]) -> None:
        self.state_dir, self.faults, self.notify = state_dir, faults, notify
        self.stored = Memory()  # The last contents that were read or written; without a directory, those to be written.
        self.incarnation = 0
        self.saved_at, self.pause_s, self.saved_members = 0.0, FIRST_SAVE_S, 0  # Time and members of the last write.

    def read(self) -> None:
        """Read the book of the last life, and begin the next one."""
        self.stored = self.state_dir.read()
        self.incarnation = self.stored.incarnation + 1

    @property
    def addresses(self) -> list[Address]:
        """Return the addresses of members from earlier runs of this node."""
        return [record.address for record in self.stored.book if record.address is not None]

    def on_started(self, peer: Peer, now: float) -> None:
        """Handle the start of a network side with this peer."""
        self.saved_at, self.pause_s, self.saved_members = now, FIRST_SAVE_S, peer.view.alive_count

    def save_if_due(self, peer: Peer, now: float) -> None:
        members = peer.view.alive_count
        if members >= 2 * self.saved_members or now - self.saved_at >= self.pause_s:
            self.save(peer)
            self.pause_s, self.saved_at, self.saved_members = min(2 * self.pause_s, SAVE_S), now, members

    def save(self, peer: Peer) -> None:
        """Write the members' addresses. If a fault keeps the peer from naming them, the last ones stay."""
        try:
            self.stored = Memory(self.incarnation, peer.membership.my_samples, peer.membership.book())
        except Exception as error:
            self.faults.contain(error, "A reading of the members", "the last one is kept")
            return
        warning = self.state_dir.write(self.stored.incarnation, self.stored.samples, self.stored.book)
        if warning:
            self.notify("state", warning)
