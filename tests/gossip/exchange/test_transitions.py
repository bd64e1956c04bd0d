"""The tables of transitions: that docs/protocol.md has the same, and that each of their rows can happen."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest

from gossip.config import Config
from gossip.effects import MemberState
from gossip.exchange.push import Push
from gossip.exchange.session import INITIATOR, RESPONDER, Event, State
from gossip.wire.messages import Accept, Offer, Settled
from tests.gossip.exchange.sides import A, B, C, D, E, F, Side
from tests.simulation.transitions import KINDS, Row, rows, watched

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
SEEDS, STEPS = 400, 300
ROLES = {"initiator": INITIATOR, "responder": RESPONDER}
NOTHING = "\N{EN DASH}"  # where a session begins
HEAD = "| state | event | what follows | then |"


def said_of(kind, table):
    """The rows of one table of the page."""
    found = set()
    for line in table.splitlines()[2:]:
        where, what, _, then = (cell.strip() for cell in line.strip("|").split("|"))
        words = where.replace(",", " ").split()
        events = [Event(word) for word in re.findall(r"`([a-z]+)`", what) if word in {event.value for event in Event}]
        if where == NOTHING:
            assert then == "PREPARING"
            continue
        roles = [ROLES[word] for word in words if word in ROLES] or list(ROLES.values())
        for initiator in roles:
            has = kind.TRANSITIONS[initiator]
            states = [State[word] for word in words if word in State.__members__] if where != "any" else list(has)
            for state in states:
                assert state in has or len(roles) == 2, f"{kind.__name__} has no {state} for {where}"
                nexts = [state] if then == "the same" else [State[word.strip()] for word in then.split(",")]
                found |= {
                    Row(kind.__name__, initiator, state, event, after)
                    for event in events for after in nexts if state in has
                }  # fmt: skip
    return found


def test_the_page_has_the_tables_that_the_code_runs_by():
    tables = [HEAD + part.split("\n\n")[0] for part in PAGE.read_text(encoding="utf-8").split(HEAD)[1:]]
    assert len(tables) == len(KINDS)
    for kind, table in zip(KINDS, tables, strict=True):
        said, run = said_of(kind, table), {row for row in rows() if row.kind == kind.__name__}
        assert said - run == set(), "the page says what cannot be"
        assert run - said == set(), "the page leaves out what can be"


def test_every_event_has_a_method_and_no_ended_session_has_events():
    for kind in KINDS:
        for table in kind.TRANSITIONS.values():
            assert not {State.DONE, State.DROPPED} & set(table)
            for events in table.values():
                assert all(callable(getattr(kind, event.value)) for event in events)
                assert all(events.values())


ONWARDS = (Event.SNAPSHOTTED, Event.ACCEPT, Event.STREAMED)  # what most exchanges meet with


def act(side, rng, often, now):
    """An event of one session, more often than not one that may happen to it, or another exchange that begins; the time
    after it, and the effects."""
    exchanges, members = side.exchanges, (B, C, D, E)
    push = exchanges.kind is Push
    one = rng.choice([*exchanges.table.values(), None, None])
    if one is None:
        if rng.random() < often[None]:
            return now, exchanges.begin(now)
        return now, exchanges.on_offer(rng.choice(members), offered(rng, push), now)
    if one.state is State.DOUBT and rng.random() < 0.8:
        return now, []  # or there would never be many
    session, sender = one.session, one.partner if rng.random() < 0.9 else rng.choice(members)
    may = list(exchanges.kind.TRANSITIONS[one.initiator][one.state]) if rng.random() < 0.9 else list(Event)
    code = rng.choice(["broken", "stalled", "idle", "late"])
    match rng.choices([*may, None], [*(often[event] for event in may), 1.0])[0]:
        case Event.SNAPSHOTTED:
            return now, exchanges.snapshotted(session, now, 0.5 if push and one.initiator else 0.0)
        case Event.ACCEPT:
            return now, exchanges.on_accept(
                sender, Accept(session, 0.0, rng.choice([one.weight, one.weight, 2.0]), "fp32"), now
            )
        case Event.BUSY:
            return now, exchanges.on_busy(sender, session, now)
        case Event.REFUSE:
            return now, exchanges.on_refuse(sender, session, now)
        case Event.COMMIT:
            return now, exchanges.on_commit(sender, session, now)
        case Event.ABORT:
            return now, exchanges.on_abort(sender, session, code, now)
        case Event.OUTCOME:
            return now, exchanges.on_outcome(sender, session, now)
        case Event.SETTLED:
            return now, exchanges.on_settled(sender, Settled(session, rng.random() < 0.5), now)
        case Event.STREAMED:
            return now, exchanges.streamed(session, rng.choice([1.0, 1.0, 1.0, 1e30]), 1.0, now)
        case Event.FAILED:
            return now, exchanges.failed(session, code, now)
        case Event.LATE:
            now = max(now, exchanges.deadline) if rng.random() < 0.95 and exchanges.deadline < math.inf else now + 40.0
            return now, exchanges.tick(now)
        case Event.GONE:
            state = rng.choice([MemberState.DEAD, MemberState.ALIVE])
            return now, exchanges.look_elsewhere(lambda peer: state, now)
        case Event.SPOILED:
            return now, exchanges.spoiled(session)
        case Event.REPLACED:
            return now, exchanges.abandon()
        case Event.YIELDED:
            return now, exchanges.on_offer(sender, offered(rng, push), now)
    return now, []


def offered(rng, push):
    return Offer(
        rng.randrange(1000, 9000), "f", b"g" * 16, 0.0, 0.5, "fp32", "push" if push else "pair", 1.0 if push else 0.0
    )


def played(mixing, seed):
    """The rows by which the sessions of one side go in so many steps. Each seed has its own mix of events."""
    rng = random.Random(f"{mixing} {seed}")
    side = Side(
        rng.choice([A, F]), [B, C, D, E], Config(mixing=mixing, filter="none", incoming_exchanges=rng.choice([1, 1, 3]))
    )
    often = {event: rng.choice([3.0, 9.0] if event in ONWARDS else [0.01, 0.1, 1.0]) for event in Event}
    often[None] = rng.choice([0.1, 0.5, 0.95])
    now = 0.0
    with watched() as ways:
        for _ in range(STEPS):
            now += rng.choice([0.0, 0.01, 0.1])
            side.local.boundary_at = now
            if rng.random() < 0.1:
                side.partners = rng.sample([B, C, D, E], rng.choice([0, 1, 4]))
            now, _ = act(side, rng, often, now)
    return ways


@pytest.mark.parametrize("mixing", ["pair", "push-sum", "row-stochastic"])
def test_whatever_happens_goes_by_the_table_and_each_row_of_it_can_happen(mixing):
    assert set().union(*(played(mixing, seed) for seed in range(SEEDS))) == possible(mixing)


def possible(mixing):
    """The rows that are of this mixing."""
    ways = {row for row in rows() if row.kind == ("Pair" if mixing == "pair" else "Push")}
    if mixing == "row-stochastic":
        return {row for row in ways if State.DOUBT not in (row.state, row.then)}
    doubtful = (INITIATOR, State.STREAMING, State.DROPPED)  # the streams of push-sum end in doubt, and not at once
    return {
        row for row in ways
        if mixing == "pair" or (row.initiator, row.state, row.then) != doubtful
        or row.event not in (Event.FAILED, Event.LATE)
    }  # fmt: skip
