"""One exchange as one side sees it: the state that it is in, and what may happen to it there.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

from gossip.effects import Effect
from gossip.ids import PeerId

if TYPE_CHECKING:
    from gossip.exchange.exchanges import Exchanges

__all__ = [
    "AT_ONCE", "INITIATOR", "MAX_GAP", "MAX_VERSION", "RESPONDER", "Event", "Local", "Session", "State", "Transitions",
    "version_gap", "within",
]  # fmt: skip

AT_ONCE = 32  # of the neighbours with all of whom a mix is, so many at most: a vector each. Others the next time
MAX_VERSION = 2**53  # what a record may hold: a mean with more would make our own record unacceptable to everybody
MAX_GAP = 1_000.0  # rounds that one exchange counts for: few mixes bring back who was long away, none reach 2^53
INITIATOR, RESPONDER = True, False


class State(Enum):
    PREPARING = auto()  # our snapshot is not taken yet
    OFFERED = auto()
    STREAMING = auto()
    VERIFIED = auto()  # our COMMIT is sent, theirs is not here
    DOUBT = auto()  # the same, and the link broke, or it takes too long: it takes no slot any more
    DONE = auto()  # it has happened, and is over
    DROPPED = auto()  # nothing came of it


class Event(Enum):
    """What can happen to a session; the values are the words of docs/protocol.md, and name the methods that answer."""

    # said by others
    ACCEPT = "accept"
    BUSY = "busy"
    REFUSE = "refuse"
    COMMIT = "commit"
    ABORT = "abort"
    OUTCOME = "outcome"
    SETTLED = "settled"
    # reported by the driver
    SNAPSHOTTED = "snapshotted"
    SPOILED = "spoiled"  # our snapshot is not finite
    STREAMED = "streamed"
    FAILED = "failed"
    # found out by looking
    LATE = "late"  # its deadline is over
    GONE = "gone"  # the only one who knows how it ended is held DEAD or LEFT
    # done to it for something else
    YIELDED = "yielded"  # another's offer takes its place
    CROWDED = "crowded"  # newer doubts take its room
    REPLACED = "replaced"  # the weights that it began from go


Transitions = Mapping[State, Mapping[Event, tuple[State, ...]]]


def within(version: float) -> float:
    """A version that we may sign: of no member's making can ours become one that others refuse."""
    return min(max(0.0, version), MAX_VERSION / 2)  # of nan 0


def version_gap(theirs: float, ours: float) -> float:
    """How much older their weights are than ours, in mixing rounds, of which one exchange counts ``MAX_GAP`` at most:
    weights travel no further in one exchange either, and a version is a claim."""
    return min(max(theirs - ours, -MAX_GAP), MAX_GAP)


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One side's view. ``ours`` is the version that its Offer or Accept states."""

    # For the initiator and for the responder: what may happen in each state, and what state may be next. Nothing else
    # happens to a session, whoever says it: Exchanges asks here before it hands anything on.
    TRANSITIONS: ClassVar[Mapping[bool, Transitions]]

    exchanges: Exchanges = field(repr=False)  # the table that it is in
    session: int
    initiator: bool
    since: float
    deadline: float
    state: State = State.PREPARING
    ours: float = 0.0
    steps: int = 0  # of the training loop at the snapshot

    @property
    def others(self) -> tuple[PeerId, ...]:
        """With whom, as far as that is known."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether it takes no slot."""
        return self.state is State.DOUBT

    def allows(self, event: Event) -> bool:
        """Whether this may happen now."""
        here = self.TRANSITIONS[self.initiator].get(self.state)
        return here is not None and event in here

    def happens(self, event: Event, *what: Any) -> list[Effect]:
        """The method of the event's name does what follows."""
        effects: list[Effect] = getattr(self, event.value)(*what)
        return effects

    def end(self, state: State) -> list[Effect]:
        """It is over: DONE or DROPPED."""
        self.state = state
        return self.exchanges.end(self)


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
