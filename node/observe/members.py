"""Members as a node shows them, and the view that the network thread leaves for the training thread."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from gossip.effects import MemberState
from gossip.ids import PeerId
from gossip.peer import Peer


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the swarm, perhaps this one, as this node knows it."""

    id: str  # 32 hexadecimal digits.
    address: str | None  # None if it cannot be dialled.
    state: str  # One of alive, suspect, dead, left.
    steps: int
    samples: int
    loss: float | None
    link: str | None = None  # How it is reached: direct, punched, or "relay" and the relay's id; None without a link.


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The network thread's latest report to the training thread: frozen and replaced whole, so it needs no lock."""

    owners: tuple[PeerId, ...] = ()  # The nodes that share the data: alive and ready, this node included.
    changes: int = -1  # A count of changes of owners; -1 before the first report.
    run: bytes = b""  # The id of the run whose weights we hold; empty before the first report.
    swarm_samples: int = 0  # Samples that all members together have trained these weights on.
    own_samples: int = 0  # The samples that this node had trained since its start when `swarm_samples` was counted.
    sharers: int = 1  # Members of the run. Each sample of ours counts so often, as if all trained at our pace.
    earlier: int = 0  # Changes of owners that earlier peers of this process counted: a fault replaces the peer.
    settled: int = 0  # The number of times that the node has settled.

    def refreshed(self, peer: Peer) -> Self:
        """Return the view of this peer now."""
        changes = self.earlier + peer.membership.changes
        owners = self.owners if changes == self.changes else tuple(peer.membership.owners())
        return replace(
            self, owners=owners, changes=changes, run=peer.view.run_id, swarm_samples=peer.local.progress.samples,
            own_samples=peer.local.samples, sharers=peer.local.progress.members,
        )  # fmt: skip

    def restarted(self) -> Self:
        """Return the view for the next peer, which counts from the beginning."""
        return replace(self, earlier=self.changes + 1)

    def samples_at(self, own_samples: int) -> int:
        """Return the samples behind the weights once this node has trained ``own_samples`` in this life."""
        return self.swarm_samples + self.sharers * (own_samples - self.own_samples)

    def continues(self, before: Self) -> bool:
        """Return True if the number of samples must not fall from ``before`` to this view.

        That holds while the run is the same and the nodes have not settled on a number since.
        """
        return self.run == before.run and self.settled == before.settled


def members_of(peer: Peer, path_of: Callable[[PeerId], str | None]) -> tuple[Member, ...]:
    """Return all members this peer knows, itself first. Call it on demand only: 10,000 members take 16 ms."""
    return tuple(
        Member(
            record.id.hex(), str(record.address) if record.address is not None else None, state.value, record.steps,
            record.samples, record.loss, path_of(record.id),
        )
        for record, state in [(peer.membership.me, MemberState.ALIVE), *peer.membership.members()]
    )  # fmt: skip
