"""Every change of a session's state, held to the table of its class while a schedule is played."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gossip.effects import Effect
from gossip.exchange.groups.group import Group
from gossip.exchange.pair import Pair
from gossip.exchange.push import Push
from gossip.exchange.reservation import ReservedPair
from gossip.exchange.session import Event, Session, State
from tests.simulation.judge import Failure

CLAIM = "a session goes where its table says"
KINDS: tuple[type[Session], ...] = (Pair, ReservedPair, Push, Group)
BEGIN = {False: (State.PREPARING,), True: (State.ASKED, State.RESERVED)}  # initial states; True: a reserved session


class Row(NamedTuple):
    """One transition that a table allows, or that a session made."""

    kind: str
    initiator: bool
    state: State
    event: Event
    then: State


def rows() -> set[Row]:
    """Return every transition that the tables allow."""
    return {
        Row(kind.__name__, initiator, state, event, then)
        for kind in KINDS
        for initiator, table in kind.TRANSITIONS.items()
        for state, events in table.items()
        for event, nexts in events.items()
        for then in nexts
    }


class Happening:
    """One event of one session, from its beginning to its end. Another may happen to the same session within it."""

    __slots__ = ("allowed", "before", "event", "moved", "session")

    def __init__(self, session: Session, event: Event) -> None:
        self.session, self.event, self.before, self.moved = session, event, session.state, False
        self.allowed = session.TRANSITIONS[session.is_initiator].get(session.state, {}).get(event, ())

    def goes(self, state: State) -> Row:
        if state not in self.allowed:
            raise Failure(CLAIM, f"{self.event} in {self.before} leads to {state}: {self.session!r}")
        return Row(type(self.session).__name__, self.session.is_initiator, self.before, self.event, state)


@contextmanager
def watched() -> Iterator[set[Row]]:
    """Check all changes of sessions' states against the tables, and yield the transitions that were made.

    In this context a session changes its state only by an event and only as its table allows. It may stay in its state
    only if the table allows that.
    """
    gone: set[Row] = set()
    under_way: list[Happening] = []
    handle = Session.handle

    def setter(self: Session, name: str, value: Any) -> None:
        if name == "state":
            within = [one for one in under_way if one.session is self]
            if within:
                gone.add(within[-1].goes(value))
                for one in within:
                    one.moved = True
            elif hasattr(self, "state") or value not in BEGIN[type(self) is ReservedPair]:
                raise Failure(CLAIM, f"{value} by no event: {self!r}")
        object.__setattr__(self, name, value)

    def watching(self: Session, event: Event, *what: Any) -> list[Effect]:
        under_way.append(Happening(self, event))
        try:
            effects = handle(self, event, *what)
        finally:
            one = under_way.pop()
        if not one.moved:
            gone.add(one.goes(self.state))
        return effects

    Session.handle, Session.__setattr__ = watching, setter  # type: ignore[method-assign,assignment]
    try:
        yield gone
    finally:
        Session.handle = handle  # type: ignore[method-assign]
        del Session.__setattr__
