"""What may happen to an exchange in each state, and which states may be next: of a pair, a push and a group.

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

    ahead  who asks   ASKED -> AHEAD -> PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
           who agrees          AHEAD -> PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed

A pair that is agreed ahead, while both stream with others, is the next exchange of each. It takes no slot and holds no
vector until what goes on is over; from then on both sides are alike, and each says ACCEPT when its snapshot is there.

An exchange that waits for its partner for longer than that takes is *parked*: it goes on, and takes no slot any more.
So whoever says nothing costs others its own answer, and no more.

A push happens exactly when the responder said COMMIT. Until the initiator knows, the mass that it gave away is nowhere
but in flight; when it knows that nothing came of it, it merges its own snapshot back in.

    group  inviter   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
           invited   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
                                                             |
                                                           DOUBT -> mixed | dropped

Of a group OFFERED is: invitations (or our consent) are sent, and who takes part is not settled. Everybody has all
slices' means before saying COMMIT to the inviter, who says SETTLED to all when it has heard that from all: the group
mixes as a whole or not at all. The inviter is no role: it is whoever's mix was due first.

docs/protocol.md has the same tables, with what is said and done; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum, auto

__all__ = ["AHEAD", "GROUP", "INITIATOR", "PAIR", "PUSH", "RESPONDER", "Event", "State", "Table", "Transitions"]


class State(Enum):
    ASKED = auto()  # whether our next exchange is with each other: no answer yet
    AHEAD = auto()  # it is, and begins when neither has another under way
    PREPARING = auto()  # our snapshot is not taken yet
    OFFERED = auto()
    STREAMING = auto()
    VERIFIED = auto()  # our COMMIT is sent, theirs is not here
    DOUBT = auto()  # the same, and the link broke, or it takes too long: it takes no slot any more
    DONE = auto()  # it has happened, and is over
    DROPPED = auto()  # nothing came of it

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, at every look into a table


class Event(StrEnum):
    """What can happen to a session; the values are the words of docs/protocol.md, and name the methods that answer."""

    # said by others
    ACCEPT = "accept"
    BUSY = "busy"
    REFUSE = "refuse"
    COMMIT = "commit"
    ABORT = "abort"
    OUTCOME = "outcome"
    SETTLED = "settled"
    JOINED = "joined"
    BEGIN = "begin"
    # reported by the driver
    SNAPSHOTTED = "snapshotted"
    SPOILED = "spoiled"  # our snapshot is not finite
    STREAMED = "streamed"
    GATHERED = "gathered"
    LINKED = "linked"  # there is a link to a member of the group
    UNLINKED = "unlinked"  # and none any more
    FAILED = "failed"
    # found out by looking
    LATE = "late"  # its deadline is over
    FREED = "freed"  # no other exchange takes a slot
    GONE = "gone"  # the only one who knows how it ended is held DEAD or LEFT
    # done to it for something else
    YIELDED = "yielded"  # another's offer takes its place
    CROWDED = "crowded"  # newer doubts take its room
    REPLACED = "replaced"  # the weights that it began from go


INITIATOR, RESPONDER = True, False
Transitions = Mapping[State, Mapping[Event, tuple[State, ...]]]
Table = Mapping[bool, Transitions]  # of the initiator, and of the responder
PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, DOUBT, DONE, DROPPED = State.VERIFIED, State.DOUBT, State.DONE, State.DROPPED
ALWAYS = (Event.SPOILED, Event.REPLACED)  # may happen in each state, and end it


def drops(*events: Event) -> dict[Event, tuple[State, ...]]:
    """Of a table: nothing comes of the session then."""
    return dict.fromkeys(events, (State.DROPPED,))


OFFERING: Transitions = {  # of who has offered a pair or a push
    OFFERED: {
        Event.ACCEPT: (STREAMING, DROPPED),
        Event.BUSY: (OFFERED, DROPPED),
        Event.REFUSE: (OFFERED, DROPPED),
        Event.ABORT: (OFFERED, DROPPED),
        Event.FAILED: (OFFERED, DROPPED),
        Event.LATE: (OFFERED, DROPPED),
        **drops(Event.OUTCOME, *ALWAYS),
    }
}
OFFERED_TO: Transitions = {  # of whom it was offered
    PREPARING: {
        Event.SNAPSHOTTED: (STREAMING,),
        **drops(Event.ABORT, Event.OUTCOME, Event.FAILED, Event.LATE, *ALWAYS),
    }
}
AGREED: Transitions = {  # of both sides of a pair from the Accept on
    STREAMING: {
        Event.COMMIT: (STREAMING,),  # ours follows when all of theirs is here
        Event.STREAMED: (VERIFIED, DONE, DROPPED),
        Event.LATE: (STREAMING, DROPPED),
        **drops(Event.ABORT, Event.OUTCOME, Event.FAILED, *ALWAYS),
    },
    VERIFIED: {
        Event.COMMIT: (DONE,),
        Event.OUTCOME: (DONE,),
        Event.FAILED: (DOUBT,),
        Event.LATE: (VERIFIED, DOUBT),
        **drops(Event.ABORT, *ALWAYS),
    },
    DOUBT: {
        Event.COMMIT: (DONE,),
        Event.OUTCOME: (DONE,),
        Event.SETTLED: (DONE, DROPPED),
        Event.LATE: (DOUBT, DROPPED),
        **drops(Event.ABORT, Event.GONE, Event.CROWDED, *ALWAYS),
    },
}
PAIR: Table = {
    INITIATOR: {
        PREPARING: {Event.SNAPSHOTTED: (OFFERED, DROPPED), **drops(Event.YIELDED, *ALWAYS)},
        OFFERED: {**OFFERING[OFFERED], **drops(Event.YIELDED)},
        **AGREED,
    },
    RESPONDER: {**OFFERED_TO, **AGREED},
}
PROMISED: Transitions = {  # of both sides of a pair that was agreed ahead
    State.AHEAD: {
        Event.ACCEPT: (State.AHEAD, PREPARING, DROPPED),
        Event.FREED: (PREPARING,),
        Event.LATE: (State.AHEAD, DROPPED),
        **drops(Event.BUSY, Event.REFUSE, Event.ABORT, Event.FAILED, Event.YIELDED, *ALWAYS),
    },
    PREPARING: {
        Event.ACCEPT: (PREPARING, DROPPED),
        Event.SNAPSHOTTED: (OFFERED, STREAMING),
        **drops(Event.BUSY, Event.REFUSE, Event.ABORT, Event.FAILED, Event.LATE, Event.YIELDED, *ALWAYS),
    },
    OFFERED: {
        Event.ACCEPT: (STREAMING, DROPPED),
        Event.LATE: (OFFERED, DROPPED),
        **drops(Event.BUSY, Event.REFUSE, Event.ABORT, Event.FAILED, Event.OUTCOME, Event.YIELDED, *ALWAYS),
    },
    **AGREED,
}
AHEAD: Table = {
    INITIATOR: {
        State.ASKED: {
            Event.JOINED: (State.ASKED, State.AHEAD, DROPPED),
            Event.BUSY: (State.ASKED, DROPPED),
            Event.REFUSE: (State.ASKED, DROPPED),
            Event.ABORT: (State.ASKED, DROPPED),
            Event.FAILED: (State.ASKED, DROPPED),
            Event.LATE: (State.ASKED, DROPPED),
            **drops(Event.FREED, Event.YIELDED, *ALWAYS),
        },
        **PROMISED,
    },
    RESPONDER: PROMISED,
}
PUSH: Table = {  # DOUBT where mass is conserved; else what may have arrived is forgotten
    INITIATOR: {
        PREPARING: {Event.SNAPSHOTTED: (OFFERED, DROPPED), **drops(*ALWAYS)},
        **OFFERING,
        STREAMING: {
            Event.COMMIT: (DONE,),
            Event.FAILED: (DOUBT, DROPPED),
            Event.LATE: (STREAMING, DOUBT, DROPPED),
            **drops(Event.ABORT, Event.OUTCOME, *ALWAYS),
        },
        DOUBT: {
            Event.COMMIT: (DONE,),
            Event.SETTLED: (DONE, DROPPED),
            Event.LATE: (DOUBT, DROPPED),
            **drops(Event.ABORT, Event.OUTCOME, Event.GONE, Event.CROWDED, *ALWAYS),
        },
    },
    RESPONDER: {
        **OFFERED_TO,
        STREAMING: {
            Event.STREAMED: (DONE, DROPPED),
            Event.LATE: (STREAMING, DROPPED),
            **drops(Event.ABORT, Event.OUTCOME, Event.FAILED, *ALWAYS),
        },
    },
}
GROUP: Table = {
    INITIATOR: {
        PREPARING: {Event.SNAPSHOTTED: (OFFERED,), **drops(Event.YIELDED, *ALWAYS)},
        OFFERED: {
            Event.JOINED: (OFFERED, STREAMING, DROPPED),
            Event.BUSY: (OFFERED, STREAMING, DROPPED),
            Event.REFUSE: (OFFERED, STREAMING, DROPPED),
            Event.ABORT: (OFFERED, STREAMING, DROPPED),
            Event.UNLINKED: (OFFERED, STREAMING, DROPPED),
            Event.LATE: (STREAMING, DROPPED),
            **drops(Event.YIELDED, *ALWAYS),
        },
        STREAMING: {
            Event.LINKED: (STREAMING,),
            Event.COMMIT: (STREAMING,),
            Event.OUTCOME: (STREAMING,),
            Event.GATHERED: (VERIFIED, DONE, DROPPED),
            **drops(Event.ABORT, Event.FAILED, Event.UNLINKED, Event.LATE, *ALWAYS),
        },
        VERIFIED: {
            Event.COMMIT: (VERIFIED, DONE),
            Event.OUTCOME: (VERIFIED, DONE),
            Event.UNLINKED: (VERIFIED, DROPPED),
            **drops(Event.ABORT, Event.LATE, *ALWAYS),
        },
    },
    RESPONDER: {
        PREPARING: {
            Event.SNAPSHOTTED: (OFFERED,),
            **drops(Event.ABORT, Event.UNLINKED, Event.LATE, Event.YIELDED, *ALWAYS),
        },
        OFFERED: {
            Event.BEGIN: (STREAMING, DROPPED),
            **drops(Event.ABORT, Event.UNLINKED, Event.LATE, Event.YIELDED, *ALWAYS),
        },
        STREAMING: {
            Event.LINKED: (STREAMING,),
            Event.GATHERED: (VERIFIED, DROPPED),
            **drops(Event.ABORT, Event.FAILED, Event.UNLINKED, Event.LATE, *ALWAYS),
        },
        VERIFIED: {
            Event.SETTLED: (VERIFIED, DONE, DROPPED),
            Event.UNLINKED: (VERIFIED, DOUBT),
            Event.LATE: (DOUBT,),
            **drops(Event.ABORT, *ALWAYS),
        },
        DOUBT: {
            Event.SETTLED: (DOUBT, DONE, DROPPED),
            Event.LATE: (DOUBT, DROPPED),
            **drops(Event.ABORT, Event.CROWDED, *ALWAYS),
        },
    },
}
