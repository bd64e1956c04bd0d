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

import numpy as np
from numpy.typing import NDArray

from gossip.codecs import ALIGN
from gossip.exchange.acceptance import norm_accepts, trimmed_mean
from gossip.exchange.session import State
from gossip.ids import PeerId

__all__ = ["Gathering", "group_mean", "slices"]

Floats = NDArray[np.float32]


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


def slices(elements: int, members: int) -> list[slice]:
    """Each member's slice of a vector: contiguous, alike but for rounding to whole blocks; the last may be empty."""
    blocks = -(-elements // ALIGN)
    ends = [min(blocks * (place + 1) // members * ALIGN, elements) for place in range(members)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def group_mean(parts: Floats, own: int, trim: int, bound: float) -> tuple[Floats, list[int]]:
    """The mean of ``parts`` (members, elements), one member's slice of everybody's vectors, and whose were refused.

    What is not finite, or further from the ``own``-th row than the norm bound allows, is left out, and of the others
    ``trim`` values of each element at either end: as many as leave one.
    """
    ours = parts[own]
    own_sq = float(np.dot(ours, ours))
    kept, refused = [own], []
    with np.errstate(all="ignore"):
        for place, theirs in enumerate(parts):
            if place == own:
                continue
            apart = theirs - ours
            if norm_accepts(float(np.dot(apart, apart)), own_sq, ours.size, bound) is None:
                kept.append(place)
            else:
                refused.append(place)
    taken = parts[sorted(kept)] if refused else parts  # a copy only where some are left out
    return trimmed_mean(taken, min(trim, (len(kept) - 1) // 2)), refused
