"""The transition tables: docs/protocol.md has the same, and each of their rows can happen."""

import math
import random
import re
from pathlib import Path

import pytest

from gossip.config import Config
from gossip.config.mixings import MIXINGS
from gossip.effects import MemberState
from gossip.exchange.groups.group import Group
from gossip.exchange.push import Push
from gossip.exchange.reservation import ReservedPair
from gossip.exchange.session import session_class
from gossip.exchange.transitions import INITIATOR, RESPONDER, Event, State
from gossip.ids import Address
from gossip.wire.messages import Accept, Begin, Invite, Joined, Settled
from tests.gossip.exchange.sides import A, B, C, D, E, F, Side, offer, used_to
from tests.harness.marks import slow
from tests.simulation.transitions import KINDS, Row, rows, watched

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
SEEDS, STEPS = 500, 300
RESERVED_SEEDS = 1000  # the rows of reserved pairs are rarer
FEW = 40
# Seeds in which rare rows come about: with them first, every row is seen soon. After a change of tables or of draws
# the seeds after them show the rows too, which takes longer; then find new ones among those that add a row.
RARE = {
    "pair": (181, 246, 274, 441, 160, 18, 134, 49, 3, 45, 147),
    "ahead": (
        402, 881, 42, 157, 333, 617, 403, 642, 173, 47, 196, 332, 106, 143, 225, 548, 1, 142, 169, 217, 263, 698, 870,
        969, 0, 25, 38, 65, 67, 90, 112, 146, 197, 423,
    ),
    "group": (246, 716, 329, 482, 171, 198, 22, 107, 168, 48, 215, 11),
    "push-sum": (335, 451, 39, 285, 13),
    "row-stochastic": (350, 240, 11, 10),
}  # fmt: skip
ROLES = {"initiator": INITIATOR, "inviter": INITIATOR, "responder": RESPONDER, "invited": RESPONDER}
NOTHING = "\N{EN DASH}"  # the state before a session begins
HEAD = "| state | event | what follows | then |"


def documented_rows(kind, table):
    """Return the rows of one table of the page."""
    found = set()
    for line in table.splitlines()[2:]:
        where, what, _, then = (cell.strip() for cell in line.strip("|").split("|"))
        words = where.replace(",", " ").split()
        events = [Event(word) for word in re.findall(r"`([a-z]+)`", what) if word in {event.value for event in Event}]
        if where == NOTHING:
            assert then in ("PREPARING", "ASKED", "RESERVED")
            continue
        roles = [ROLES[word] for word in words if word in ROLES] or [INITIATOR, RESPONDER]
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
        said, run = documented_rows(kind, table), {row for row in rows() if row.kind == kind.__name__}
        assert said - run == set(), "the page says what cannot be"
        assert run - said == set(), "the page leaves out what can be"


def test_the_sessions_of_every_way_of_mixing_are_looked_at():
    assert {session_class(Config(mixing=name)) for name in MIXINGS} | {ReservedPair} == set(KINDS)


ONWARDS = (Event.FREED, Event.SNAPSHOTTED, Event.ACCEPT, Event.STREAMED, Event.JOINED, Event.BEGIN, Event.GATHERED)
OTHERS = [B, C, D, E]


class RandomSide(Side):
    """A side to which random events happen, mostly events that its state allows.

    Each seed has its own mix of events.
    """

    def __init__(self, mixing, seed):
        rng = self.rng = random.Random(f"{mixing} {seed}")
        size = {"group_size": rng.choice([2, 3, 4])} if mixing == "group" else {}
        # The share of events for reservations; 0.0 without any.
        reserving = self.reserving = rng.choice([0.3, 0.6, 0.9]) if mixing == "ahead" else 0.0
        outer = {"outer_momentum": 0.5, "outer_rate": 0.7} if reserving else {}
        mixing = "pair" if reserving else mixing
        incoming = 1 if reserving else rng.choice([1, 1, 3])
        config = Config(mixing=mixing, filter="none", incoming_exchanges=incoming, **size, **outer)
        super().__init__(rng.choice([A, F]), OTHERS, config)
        if reserving > 0.5:
            used_to(self, 0.001, 0.1)  # what is usual is known, and so long that none overlap
        self.offers = {} if mixing in ("pair", "group") else {"mixing": "push", "mass": 1.0}
        self.mixes, self.now = 0, 0.0  # a group counts mixes
        rare = [0.01, 0.03, 0.1, 1.0] if reserving else [0.01, 0.1, 1.0]
        self.often = {event: rng.choice([3.0, 9.0] if event in ONWARDS else rare) for event in Event}
        self.often[Event.SETTLED] = max(self.often[Event.SETTLED], 1.0 if reserving else 0.0)
        self.ours = rng.choice([0.1, 0.5, 0.95])  # the share of sessions that this side begins

    def note_mix(self, partner, now, own):
        self.mixes += 1

    def group(self, now):
        return list(self.partners)

    def address(self, peer):
        return Address("10.0.0.1", 7700)

    def is_linked(self, peer):
        return True

    # -- what happens
    def step(self):
        rng, exchanges = self.rng, self.exchanges
        self.now += rng.choice([0.0, 0.01, 0.1])
        self.local.boundary_at = self.now
        if rng.random() < 0.1:
            self.partners = rng.sample(OTHERS, rng.choice([0, 1, 2, 4]))
        every = list(exchanges.table.values())
        reserved = [one for one in every if type(one) is ReservedPair and one.state is not State.IN_DOUBT]
        picks_reserved = bool(reserved) and rng.random() < 0.8 * self.reserving
        one = rng.choice(reserved if picks_reserved else [*every, None, None])
        if one is None:
            exchanges.begin_mix(self.now) if rng.random() < self.ours else self.receive_offer(rng.choice(OTHERS))
        elif self.reserving and not reserved and rng.random() < self.reserving:
            ours = rng.random() < self.ours
            exchanges.reserve_next(self.now) if ours else self.receive_reservation(rng.choice(OTHERS))
        elif one.state is not State.IN_DOUBT or rng.random() < 0.2:  # else few are in doubt at once
            allowed = list(one.TRANSITIONS[one.is_initiator][one.state]) if rng.random() < 0.9 else list(Event)
            event = rng.choices([*allowed, None], [*(self.often[event] for event in allowed), 1.0])[0]
            if event is not None:
                self.play_event(event, one)

    def receive_offer(self, sender):
        """Receive an offer or an invitation."""
        session, members = self.rng.randrange(1000, 9000), (self.me, self.rng.choice(OTHERS))
        if self.config.mixing == "group":
            self.exchanges.on_invite(sender, Invite(session, "f", b"g" * 16, 0.0, "fp32", members), self.now)
        else:
            self.exchanges.on_offer(sender, offer(session, **self.offers), self.now)

    def receive_reservation(self, sender):
        """Receive an offer to reserve the next exchange."""
        self.exchanges.on_offer(sender, offer(self.rng.randrange(1000, 9000), mixing="ahead"), self.now)

    def play_event(self, event, one):
        rng, exchanges, session, now = self.rng, self.exchanges, one.session, self.now
        others = [peer for peer in one.counterparts if peer != self.me]
        sender = rng.choice(others if others and rng.random() < 0.9 else OTHERS)
        code = rng.choice(["broken", "stalled", "idle", "late"])
        codec = rng.choice(["fp32", "fp32", "none"])
        match event:
            case Event.SNAPSHOTTED:
                mass = 0.5 if exchanges.session_class is Push and one.is_initiator else 0.0
                exchanges.on_snapshotted(session, now, mass)
            case Event.ACCEPT:
                weight = rng.choice([one.weight, one.weight, 2.0]) if exchanges.session_class is not Group else 0.5
                exchanges.on_accept(sender, Accept(session, 0.0, weight, "fp32"), now)
            case Event.JOINED:
                exchanges.on_joined(sender, Joined(session, 0.0, codec), now)
            case Event.BEGIN:
                members = tuple(sorted({self.me, sender, rng.choice(OTHERS)}))
                exchanges.on_begin(sender, Begin(session, members, 0.0, codec), now)
            case Event.BUSY | Event.REFUSE | Event.COMMIT | Event.OUTCOME:
                exchanges.route_message(event, sender, session, now)
            case Event.ABORT:
                exchanges.on_abort(sender, session, code, now)
            case Event.SETTLED:
                exchanges.on_settled(sender, Settled(session, rng.random() < 0.5), now)
            case Event.STREAMED:
                exchanges.on_streamed(session, rng.choice([1.0, 1.0, 1.0, 1e30]), 1.0, now)
            case Event.GATHERED:
                absent = one.other_members if isinstance(one, Group) and rng.random() < 0.25 else []
                exchanges.on_gathered(session, 1.0, 1.0, {}, absent, now)
            case Event.FAILED:
                exchanges.on_failed(session, code, now)
            case Event.LINKED:
                exchanges.on_linked(sender, now)
            case Event.UNLINKED:
                exchanges.on_unlinked(sender, now)
            case Event.LATE:
                there = exchanges.deadline < math.inf and rng.random() < 0.95
                self.now = max(now, exchanges.deadline) if there else now + 40.0
                exchanges.tick(self.now)
            case Event.GONE:
                state = rng.choice([MemberState.DEAD, MemberState.ALIVE])
                exchanges.leave_lost_members(lambda peer: state, now)
            case Event.SPOILED:
                exchanges.on_spoiled(session)
            case Event.REPLACED:
                exchanges.abandon()
            case Event.YIELDED:
                self.receive_reservation(sender) if one.state is State.ASKED else self.receive_offer(sender)
            case Event.FREED:
                for other in [other for other in exchanges.table.values() if other.has_slot]:
                    exchanges.route_event(other, Event.REPLACED)
                exchanges.begin_reserved(now)
            case Event.CROWDED:
                pass  # Newer exchanges in doubt cause it.
            case _:
                raise AssertionError(f"{event} has no case here")


def played(mixing, seed):
    """Return the rows that the sessions of one side go by in STEPS steps."""
    side = RandomSide(mixing, seed)
    with watched() as ways:
        for _ in range(STEPS):
            side.step()
    return {row for row in ways if (row.kind == "ReservedPair") == (mixing == "ahead")}


@pytest.mark.parametrize("few", [slow(math.inf, id="all"), pytest.param(FEW, id="few")])
@pytest.mark.parametrize("mixing", ["pair", "ahead", "group", "push-sum", "row-stochastic"])
def test_whatever_happens_goes_by_the_table_and_each_row_of_it_can_happen(mixing, few):
    """Play at least ``few`` seeds, and then go on until every row was seen."""
    seen, all_rows = set(), possible(mixing)
    seeds = dict.fromkeys([*RARE[mixing], *range(RESERVED_SEEDS if mixing == "ahead" else SEEDS)])
    for count, seed in enumerate(seeds, 1):
        seen |= played(mixing, seed)
        if count >= few and seen >= all_rows:
            break
    assert seen == all_rows


def possible(mixing):
    """Return the rows that are possible with this mixing."""
    kind = {"pair": "Pair", "ahead": "ReservedPair", "group": "Group"}.get(mixing, "Push")
    ways = {row for row in rows() if row.kind == kind}
    if mixing == "row-stochastic":
        return {row for row in ways if State.IN_DOUBT not in (row.state, row.then)}
    if kind != "Push":
        return ways
    # The streams of push-sum end in doubt, and not at once.
    ended_at_once = {
        Row(kind, INITIATOR, State.STREAMING, event, State.DROPPED) for event in (Event.FAILED, Event.LATE)
    }
    return ways - ended_at_once
