"""The transition tables of exchanges: the events that each state of a pair, push or group allows, and the next states.

    pair  initiator   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
          responder   PREPARING ------------> STREAMING -> VERIFIED -> mixed
                                                              |
                                                            IN_DOUBT -> mixed | dropped

    push  initiator   PREPARING -> OFFERED -> STREAMING -> given away | taken back
                                                  |
                                                IN_DOUBT -> given away | taken back
          responder   PREPARING ------------> STREAMING -> merged

A pair is a two-phase commit without a coordinator. Each side sends COMMIT when all of the other's vector has arrived
and passed every check. The exchange happens exactly when both have sent it. These two facts never change afterwards.
If a link breaks between the two COMMITs the exchange is IN_DOUBT: the sides ask each other (Outcome, Settled) and reach
the same answer. A drop is one-sided only if the partner is gone or unreachable for ``doubt_s``, if newer exchanges in
doubt take this one's place, or if the weights are replaced. It moves the mean by at most that one difference.

    reserved  asks      ASKED -> RESERVED -> PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
              consents           RESERVED -> PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed

Two peers that both stream with others may reserve a pair, which is the next exchange of each. It takes no slot and
holds no vector until the current exchange has ended. From then on both sides are alike, and each sends Accept when its
snapshot exists.

An exchange whose partner takes longer than usual is *backgrounded*: it goes on in the background and frees its slot. A
silent peer therefore costs others only the exchange with itself.

A push happens exactly when the responder has sent COMMIT. Until the initiator knows, the mass that it gave away is in
flight. If it learns that the push failed, it merges its own snapshot back in.

    group  inviter   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
           invited   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
                                                             |
                                                           IN_DOUBT -> mixed | dropped

In a group, OFFERED means that invitations (or our consent) are sent and the list of members is open. The inviter, which
is the group's initiator, coordinates the two-phase commit: each member sends it COMMIT once it has the means of all
slices. Once every member that is not late has committed, the inviter sends SETTLED to all. A late member hears the
outcome when it asks. No node is always the inviter: it is the member whose mix was due first.

docs/protocol.md has the same tables, with the messages and actions of each; a test compares them.
"""

from collections.abc import Mapping
from enum import Enum, StrEnum, auto


class State(Enum):
    """The states of a session."""

    ASKED = auto()  # We have asked for a reservation, and there is no answer yet.
    RESERVED = auto()  # The pair is reserved, and begins when our exchange in progress has ended.
    PREPARING = auto()  # Our snapshot is not taken yet.
    OFFERED = auto()  # Our Offer is sent; in a group, see above; in a reserved pair, our Accept is sent.
    STREAMING = auto()  # Both sides have agreed on the terms, and the streams run.
    VERIFIED = auto()  # Our COMMIT is sent, and theirs has not arrived.
    IN_DOUBT = auto()  # The outcome is unknown: the link broke, or a COMMIT is late. It takes no slot any more.
    DONE = auto()  # The exchange has happened.
    DROPPED = auto()  # The exchange ended without a result.

    __hash__ = object.__hash__  # Enum hashes the name, in Python, at every table look-up.


class Event(StrEnum):
    """The events of a session. Values are the words of docs/protocol.md; ``on_<value>`` handles the event."""

    # Messages of other peers.
    ACCEPT = "accept"
    BUSY = "busy"
    REFUSE = "refuse"
    COMMIT = "commit"
    ABORT = "abort"
    OUTCOME = "outcome"
    SETTLED = "settled"
    JOINED = "joined"
    BEGIN = "begin"
    # Reports of the driver.
    SNAPSHOTTED = "snapshotted"
    SPOILED = "spoiled"  # Our snapshot is not finite, or cannot be taken.
    STREAMED = "streamed"  # The partner's whole vector has arrived, with right checksums.
    GATHERED = "gathered"  # The means of all slices of a group have arrived.
    LINKED = "linked"  # There is a link to a member of the group.
    UNLINKED = "unlinked"  # No link to a member of the group is left.
    FAILED = "failed"  # A stream stalled or brought wrong bytes, or its link is lost.
    # Changes that the peer finds by polling.
    LATE = "late"  # The time ``timer_at`` has come.
    FREED = "freed"  # No other exchange takes a slot.
    GONE = "gone"  # The only member that knows the outcome is held DEAD or LEFT.
    # Consequences of other events.
    YIELDED = "yielded"  # Another member's offer takes its place.
    CROWDED = "crowded"  # Newer exchanges in doubt take its place.
    REPLACED = "replaced"  # The weights that it began from are being replaced.


HANDLERS = {event: f"on_{event}" for event in Event}
INITIATOR, RESPONDER = True, False
Transitions = Mapping[State, Mapping[Event, tuple[State, ...]]]
Table = Mapping[bool, Transitions]  # Transitions of the initiator and of the responder.
PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, IN_DOUBT, DONE, DROPPED = State.VERIFIED, State.IN_DOUBT, State.DONE, State.DROPPED
UNIVERSAL = (Event.SPOILED, Event.REPLACED)  # Events that are possible in each state, and drop the session.


def drop_entries(*events: Event) -> dict[Event, tuple[State, ...]]:
    """Return table entries for events that end the session without a result."""
    return dict.fromkeys(events, (State.DROPPED,))


INITIATOR_OFFER: Transitions = {  # Transitions of an initiator that has offered a pair or a push.
    OFFERED: {
        Event.ACCEPT: (STREAMING, DROPPED),
        Event.BUSY: (OFFERED, DROPPED),
        Event.REFUSE: (OFFERED, DROPPED),
        Event.ABORT: (OFFERED, DROPPED),
        Event.FAILED: (OFFERED, DROPPED),
        Event.LATE: (OFFERED, DROPPED),
        **drop_entries(Event.OUTCOME, *UNIVERSAL),
    }
}
RESPONDER_OFFER: Transitions = {  # Transitions of the responder to an offer.
    PREPARING: {
        Event.SNAPSHOTTED: (STREAMING,),
        **drop_entries(Event.ABORT, Event.OUTCOME, Event.FAILED, Event.LATE, *UNIVERSAL),
    }
}
STREAMS_AND_COMMITS: Transitions = {  # Transitions of both sides of a pair from the Accept on.
    STREAMING: {
        Event.COMMIT: (STREAMING,),  # We send our COMMIT once the partner's whole vector has arrived.
        Event.STREAMED: (VERIFIED, DONE, DROPPED),
        Event.LATE: (STREAMING, DROPPED),
        **drop_entries(Event.ABORT, Event.OUTCOME, Event.FAILED, *UNIVERSAL),
    },
    VERIFIED: {
        Event.COMMIT: (DONE,),
        Event.OUTCOME: (DONE,),
        Event.FAILED: (IN_DOUBT,),
        Event.LATE: (VERIFIED, IN_DOUBT),
        **drop_entries(Event.ABORT, *UNIVERSAL),
    },
    IN_DOUBT: {
        Event.COMMIT: (DONE,),
        Event.OUTCOME: (DONE,),
        Event.SETTLED: (DONE, DROPPED),
        Event.LATE: (IN_DOUBT, DROPPED),
        **drop_entries(Event.ABORT, Event.GONE, Event.CROWDED, *UNIVERSAL),
    },
}
PAIR: Table = {
    INITIATOR: {
        PREPARING: {Event.SNAPSHOTTED: (OFFERED, DROPPED), **drop_entries(Event.YIELDED, *UNIVERSAL)},
        OFFERED: {**INITIATOR_OFFER[OFFERED], **drop_entries(Event.YIELDED)},
        **STREAMS_AND_COMMITS,
    },
    RESPONDER: {**RESPONDER_OFFER, **STREAMS_AND_COMMITS},
}
RESERVATION: Transitions = {  # Transitions of both sides of a pair that is reserved ahead.
    State.RESERVED: {
        Event.ACCEPT: (State.RESERVED, PREPARING, DROPPED),
        Event.FREED: (PREPARING,),
        Event.LATE: (State.RESERVED, DROPPED),
        **drop_entries(Event.BUSY, Event.REFUSE, Event.ABORT, Event.FAILED, Event.YIELDED, *UNIVERSAL),
    },
    PREPARING: {
        Event.ACCEPT: (PREPARING, DROPPED),
        Event.SNAPSHOTTED: (OFFERED, STREAMING),
        **drop_entries(Event.BUSY, Event.REFUSE, Event.ABORT, Event.FAILED, Event.LATE, Event.YIELDED, *UNIVERSAL),
    },
    OFFERED: {
        Event.ACCEPT: (STREAMING, DROPPED),
        Event.LATE: (OFFERED, DROPPED),
        **drop_entries(Event.BUSY, Event.REFUSE, Event.ABORT, Event.FAILED, Event.OUTCOME, Event.YIELDED, *UNIVERSAL),
    },
    **STREAMS_AND_COMMITS,
}
RESERVED_PAIR: Table = {
    INITIATOR: {
        State.ASKED: {
            Event.JOINED: (State.ASKED, State.RESERVED, DROPPED),
            Event.BUSY: (State.ASKED, DROPPED),
            Event.REFUSE: (State.ASKED, DROPPED),
            Event.ABORT: (State.ASKED, DROPPED),
            Event.FAILED: (State.ASKED, DROPPED),
            Event.LATE: (State.ASKED, DROPPED),
            **drop_entries(Event.FREED, Event.YIELDED, *UNIVERSAL),
        },
        **RESERVATION,
    },
    RESPONDER: RESERVATION,
}
PUSH: Table = {  # IN_DOUBT exists only if mass is conserved; else the initiator forgets a push that fails.
    INITIATOR: {
        PREPARING: {Event.SNAPSHOTTED: (OFFERED, DROPPED), **drop_entries(*UNIVERSAL)},
        **INITIATOR_OFFER,
        STREAMING: {
            Event.COMMIT: (DONE,),
            Event.FAILED: (IN_DOUBT, DROPPED),
            Event.LATE: (STREAMING, IN_DOUBT, DROPPED),
            **drop_entries(Event.ABORT, Event.OUTCOME, *UNIVERSAL),
        },
        IN_DOUBT: {
            Event.COMMIT: (DONE,),
            Event.SETTLED: (DONE, DROPPED),
            Event.LATE: (IN_DOUBT, DROPPED),
            **drop_entries(Event.ABORT, Event.OUTCOME, Event.GONE, Event.CROWDED, *UNIVERSAL),
        },
    },
    RESPONDER: {
        **RESPONDER_OFFER,
        STREAMING: {
            Event.STREAMED: (DONE, DROPPED),
            Event.LATE: (STREAMING, DROPPED),
            **drop_entries(Event.ABORT, Event.OUTCOME, Event.FAILED, *UNIVERSAL),
        },
    },
}
GROUP: Table = {
    INITIATOR: {
        PREPARING: {Event.SNAPSHOTTED: (OFFERED,), **drop_entries(Event.YIELDED, *UNIVERSAL)},
        OFFERED: {
            Event.JOINED: (OFFERED, STREAMING, DROPPED),
            Event.BUSY: (OFFERED, STREAMING, DROPPED),
            Event.REFUSE: (OFFERED, STREAMING, DROPPED),
            Event.ABORT: (OFFERED, STREAMING, DROPPED),
            Event.UNLINKED: (OFFERED, STREAMING, DROPPED),
            Event.LATE: (STREAMING, DROPPED),
            **drop_entries(Event.YIELDED, *UNIVERSAL),
        },
        STREAMING: {
            Event.LINKED: (STREAMING,),
            Event.COMMIT: (STREAMING,),
            Event.OUTCOME: (STREAMING,),
            Event.GATHERED: (VERIFIED, DONE, DROPPED),
            Event.ABORT: (STREAMING, DROPPED),
            Event.UNLINKED: (STREAMING, DROPPED),
            Event.LATE: (STREAMING, DROPPED),
            **drop_entries(Event.FAILED, *UNIVERSAL),
        },
        VERIFIED: {
            Event.COMMIT: (VERIFIED, DONE),
            Event.OUTCOME: (VERIFIED, DONE),
            Event.ABORT: (VERIFIED, DONE, DROPPED),
            Event.UNLINKED: (VERIFIED, DONE, DROPPED),
            Event.LATE: (DONE, DROPPED),
            **drop_entries(*UNIVERSAL),
        },
    },
    RESPONDER: {
        PREPARING: {
            Event.SNAPSHOTTED: (OFFERED,),
            **drop_entries(Event.ABORT, Event.UNLINKED, Event.LATE, Event.YIELDED, *UNIVERSAL),
        },
        OFFERED: {
            Event.BEGIN: (STREAMING, DROPPED),
            **drop_entries(Event.ABORT, Event.UNLINKED, Event.LATE, Event.YIELDED, *UNIVERSAL),
        },
        STREAMING: {
            Event.LINKED: (STREAMING,),
            Event.GATHERED: (VERIFIED, DROPPED),
            Event.UNLINKED: (STREAMING, DROPPED),
            Event.LATE: (STREAMING, DROPPED),
            **drop_entries(Event.ABORT, Event.FAILED, *UNIVERSAL),
        },
        VERIFIED: {
            Event.SETTLED: (VERIFIED, DONE, DROPPED),
            Event.UNLINKED: (VERIFIED, IN_DOUBT),
            Event.LATE: (IN_DOUBT,),
            **drop_entries(Event.ABORT, *UNIVERSAL),
        },
        IN_DOUBT: {
            Event.SETTLED: (IN_DOUBT, DONE, DROPPED),
            Event.LATE: (IN_DOUBT, DROPPED),
            **drop_entries(Event.ABORT, Event.CROWDED, *UNIVERSAL),
        },
    },
}
