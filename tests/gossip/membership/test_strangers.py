"""Members known by hearsay alone: what they may not do, how they are introduced, and that a thousand cost little."""

import itertools
import random
from collections.abc import Iterator

import pytest

from gossip.effects import Dial, MemberChanged, MemberState, Send
from gossip.ids import Address
from gossip.wire.messages import Ack, Gossip, Hint, Ping, PingReq, Records
from tests.gossip.membership.members import MemberWorld, answer_pings, link, meet, member, peer_id, record_of, sent
from tests.harness.configs import tuned
from tests.harness.world import World

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT


def elsewhere(number):
    """Return a record of a member on its own host."""
    return record_of(number, address=Address(f"10.1.{number >> 8}.{number & 255}", 7700))


def hearing(count: int, record=elsewhere):
    """Return member 0 with a link to 1, which told it of members 2 to ``count``."""
    me = member()
    me.on_linked(peer_id(1), record_of(1), 0.0)
    for start in range(2, count + 1, 100):
        told = range(start, min(start + 100, count + 1))
        me.receive(peer_id(1), Records(tuple(record(n) for n in told), b""), 0.0)
    return me


def dials_of(me, until: float, refused: bool = True) -> list[tuple[float, Dial]]:
    """Return its dials of strangers up to ``until``, each of which is refused or swallowed.

    Member 1 answers nothing either, so that it is dialled too once it is DEAD.
    """
    dials = []
    while me.deadline <= until:
        now = me.deadline
        made = [effect for effect in me.tick(now) if isinstance(effect, Dial) and effect.expect != peer_id(1)]
        dials += [(now, dial) for dial in made]
        for dial in made if refused else ():
            me.on_dial_failed(dial.expect, now)
    return dials


def dials_among_living(me, until: float) -> Iterator[tuple[float, Dial]]:
    """Yield its dials up to ``until``, while every member that it sends anything proves that it lives."""
    while me.deadline <= until:
        now = me.deadline
        for effect in me.tick(now):
            if isinstance(effect, Dial):
                yield now, effect
            elif isinstance(effect, Send):
                me.on_proof_of_life(effect.to, now)


# -- what they are not -------------------------------------------------------------------------------------------------
def test_by_hearsay_nobody_is_an_owner_a_partner_of_a_run_or_company():
    me = hearing(300)
    me.update_me(0.0, ready=True)
    assert len(me.alive()) == 300
    assert me.contacted() == [peer_id(1)]
    assert me.owners() == sorted([me.me.id, peer_id(1)])
    assert [record.id for record in me.run_members(b"")] == [peer_id(1)]
    changes = me.changes
    me.on_linked(peer_id(7), record_of(7), 1.0)
    assert me.changes > changes
    assert me.owners() == sorted([me.me.id, peer_id(1), peer_id(7)])


def test_no_stranger_is_probed_told_news_or_asked_for_help_and_its_silence_is_not_ours():
    me = hearing(300)
    asked = set()
    while me.deadline < 60.0:
        now = me.deadline
        for effect in me.tick(now):
            if isinstance(effect, Send):
                asked.add(effect.to)
                me.on_proof_of_life(effect.to, now)
            elif effect.expect is not None:
                assert not [e for e in me.on_dial_failed(effect.expect, now) if isinstance(e, Send)]
    assert asked == {peer_id(1)}
    assert me._detector.health == 0


def test_thousands_of_names_make_the_swarm_no_larger_than_it_may_be():
    me = hearing(2_000)
    assert me._table.size == 1 + 4 * 2  # in a larger swarm progress would be signed every 200 s


def test_what_one_member_tells_of_fills_no_table_and_drives_nobody_out_whom_we_met():
    me = member(config=tuned(max_members=50))  # room for 100
    link(me, *range(1, 11))
    me.receive(peer_id(2), Records(tuple(record_of(n) for n in range(20, 30)), b""), 0.0)
    for n in range(100, 500):
        me.receive(peer_id(1), Gossip((record_of(n),)), float(n))
    assert len(me.alive()) == 10 + 10 + 75
    for n in range(500, 520):  # another's few find room in the place of the many
        me.receive(peer_id(3), Gossip((record_of(n),)), float(n))
    link(me, *range(600, 640), now=520.0)
    known = {record.id for record, _ in me.members()}
    assert {peer_id(n) for n in (*range(1, 11), *range(20, 30), *range(500, 520), *range(600, 640))} <= known
    assert len(me.members()) == 99


def test_the_book_for_the_next_start_holds_nobody_by_hearsay():
    me = hearing(300)
    meet(me, 2, 1.0)
    assert {record.id for record in me.book()} == {peer_id(1), peer_id(2)}
    again = member()
    again.restore(me.book(), 0.0)
    again.receive(peer_id(3), Gossip((record_of(2, sequence=1),)), 1.0)
    assert again.state(peer_id(2)) is ALIVE
    assert not again.was_contacted(peer_id(2)), "before its link comes up again"
    assert {record.id for record in again.book()} == {peer_id(1), peer_id(2)}


def test_what_we_said_in_an_earlier_life_of_one_we_have_not_met_since_counts_again():
    me = member()
    me.on_linked(peer_id(1), record_of(1), 0.0)
    me.receive(peer_id(1), Gossip((record_of(2),)), 1.0)
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, True, me.me.id),)), 2.0)
    assert me.state(peer_id(2)) is SUSPECT


def test_nothing_is_said_of_strangers_until_they_are_met():
    me = member()
    said = me.on_linked(peer_id(1), record_of(1), 0.0)
    for n in range(2, 1_000):
        said += me.receive(peer_id(1), Gossip((record_of(n),)), n * 0.02)
    said += me.receive(peer_id(1), Gossip((Hint(peer_id(3), 1, False, peer_id(1)),)), 20.0)
    said += me.receive(peer_id(1), Gossip((record_of(4, left=True),)), 20.0)
    said += me.receive(peer_id(1), Gossip((record_of(1_000), Hint(peer_id(1_000), 1, True, peer_id(1)))), 20.0)
    assert [me.state(peer_id(n)) for n in (2, 3, 4, 1_000)] == [ALIVE, SUSPECT, LEFT, DEAD]
    changes = [effect for effect in said if isinstance(effect, MemberChanged)]
    assert changes == [MemberChanged(peer_id(1), None, ALIVE)]
    said = link(me, 2, 1_000, now=20.1)  # member 1,000 is held DEAD until it refutes that itself
    said += me.receive(peer_id(1_000), Gossip((record_of(1_000, incarnation=2),)), 20.2)
    assert [effect for effect in said if isinstance(effect, MemberChanged)] == [
        MemberChanged(peer_id(2), None, ALIVE),
        MemberChanged(peer_id(1_000), DEAD, ALIVE),
    ]


# -- those that nobody can dial ----------------------------------------------------------------------------------------
def hidden(number, home=2, **changes):
    return record_of(number, address=None, homes=(peer_id(home),), **changes)


def owning(me):
    return {peer for peer in me.owners() if peer not in me.contacted()}


def test_two_that_nobody_can_dial_own_data_to_each_other_by_the_word_of_a_home_of_theirs():
    world = MemberWorld(5)
    world.swarm(2)
    one = world.start(8, seed=0, address=None, homes=(peer_id(0),))
    other = world.start(9, seed=0, address=None, homes=(peer_id(0),))
    owners = sorted(world.by_id)
    world.until(lambda: all(node.membership.owners() == owners for node in world.running), 10)
    assert other.id not in one.membership.contacted(), "nor is it a partner"

    for _ in range(60):
        world.run(1.0)
        for node in (one, other):  # they train
            node.membership.update_me(world.now, steps=int(world.now))
    assert one.membership.owners() == other.membership.owners() == owners
    other.crash()
    world.until(lambda: other.id not in one.membership.owners(), 30)


@pytest.mark.parametrize("anew", [False, True], ids=["which knows it", "which began anew"])
def test_one_that_nobody_can_dial_is_left_to_its_home_while_that_knows_it(anew):
    """A home that was restarted never met its client: neither it nor any other member would probe that."""
    me = member()
    me.on_linked(peer_id(2), record_of(2), 0.0)
    me.on_linked(peer_id(3), hidden(3), 0.5)  # its home is member 2
    for ask in sent(me.on_unlinked(peer_id(3), 1.0), PingReq):
        me.receive(peer_id(2), Ack(ask.message.seq, ()), 1.1)  # its home says that it lives
    if anew:
        me.receive(peer_id(2), Gossip((record_of(2, incarnation=2),)), 2.0)
    asked = []
    while me.deadline <= 30.0:
        now = me.deadline
        effects = me.tick(now)
        asked += [ask.message.target for ask in sent(effects, PingReq)]
        answer_pings(me, effects, now)
    assert (peer_id(3) in asked) is anew
    assert me.state(peer_id(3)) is (DEAD if anew else ALIVE)


def test_nobody_but_a_home_that_we_met_vouches_for_a_stranger_and_it_for_eight():
    me = hearing(3)
    meet(me, 2, 0.0)
    me.receive(peer_id(1), Gossip((hidden(9), hidden(10, home=3), hidden(11, home=1, ready=False))), 1.0)
    me.receive(peer_id(3), Gossip((hidden(10, home=3, sequence=1),)), 1.0)  # member 3 is known by hearsay alone
    me.receive(peer_id(2), Gossip((record_of(12, homes=(peer_id(2),)),)), 1.0)  # it can be dialled
    assert owning(me) == {me.me.id}
    changes = me.changes
    me.receive(peer_id(2), Gossip((hidden(9, sequence=1),)), 2.0)
    assert owning(me) == {me.me.id, peer_id(9)}
    assert me.changes > changes
    assert peer_id(9) not in [*me.contacted(), *(record.id for record in me.run_members(b""))]
    assert not me.was_contacted(peer_id(9))
    me.receive(peer_id(2), Gossip(tuple(hidden(n) for n in range(20, 40))), 3.0)
    assert len(owning(me)) == 1 + 8
    me.on_linked(peer_id(9), hidden(9, sequence=1), 4.0)  # it needs no home's word any more
    me.receive(peer_id(2), Gossip((hidden(41),)), 5.0)
    assert len(owning(me)) == 1 + 8


@pytest.mark.parametrize(
    "what",
    [
        hidden(9, sequence=2, ready=False), hidden(9, home=3, sequence=2), hidden(9, sequence=2, left=True),
        record_of(9, sequence=2), record_of(2, left=True), Hint(peer_id(9), 1, False, peer_id(1)),
    ],
)  # fmt: skip
def test_who_is_vouched_for_is_no_owner_once_that_no_longer_holds(what):
    me = hearing(3)
    meet(me, 2, 0.0)
    me.receive(peer_id(2), Gossip((hidden(9, sequence=1),)), 2.0)
    assert owning(me) == {me.me.id, peer_id(9)}
    changes = me.changes
    me.receive(peer_id(1), Gossip((what,)), 3.0)
    assert owning(me) == {me.me.id}
    assert me.changes > changes


# -- how they are introduced -------------------------------------------------------------------------------------------
def test_strangers_are_dialled_in_a_bounded_trickle_each_once_in_a_while():
    me = hearing(1_000)
    dials = dials_of(me, 120.0)
    assert len([1 for at, _ in dials if at < 1.0]) <= 9
    assert 100 <= len(dials) <= 129
    assert len({dial.expect for _, dial in dials}) > 0.95 * len(dials)
    assert all(dial.address == record.address for _, dial in dials if (record := me.record(dial.expect)) is not None)


def test_a_stranger_waits_for_none_that_left_or_has_no_address():
    def one_of_many(number):
        changes = {"left": True} if number % 2 else {"address": None}
        return elsewhere(number) if number == 2 else record_of(number, **changes)

    me = hearing(500, record=one_of_many)
    assert [dial.expect for _, dial in dials_of(me, 1.0)] == [peer_id(2)]
    me.receive(peer_id(1), Gossip((record_of(3, incarnation=2), record_of(4, incarnation=2))), 10.0)
    assert {dial.expect for _, dial in dials_of(me, 12.0)} == {peer_id(3), peer_id(4)}
    me.receive(peer_id(1), Gossip((record_of(2, address=None, incarnation=2),)), 80.0)
    assert peer_id(2) not in {dial.expect for _, dial in dials_of(me, 600.0)}


def test_who_does_not_answer_is_tried_more_and_more_rarely():
    me = hearing(2)
    link(me, *range(3, 12))
    times, incarnation = [], 1
    for now, dial in dials_among_living(me, 20_000.0):
        assert dial.expect == peer_id(2)
        times.append(now)
        me.on_dial_failed(peer_id(2), now)
        if me.state(peer_id(2)) is SUSPECT:  # it lives, where we cannot reach it, and says so
            incarnation += 1
            me.receive(peer_id(3), Gossip((record_of(2, incarnation=incarnation),)), now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(pauses) >= 7
    assert all(0.7 * 60 * 2 ** min(n, 6) <= pause <= 1.3 * 60 * 2 ** min(n, 6) for n, pause in enumerate(pauses))


def test_what_others_had_us_ask_of_one_that_was_down_does_not_put_off_our_getting_to_know_it():
    me = hearing(2)
    assert [dial.expect for _, dial in dials_of(me, 1.0)] == [peer_id(2)]
    for number in range(4):  # it is down for a moment, and four that met it have us look as well
        me.on_dial_failed(peer_id(2), 1.0 + 0.1 * number)
    assert me.state(peer_id(2)) is ALIVE, "one failure says nothing"
    (when, _), *_ = dials_of(me, 90.0)
    assert when < 1.3 * 60, "and not after eight minutes"


def test_strangers_whose_addresses_swallow_packets_are_dialled_few_at_a_time():
    me = hearing(1_000)
    dials = dials_of(me, 120.0, refused=False)
    assert len(dials) <= 5 * 8  # eight until something comes of one of them, or 30 s are over
    for _, dial in dials[-2:]:
        me.on_linked(dial.expect, me.record(dial.expect), 120.0)
    assert 1 <= len(dials_of(me, 125.0, refused=False)) <= 8


def of_one_host(number):
    return record_of(number, address=Address("192.0.2.1", number))


def test_one_introducer_has_few_ports_of_a_host_dialled_where_nobody_answers():
    for refused in (False, True):
        dials = dials_of(hearing(1_000, record=of_one_host), 600.0, refused)
        assert len(dials) <= 4 + 600 / 60


@pytest.mark.parametrize("seed", range(5))
def test_of_the_ports_of_one_host_each_is_dialled_once_before_any_is_dialled_twice(seed):
    """Before, eight names that a liar made up delayed an honest member at the same address by seven minutes."""
    me = hearing(10, record=of_one_host)
    me._introductions._rng.seed(seed)
    dials = dials_of(me, 600.0)
    assert len({dial.expect for _, dial in dials[:9]}) == 9
    assert dials[8][0] < 2 * (9 - 4) * 60


def test_a_host_of_many_members_is_met_as_quickly_as_many_hosts():
    me = hearing(65, record=of_one_host)
    for now, dial in dials_among_living(me, 90.0):
        me.on_linked(dial.expect, me.record(dial.expect), now)
    assert len(me.contacted()) == 65


@pytest.mark.parametrize(
    ("hosts", "of_another", "told_s"),
    [(of_one_host, of_one_host, 30.0), (elsewhere, record_of, 5.0)],
    ids=["at one host, which it slanders", "at hundreds of hosts"],
)
def test_those_that_one_introducer_tells_of_hardly_delay_those_of_another(hosts, of_another, told_s):
    me = hearing(600, record=hosts)
    link(me, *range(700, 710))
    dials_of(me, told_s)
    me.receive(peer_id(700), Gossip((of_another(800),)), told_s)
    found = next(at for at, dial in dials_of(me, told_s + 120.0) if dial.expect == peer_id(800))
    assert found < told_s + 0.05 * 620 + 10


@pytest.mark.parametrize("count", [3, 8])
def test_a_small_swarm_knows_itself_at_once(count):
    world = MemberWorld(count)
    nodes = world.swarm(count)
    world.until(lambda: all(len(node.membership.contacted()) == count - 1 for node in nodes), 3.0)


def test_a_swarm_of_a_hundred_knows_itself_in_a_minute_and_nobody_is_dialled_by_all_at_once():
    world = MemberWorld(5)
    nodes = world.swarm(100)
    world.until(lambda: all(len(node.membership.contacted()) == 99 for node in nodes), 90.0)
    newcomer = world.start(100, 0)
    begun = world.now
    arrivals: list[float] = []
    linked = newcomer.membership.on_linked
    newcomer.membership.on_linked = lambda *given: arrivals.append(world.now) or linked(*given)  # type: ignore[method-assign]
    world.until(lambda: len(newcomer.membership.contacted()) == 100, 60.0)
    world.run(1.0)
    for second in range(int(world.now - begun)):
        assert sum(1 for at in arrivals if second <= at - begun < second + 1) <= 60


# -- a thousand names --------------------------------------------------------------------------------------------------
def test_three_hundred_records_of_nobody_leave_mixing_and_the_division_of_data_as_they_are():
    def mixes(count: int) -> tuple[int, list]:
        swarm = World(4)
        *honest, liar = nodes = swarm.swarm(5)
        swarm.run(20)
        assert all(len(node.peer.membership.contacted()) == 4 for node in nodes)
        before = sum(len(node.mixes) for node in honest)
        rng, run_id = random.Random(1), honest[0].run_id
        names = [record_of(1_000 + n, run_id=run_id, address=Address("10.6.6.6", 1 + n)) for n in range(count)]
        for _ in range(40):
            told = Gossip(tuple(rng.sample(names, count // 10)))
            for node in honest:
                node.perform(node.peer.receive(liar.id, told, swarm.now))
            swarm.run(0.5)
        swarm.run(20.0)
        return sum(len(node.mixes) for node in honest) - before, honest[0].peer.membership.owners()

    calm, owners = mixes(0)
    siege, same = mixes(300)
    assert siege >= 0.9 * calm
    assert same == owners


def test_a_stranger_accused_is_no_reason_to_ask_anybody():
    me = hearing(50)
    effects = me.receive(peer_id(1), Gossip((Hint(peer_id(3), 1, False, peer_id(1)),)), 1.0)
    assert me.state(peer_id(3)) is SUSPECT
    while me.deadline < 40.0:
        effects += me.tick(me.deadline)
    assert {send.to for send in sent(effects, Ping)} <= {peer_id(1)}
    assert me.state(peer_id(3)) is DEAD
