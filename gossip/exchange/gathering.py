"""One group mean as one member sees it.

    inviter   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
    invited   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
                                                      |
                                                    DOUBT -> mixed | dropped

OFFERED is: invitations (or our consent) are sent, and who takes part is not settled. Everybody has all slices' means
before saying COMMIT to the inviter, who says SETTLED to all when it has heard that from all: the group mixes as a whole
or not at all. The inviter is no role: it is whoever's mix was due first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.exchange.session import State
from gossip.ids import PeerId

__all__ = ["Gathering"]


@dataclass(slots=True)
class Gathering:
    """``invited`` have not answered yet, ``joined`` are those who take part and their versions, ``members`` all of them
    with us once that is settled, sorted."""

    session: int
    inviter: PeerId
    initiator: bool
    codec: str
    since: float
    deadline: float
    state: State = State.PREPARING
    ours: float = 0.0  # versions
    mean: float = 0.0
    steps: int = 0  # of the training loop at the snapshot
    candidates: tuple[PeerId, ...] = ()  # all whom the inviter invited
    asked: set[PeerId] = field(default_factory=set)  # the same, and those who were busy
    invited: dict[PeerId, None] = field(default_factory=dict)
    joined: dict[PeerId, float] = field(default_factory=dict)
    members: tuple[PeerId, ...] = ()
    committed: set[PeerId] = field(default_factory=set)

    @property
    def others(self) -> tuple[PeerId, ...]:
        """With whom, as far as that is known."""
        if self.initiator and not self.members:
            return (*self.invited, *self.joined)
        return self.members or (self.inviter,)

    @property
    def idle(self) -> bool:
        """Whether it takes no slot."""
        return self.state is State.DOUBT
