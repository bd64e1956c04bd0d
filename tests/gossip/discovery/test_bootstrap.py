"""Bootstrap: retries of seeds, the check whether others can dial a node, homes, and a random partner."""

import dataclasses
import math
import random

import pytest

from gossip.config import Config
from gossip.discovery.reachability import ASKED_MEMBERS, HOME_PING_S, PATIENCE_S, ROUND_S, UNANSWERED_S, Reachability
from gossip.discovery.seeds import Bootstrap, Seeds
from gossip.discovery.sightings import Sighting
from gossip.effects import Dial, LookUp, Send, TryDial
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.state_transfer.runs import BUSY_TIMEOUTS
from gossip.wire.messages import Ping, Reach, Reached
from gossip.wire.records import trusting, unsigned

CONFIG = Config()
HERE, THERE = Address("10.0.0.1", 1), Address("10.0.0.2", 2)
A, B, C, D, E = (PeerId(bytes([65 + i]) * 16) for i in range(5))
ME = MemberRecord(PeerId(b"m" * 16), b"", 1, address=HERE)
NOWHERE = dataclasses.replace(ME, address=None)


# -- seeds -----------------------------------------------------------------------------------------------------------
def retries(seeds, rng, expected, times):
    """Retry seeds without a link so often; return the pauses."""
    pauses = []
    for _ in range(times):
        now = seeds.deadline
        assert seeds.tick(now, False, (), rng) == expected
        pauses.append(seeds.deadline - now)
    return pauses


def test_all_seeds_are_dialled_at_once_and_an_invited_one_must_prove_its_id():
    seeds = Seeds((HERE, THERE), {THERE: B}, CONFIG, 5.0)
    assert seeds.deadline == 5.0
    assert seeds.tick(4.9, False, (), random.Random(1)) == []
    assert seeds.tick(5.0, False, (), random.Random(1)) == [Dial(HERE, None), Dial(THERE, B)]


@pytest.mark.parametrize(("given", "expected"), [((HERE,), [Dial(HERE)]), ((), [LookUp()])], ids=["given", "looked up"])
def test_retries_back_off_from_one_to_five_seconds_for_ever(given, expected):
    pauses = retries(Seeds(given, {}, CONFIG, 0.0, looks_up=not given), random.Random(1), expected, 20)
    for number, pause in enumerate(pauses):
        backoff = min(2.0**number, 5.0)  # docs/node.md states these pauses
        assert 0.75 * backoff <= pause <= 1.25 * backoff
    assert len(set(pauses)) == 20  # nodes that lost one seed together return at different times


def test_with_a_link_one_seed_is_tried_at_the_pace_of_healing_unless_it_is_there():
    seeds, rng = Seeds((HERE, THERE), {}, CONFIG, 0.0), random.Random(1)
    assert len(seeds.tick(0.0, True, (), rng)) == 1
    assert seeds.deadline == CONFIG.internal.heal_period_s
    assert seeds.tick(seeds.deadline, True, {HERE, THERE}, rng) == []
    assert seeds.deadline == 2 * CONFIG.internal.heal_period_s


@pytest.mark.parametrize(("given", "expected"), [((HERE,), [Dial(HERE)]), ((), [LookUp()])], ids=["given", "looked up"])
def test_with_the_last_link_gone_the_seeds_are_asked_soon_and_the_backoff_starts_anew(given, expected):
    seeds, rng = Seeds(given, {}, CONFIG, 0.0, looks_up=not given), random.Random(1)
    retries(seeds, rng, expected, 8)
    now = seeds.deadline
    assert seeds.tick(now, True, (), rng) == expected, "each of two halves may know only itself"
    assert seeds.deadline - now >= CONFIG.internal.heal_period_s
    seeds.on_last_link_lost(now + 1.0)
    assert seeds.deadline == now + 1.0 + CONFIG.internal.seed_backoff_s
    seeds.tick(seeds.deadline, False, (), rng)
    assert seeds.deadline <= now + 1.0 + CONFIG.internal.seed_backoff_s + 1.25 * CONFIG.internal.seed_backoff_s


def test_without_seeds_there_is_nothing_to_do():
    seeds = Seeds((), {}, CONFIG, 0.0)
    seeds.on_last_link_lost(1.0)
    assert seeds.deadline == float("inf")
    assert seeds.tick(1e9, False, (), random.Random(1)) == []


def test_what_was_found_is_dialled_while_it_is_looked_up_anew_and_what_is_gone_no_more():
    seeds, rng = Seeds((HERE,), {}, CONFIG, 0.0, looks_up=True), random.Random(1)
    assert seeds.tick(0.0, False, (), rng) == [Dial(HERE), LookUp()]
    seeds.on_busy(HERE)
    assert seeds.renew((HERE, THERE), {THERE: B}) == (THERE,)
    assert seeds.busy, "what is known of a seed that stays is kept"
    assert seeds.tick(seeds.deadline, False, (), rng) == [Dial(HERE), Dial(THERE, B), LookUp()]
    assert seeds.renew((THERE,), {}) == ()
    assert not seeds.busy, "one that is no seed any more holds nobody up"
    assert seeds.tick(seeds.deadline, False, (), rng) == [Dial(THERE), LookUp()]
    assert seeds.renew((), {}) == ()
    assert seeds.tick(seeds.deadline, True, (), rng) == [LookUp()]


def made(**bootstrap) -> Peer:
    me, rng = dataclasses.replace(ME, run_id=b"g" * 16), random.Random(1)
    members = Membership(me, sign=unsigned, verify=trusting, config=CONFIG, rng=rng, now=0.0)
    return Peer(members, CONFIG, LocalModel("f", 1000), rng=rng, bootstrap=Bootstrap(**bootstrap), now=0.0)


def begins_at(peer: Peer, busy_until: float = 0.0, is_own: bool = False) -> float:
    """Return the time at which a node begins a run alone.

    Its seed closes each connection up to ``busy_until``. If it ``is_own``, it then turns out to be the node itself.
    """
    effects, now = peer.start(0.0), 0.0
    while not peer.view.ready and now < 400.0:
        for effect in effects:
            if isinstance(effect, Dial) and now < busy_until:
                peer.on_seed_busy(effect.address)
                if is_own:
                    peer.on_own_seed(effect.address)
        now = max(now + 1e-3, peer.deadline)
        effects = peer.tick(now)
    return now


def test_who_has_found_no_seed_yet_begins_no_run_until_the_time_to_join_is_up():
    peer = made(looks_up=True)
    assert begins_at(peer) == pytest.approx(CONFIG.join_timeout_s, abs=1.1)
    assert LookUp() in peer.tick(peer.seeds.deadline), "and goes on looking"


def test_who_waits_for_others_begins_no_run_for_want_of_them_before():
    assert 55.0 <= begins_at(made(looks_up=True, wait_until=55.0)) <= 56.1


def test_new_seeds_are_dialled_at_once_by_who_is_alone_and_left_to_healing_by_who_is_not():
    peer = made(looks_up=True)
    peer.start(0.0)
    assert peer.on_seeds_found((HERE, THERE), {HERE: A}) == [Dial(HERE, A), Dial(THERE)]
    assert peer.on_seeds_found((HERE, THERE), {HERE: A}) == [], "they are under way"
    peer.on_linked(A, dataclasses.replace(ME, id=A, address=HERE), 1.0)
    assert peer.on_seeds_found((HERE, Address("10.0.0.3", 3)), {}) == []
    assert peer.seeds.seeds == (HERE, Address("10.0.0.3", 3))


def test_a_seed_that_is_this_node_itself_is_nobody_to_wait_for():
    peer = made(seeds=(THERE,))
    assert begins_at(peer, busy_until=math.inf, is_own=True) == pytest.approx(CONFIG.join_timeout_s, abs=1.1)


# -- being dialled ---------------------------------------------------------------------------------------------------
class Book:
    """A member list that holds our record and those of others."""

    def __init__(self, me=ME, others=()):
        self.me, self.others = me, {record.id: record for record in others}

    def record(self, peer):
        return self.others.get(peer)

    def update_me(self, now, **changes):
        self.me = dataclasses.replace(self.me, **changes)


def record_of(peer, address=THERE):
    return MemberRecord(peer, b"", 1, address=address)


def reachability(linked=(), me=ME, others=()):
    return Reachability(Book(me, others), dict.fromkeys(linked, -math.inf), {})


def asking(count=ASKED_MEMBERS):
    reach = reachability((A, B, C, D))
    for peer in (A, B, C, D)[:count]:
        assert reach.ask(peer, 0.0) == [Send(peer, Reach())]
        assert reach.ask(peer, 0.0) == [], "each once"
    return reach


def verdict_at(reach, now):
    """Tick at ``now`` and return the verdict, or None if this tick brings none."""
    was_decided = reach.is_decided
    reach.tick(now)
    return reach.verdict if reach.is_decided and not was_decided else None


def test_three_members_are_asked_by_one_that_has_an_address():
    assert asking().ask(D, 0.0) == []
    assert reachability((A,), NOWHERE).ask(A, 0.0) == []


@pytest.mark.parametrize("answers", [(True, False, True), (False, True, False)])
def test_two_of_three_decide_at_once_and_the_third_changes_nothing(answers):
    reach = asking()
    for now, (peer, answer) in enumerate(zip((A, B, C), answers, strict=True)):
        assert verdict_at(reach, now) is None
        reach.on_reached(peer, answer, now)
    assert verdict_at(reach, 2.0) is answers[2]
    assert verdict_at(reach, 3.0) is None  # reported once
    assert reach.ask(D, 0.0) == []


ROUTER = Address("203.0.113.7", 40_000)


def behind_a_router(*outside):
    """Return a node in a network of its own that A, B and C are linked with; those ``outside`` see its router."""
    reach = reachability((A, B, C))
    reach.sightings = {peer: Sighting(THERE, ROUTER if peer in outside else HERE) for peer in (A, B, C)}
    return reach


def test_behind_a_router_only_members_outside_are_asked_and_one_that_fails_decides():
    reach = behind_a_router(C)
    assert [len(reach.ask(peer, 0.0)) for peer in (A, B, C)] == [0, 0, 1]
    reach.on_reached(C, False, 5.0)
    assert verdict_at(reach, 5.0) is False


def test_a_lie_of_one_member_outside_neither_withdraws_the_address_nor_opens_a_port():
    reach = behind_a_router(A, B, C)
    for peer in (A, B, C):
        reach.ask(peer, 0.0)
    reach.on_reached(C, False, 0.1)
    assert verdict_at(reach, 0.1) is None
    for peer in (A, B):
        reach.on_reached(peer, True, 1.0)
    assert verdict_at(reach, 1.0) is True


def test_the_answers_of_members_in_the_same_network_do_not_count_once_one_outside_has_answered():
    reach = behind_a_router()
    assert [len(reach.ask(peer, 0.0)) for peer in (A, B)] == [1, 1]
    reach.sightings[C] = Sighting(THERE, ROUTER)
    reach.ask(C, 0.0)
    reach.on_reached(A, True, 1.0)
    reach.on_reached(C, False, 5.0)
    assert verdict_at(reach, 5.0) is False


def test_an_address_that_means_something_everywhere_has_no_network_of_its_own():
    reach = reachability((A,), dataclasses.replace(ME, address=Address("9.9.9.9", 1)))
    reach.sightings = {A: Sighting(THERE, ROUTER)}
    reach.ask(A, 0.0)
    reach.on_reached(A, False, 5.0)
    assert verdict_at(reach, 5.0) is None, "a member that lies does not decide alone"


def test_a_second_answer_of_one_member_does_not_count():
    reach = asking()
    reach.on_reached(A, False, 0.0)
    reach.on_reached(A, False, 0.1)
    assert verdict_at(reach, 0.2) is None


@pytest.mark.parametrize(("answers", "verdict"), [((False,), False), ((True,), True), ((False, True), True)])
def test_who_answers_decides_when_nobody_else_does_for_a_while_and_of_two_who_differ_the_one_who_could(
    answers, verdict
):
    reach = asking()
    for peer, answer in zip((A, B), answers, strict=False):
        reach.on_reached(peer, answer, 5.0)
    assert reach.deadline == 5.0 + PATIENCE_S
    assert verdict_at(reach, 5.0 + PATIENCE_S - 0.01) is None
    assert verdict_at(reach, 5.0 + PATIENCE_S) is verdict


def test_others_are_asked_soon_when_nobody_answers_the_first_questions():
    reach = asking(2)
    assert reach.deadline == UNANSWERED_S
    assert reach.tick(UNANSWERED_S - 1) == []
    assert {effect.to for effect in reach.tick(UNANSWERED_S)} == {C, D}
    late = 2 * UNANSWERED_S - 1
    reach.on_reached(C, False, late)
    reach.members.update_me(late, incarnation=2)
    reach.on_reached(D, False, late)
    assert reach.deadline == late + PATIENCE_S, "a round with an answer ends with a verdict"
    assert verdict_at(reach, late + PATIENCE_S) is False
    assert reach.deadline == late + PATIENCE_S + ROUND_S


def test_the_word_of_one_who_was_not_asked_counts_for_nothing():
    reach = asking(1)
    reach.on_reached(E, True, 0.0)
    reach.on_reached(E, False, 0.0)
    assert reach.answers == {}
    assert not reach.is_decided


def test_homes_are_three_linked_members_those_first_that_can_be_dialled():
    reach = reachability((), NOWHERE)

    def homes(linked, dialable, now):
        reach.linked_peers.clear()
        reach.linked_peers.update(dict.fromkeys(linked, now))
        reach.members.others = {peer: record_of(peer, THERE if peer in dialable else None) for peer in linked}
        reach.refresh_homes(now)
        return reach.members.me.homes

    assert homes([A, B], {B}, 0.0) == (B, A)
    assert homes([A, B, C, D, E], {A, B, C, D, E}, 1.0) == (B, A, C)
    assert homes([A, C, D, E], {D, E}, 2.0) == (D, E, A)
    assert homes([], set(), 3.0) == ()
    assert reach.deadline == float("inf")


def test_a_peer_that_others_can_dial_names_no_homes():
    reach = reachability((A,), ME, [record_of(A)])
    reach.refresh_homes(0.0)
    assert reach.members.me.homes == () == tuple(reach.homes)


def test_homes_are_pinged_however_often_links_come_and_go():
    reach = reachability((A, B), NOWHERE, [record_of(A), record_of(B)])
    pings = []
    for now in range(0, 61):
        reach.refresh_homes(float(now))
        pings += [(now, effect) for effect in reach.tick(float(now))]
    due = [HOME_PING_S, 2 * HOME_PING_S, 3 * HOME_PING_S]
    assert pings == [(at, Send(home, Ping(0, ()))) for at in due for home in (A, B)]


def test_only_the_address_of_the_askers_own_record_is_dialled():
    reach = reachability((A, B, C), ME, [record_of(A), record_of(B, None)])
    assert reach.answer(A, 0.0) == [TryDial(A, THERE)]
    assert [reach.answer(peer, 0.0) for peer in (B, C)] == [[Send(B, Reached(False))], [Send(C, Reached(False))]]
    assert reach.answer(D, 0.0) == [], "no link, no answer"


def test_a_busy_seed_is_tried_every_few_seconds_however_often_it_closes_our_connections():
    seeds, rng = Seeds((HERE, THERE), {}, CONFIG, 0.0), random.Random(1)
    assert not seeds.busy
    for _ in range(20):
        now = seeds.deadline
        seeds.tick(now, False, (), rng)
        seeds.on_busy(HERE)
        assert seeds.busy
        assert seeds.deadline - now <= 1.25 * 5.0
    for _ in range(2):  # one dial may be in progress; after two it is not busy any more
        assert seeds.busy
        seeds.tick(seeds.deadline, False, (), rng)
    assert not seeds.busy
    seeds.on_busy(Address("10.9.9.9", 9))  # an address that is no seed of this node
    assert not seeds.busy


def test_a_newcomer_waits_for_a_busy_seed_up_to_three_times_as_long_as_for_a_silent_one():
    silent, slow, always = (begins_at(made(seeds=(THERE,)), busy_until) for busy_until in (0.0, 30.0, math.inf))
    assert silent == pytest.approx(CONFIG.join_timeout_s, abs=1.1)
    assert CONFIG.join_timeout_s + 10.0 < slow < 50.0
    assert always == pytest.approx(BUSY_TIMEOUTS * CONFIG.join_timeout_s, abs=1.1)
