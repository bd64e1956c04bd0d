"""What a node can be asked of others: its members, and the view that the network thread leaves for the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gossip.effects import MemberState
from gossip.ids import PeerId
from gossip.peer import Peer

__all__ = ["Member", "SwarmView", "members_of"]


@dataclass(frozen=True, slots=True)
class Member:
    """Another node, or this one, as this node knows it."""

    id: str  # 32 hexadecimal digits
    address: str | None  # None: it dials out, and nobody can dial it
    state: str  # alive, suspect, dead, left
    steps: int
    samples: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class SwarmView:
    """What the network thread last told the training thread: one frozen object, replaced whole, so that no lock is
    needed to read it."""

    owners: tuple[PeerId, ...] = ()  # who shares the data: alive and ready, this node included
    changes: int = -1  # counts changes of owners
    run: bytes = b""  # whose weights we hold
    swarm_samples: int = 0  # behind these weights
    own_samples: int = 0  # of this life, when that was counted
    sharers: int = 1  # members of the run, by which each sample of ours since then counts
    earlier: int = 0  # changes that peers counted before this one
    settled: int = 0  # counts the times that the node has settled

    def refreshed(self, peer: Peer) -> Self:
        changes = self.earlier + peer.owners_changed
        owners = self.owners if changes == self.changes else tuple(peer.owners())
        return replace(
            self, owners=owners, changes=changes, run=peer.genesis, swarm_samples=peer.swarm_samples,
            own_samples=peer.samples, sharers=peer.sharers,
        )  # fmt: skip

    def restarted(self) -> Self:
        """The next peer counts from the beginning."""
        return replace(self, earlier=self.changes + 1)

    def samples_at(self, own_samples: int) -> int:
        """Samples behind the weights once this node has trained ``own_samples`` in this life."""
        return self.swarm_samples + self.sharers * (own_samples - self.own_samples)

    def continues(self, before: Self) -> bool:
        """Whether the number of samples must not fall from ``before`` to this view: the run is the same, and the nodes
        have not agreed on a number since."""
        return self.run == before.run and self.settled == before.settled


def members_of(peer: Peer) -> tuple[Member, ...]:
    """Everybody this peer knows of, itself first. Walks the table, 16 ms for 10,000 members: on demand alone."""
    return tuple(
        Member(
            record.id.hex(), str(record.address) if record.address is not None else None, state.value, record.steps,
            record.samples, record.loss,
        )
        for record, state in [(peer.record, MemberState.ALIVE), *peer.members()]
    )  # fmt: skip
