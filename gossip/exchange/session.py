"""One exchange as one side sees it, and what it needs to know of its own node.

    pair  initiator   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
          responder   PREPARING ------------> STREAMING -> VERIFIED -> mixed
                                                              |
                                                            DOUBT -> mixed | dropped

    push  initiator   PREPARING -> OFFERED -> STREAMING -> given away | taken back
                                                  |
                                                DOUBT -> given away | taken back
          responder   PREPARING ------------> STREAMING -> merged

Each side of a pair says COMMIT when all of the other's vector arrived and passed every check; the exchange happens
exactly when both did. That is a function of two facts which never change afterwards, so a link that breaks between the
two COMMITs leaves no guess to make: the sides ask each other after it (Outcome, Settled) and come to the same answer.
Only a partner that stays unreachable for ``doubt_s`` ends in a one-sided drop, which moves the mean by at most that one
difference.

An exchange that waits for its partner for longer than that takes is *parked*: it goes on, and takes no slot any more.
So whoever says nothing costs others its own answer, and no more.

A push happens exactly when the responder said COMMIT. Until the initiator knows, the mass that it gave away is nowhere
but in flight; when it knows that nothing came of it, it merges its own snapshot back in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from gossip.arithmetic.subsets import ALL, Subset
from gossip.ids import PeerId

__all__ = ["AT_ONCE", "MAX_GAP", "MAX_VERSION", "Exchange", "Local", "State", "version_gap", "within"]

AT_ONCE = 32  # of the neighbours with all of whom a mix is, so many at most: a vector each. Others the next time
MAX_VERSION = 2**53  # what a record may hold: a mean with more would make our own record unacceptable to everybody
MAX_GAP = 1_000.0  # rounds that one exchange counts for: few mixes bring back who was long away, none reach 2^53


class State(Enum):
    PREPARING = auto()  # our snapshot is not taken yet
    OFFERED = auto()
    STREAMING = auto()
    VERIFIED = auto()  # our COMMIT is sent, theirs is not here
    DOUBT = auto()  # the same, and the link broke, or it takes too long: it takes no slot any more


def within(version: float) -> float:
    """A version that we may sign: of no member's making can ours become one that others refuse."""
    return min(max(0.0, version), MAX_VERSION / 2)  # of nan 0


def version_gap(theirs: float, ours: float) -> float:
    """How much older their weights are than ours, in mixing rounds, of which one exchange counts ``MAX_GAP`` at most:
    weights travel no further in one exchange either, and a version is a claim."""
    return min(max(theirs - ours, -MAX_GAP), MAX_GAP)


@dataclass(slots=True)
class Exchange:
    """One side's view. ``ours`` and ``theirs`` are the versions that the Offer and the Accept state, ``committed``
    whether their COMMIT is here, ``asked`` who was offered this or another exchange of the same mix, ``overtaken``
    whether another began while this one took no slot."""

    session: int  # another for each partner that is asked
    partner: PeerId
    initiator: bool
    weight: float
    since: float
    deadline: float
    state: State = State.PREPARING
    ours: float = 0.0
    theirs: float = 0.0
    committed: bool = False
    codec: str = "fp32"
    asked: set[PeerId] = field(default_factory=set)
    push: bool = False
    mass: float = 0.0  # that a push carries
    part: Subset = ALL
    steps: int = 0  # of the training loop at the snapshot
    tries: int = 0  # how many may be asked
    until: float = 0.0  # how long it is waited for; at ``deadline`` before that it is parked
    answer_s: float = 0.0  # what the answer to our offer took
    parked: bool = False
    overtaken: bool = False
    blamed: bool = False  # its partner has been, for what it did not say

    @property
    def others(self) -> tuple[PeerId, ...]:
        """With whom."""
        return (self.partner,)

    @property
    def idle(self) -> bool:
        """Whether it takes no slot."""
        return self.parked or self.state is State.DOUBT


@dataclass(slots=True)
class Local:
    """What the exchanges need to know of their own node at the moment; owned and updated by Peer."""

    fingerprint: str
    elements: int  # of the weights
    trained_elements: int  # of one optimizer key
    genesis: bytes = b""
    version: float = 0.0
    ready: bool = False
    sound: bool = True  # no weight is NaN or infinite, as far as is known; an unsound peer is not ready
    optimizer_keys: tuple[str, ...] = ()
    settling: bool = False
    boundary_at: float = 0.0  # when the training loop was last seen at a step boundary
    steps: int = 0  # of the training loop
    finished: bool = False  # the run has reached its end
