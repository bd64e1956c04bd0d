"""The partners that a peer may mix with at the moment, how many at once, and the weight of each pair."""

import itertools
import random

import pytest

from gossip.effects import Snapshot
from gossip.exchange import reservation
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import MAX_NEIGHBOURS, Event, Local
from gossip.ids import Address, MemberRecord, PeerId
from gossip.selection.graphs import Graph
from gossip.selection.partners import MAX_LAST_RESORTS, MAX_MIXED, WARY_FAILURES, WARY_S, Partners
from gossip.selection.registry import selector_of
from tests.harness.configs import tuned

RUN_ID = b"g" * 16


def ids(count):
    """Return this many sorted ids, so that an index is a rank."""
    return [PeerId(bytes([10 + i]) * 16) for i in range(count)]


class Table:
    """Members as one peer knows them, with records that can change."""

    def __init__(self, me, peers):
        self.me = record(me)
        self.records = {peer: record(peer) for peer in peers if peer != me}
        self.turnover = 0

    def contacted(self):
        return list(self.records)

    def record(self, peer):
        return self.records.get(peer)

    def ready_among(self, peers, run_id):
        known = [(peer, self.records[peer]) for peer in peers if peer in self.records]
        return [peer for peer, record in known if record.ready and record.run_id == run_id]


def record(peer, **changes):
    fields = {"address": Address("10.0.0.1", 1000 + peer[0]), "run_id": RUN_ID, "ready": True} | changes
    return MemberRecord(peer, b"", 1, **fields)


def partners(me, peers, linked=(), elements=1000, seed=0, **config):
    made = tuned(**config)
    local = Local("f", elements, 0, run_id=RUN_ID, ready=True, steps_per_mix=made.interval_steps)
    graph = Graph.from_file(config["graph"]) if "graph" in config else None
    rule = selector_of(made, graph)
    return Partners(me, Table(me, peers), local, made, random.Random(seed), set(linked).__contains__, rule)


# -- who fits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "linked", "fits"),
    [
        ({}, False, True),
        ({"ready": False}, True, False),
        ({"run_id": b"x" * 16}, True, False),
        ({"address": None}, False, False),
        ({"address": None}, True, True),
    ],
    ids=str,
)
def test_one_of_our_run_that_holds_its_weights_and_can_be_reached_fits(changes, linked, fits):
    a, b, unknown = ids(3)
    made = partners(a, [a, b], linked=[b] if linked else [])
    made.members.records[b] = record(b, **changes)
    assert made.fits(b) == fits
    assert made.choose(set(), 0.0) == (b if fits else None)
    assert made.is_in_run(b) == (fits or "address" in changes)
    assert not made.fits(a)
    assert not made.fits(unknown)


def test_where_all_sit_out_the_one_that_failed_longest_ago_is_tried_again_and_heard():
    a, b, c = ids(3)
    made = partners(a, [a, b, c], bench_s=30.0)
    made.note_failure(b, 0.0)
    made.note_failure(c, 0.5)
    assert made.choose(set(), 0.9) is None, "not at once"
    assert {made.choose(set(), 2.0) for _ in range(20)} == {b}
    assert not made.is_declined(c, 2.0), "nobody else is there to mix with"
    assert made.choose({b}, 2.0) is None, "b is there, and busy"
    made.note_failure(b, 2.0)
    assert {made.choose(set(), 4.0) for _ in range(20)} == {c}


def test_members_that_failed_and_are_gone_keep_no_place_of_those_to_try_again():
    a, b, *gone = ids(MAX_LAST_RESORTS + 2)
    made = partners(a, [a, b, *gone], bench_s=30.0)
    for peer in gone:
        made.note_failure(peer, 0.0)
        del made.members.records[peer]
    made.note_failure(b, 1.0)
    assert made.choose(set(), 2.0) == b


# -- whose offers are heard --------------------------------------------------------------------------------------------
def test_one_that_wasted_a_stream_is_not_heard_either_and_one_that_was_silent_is():
    a, b, c, _ = peers = ids(4)
    made = partners(a, peers, bench_s=30.0)
    made.note_failure(b, 0.0)
    made.note_failure(c, 0.0, silent=True)
    assert made.is_declined(b, 1.0)
    assert not made.is_declined(c, 1.0)
    assert not made.back_off.is_in_back_off(c, 1.0), "it has shown that it is there"


@pytest.mark.parametrize("clock", [False, True])
def test_one_that_mixed_with_us_less_than_half_an_interval_ago_waits(clock):
    a, b, c = ids(3)
    schedule = {"mix_every_steps": None, "mix_every_s": 8.0} if clock else {"mix_every_steps": 8}
    made = partners(a, [a, b, c], **schedule)
    made.note_mix(b, 100.0, True)
    assert made.is_declined(b, 100.0)
    assert not made.is_declined(c, 100.0)
    made.local.steps = 3
    assert made.is_declined(b, 103.0)
    made.local.steps = 4
    assert not made.is_declined(b, 104.0)


def test_one_with_whom_alone_there_is_anything_to_mix_never_waits():
    a, b, c = ids(3)
    made = partners(a, [a, b, c])
    made.note_mix(b, 0.0, True)
    made.members.records[c] = record(c, ready=False)
    assert not made.is_declined(b, 0.0)
    settling = partners(a, [a, b, c])
    settling.note_mix(b, 0.0, True)
    settling.local.settling = True
    assert not settling.is_declined(b, 0.0), "to agree on everything takes all the mixes there can be"


def test_members_that_settle_mix_in_pairs_and_in_other_pairs_each_time():
    """The exponential graph would give the same pair again and again, since versions stand still."""
    a, b, c, _ = peers = ids(4)
    at_once = partners(a, peers, selection="ring", partners=0)
    assert at_once.all_at_once
    at_once.local.settling = True
    assert not at_once.all_at_once
    assert at_once.count_own_mix() == 1
    assert at_once.max_weight(b, 1) == 0.5
    made = partners(a, peers, selection="exponential", mix_every_steps=4)
    made.local.settling, chosen = True, set()
    for _ in range(4):
        chosen.add(made.choose(set(), 0.0))
        made.count_own_mix()
    assert chosen == {b, c}


def test_the_memory_of_who_mixed_with_us_is_bounded():
    peers = ids(200)
    made = partners(peers[0], peers)
    for peer in peers[1:]:
        made.note_mix(peer, 0.0, True)
    assert len(made.last_mixes) == MAX_MIXED
    assert made.is_declined(peers[-1], 0.0)


# -- one partner, or several -------------------------------------------------------------------------------------------
def test_a_mix_has_the_partners_and_a_node_the_incoming_exchanges_that_are_configured():
    peers = ids(10)
    assert partners(peers[0], peers).count_own_mix() == 1
    assert partners(peers[0], peers, mixing="row-stochastic", partners=7).count_own_mix() == 7
    assert partners(peers[0], peers, incoming_exchanges=3).max_incoming() == 3


@pytest.mark.parametrize("by_steps", [True, False])
def test_each_round_leads_the_exponential_graph_one_place_on(by_steps):
    """A round is one step of the version, which counts the mixes behind the weights, about equal in the swarm.

    Where no steps are counted, it is one own mix.
    """
    peers = ids(8)
    schedule = {} if by_steps else {"mix_every_steps": None, "mix_every_s": 1.0}
    made = partners(peers[2], peers, selection="exponential", mixing="push-sum", **schedule)
    chosen = []
    for number in range(6):
        assert made.choose(set(), 0.0) == made.choose(set(), 0.0), "looking moves nothing"
        chosen.append(peers.index(made.choose(set(), 0.0)))
        if by_steps:
            made.local.version = number + 1.5
        else:
            made.count_own_mix()
    assert chosen == [3, 4, 6, 3, 4, 6]  # 2 + 1, 2 + 2, 2 + 4


# -- all neighbours at once --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("selection", "n", "edges"), [("ring", 7, 7), ("torus", 9, 18), ("ring", 2, 1)])
def test_with_everybody_at_once_each_edge_is_begun_by_one_of_its_ends(selection, n, edges):
    peers = ids(n)
    begun = set()
    total = 0
    for me in peers:
        made = partners(me, peers, selection=selection, partners=0)
        asked = set()
        wanted = made.count_own_mix()
        while (partner := made.choose(asked, 0.0)) is not None:
            asked.add(partner)
            begun.add(frozenset({me, partner}))
        assert len(asked) == wanted
        total += wanted
    assert total == len(begun) == edges


def test_with_everybody_at_once_the_only_neighbour_is_tried_again_although_it_sits_out():
    a, b = ids(2)
    made = partners(a, [a, b], selection="ring", partners=0, bench_s=30.0)
    exchanges = Exchanges(a, made.local, made.config, itertools.count(1).__next__, made, reservation)
    made.note_failure(b, 0.0)
    assert not exchanges.begin_mix(0.9)
    assert exchanges.begin_mix(2.0) == [Snapshot(1)]
    assert [effect.to for effect in exchanges.route_report(Event.SNAPSHOTTED, 1, 2.0)] == [b]


def test_with_everybody_at_once_a_node_takes_as_many_offers_as_it_has_neighbours():
    peers = ids(9)
    assert partners(peers[4], peers, selection="torus", partners=0).max_incoming() == 4
    assert partners(peers[4], peers, selection="ring", partners=0).max_incoming() == 2
    assert partners(peers[0], peers[:1], selection="ring", partners=0).max_incoming() == 1


def test_of_very_many_neighbours_a_mix_has_some_and_the_next_one_others(tmp_path):
    """A hub with a hundred neighbours would otherwise hold as many vectors at once."""
    path = tmp_path / "star.txt"
    path.write_text("\n".join(f"0 {leaf}" for leaf in range(1, 101)), encoding="utf-8")
    peers = ids(101)
    hub = partners(peers[0], peers, selection="graph", graph=str(path), partners=0)
    assert hub.count_own_mix() == hub.max_incoming() == MAX_NEIGHBOURS
    assert len({hub.choose(set(), 0.0) for _ in range(2000)}) == 100


@pytest.mark.parametrize(("selection", "weight"), [("ring", 1 / 3), ("torus", 1 / 5)])
def test_with_everybody_at_once_a_pair_weighs_by_metropolis_however_many_are_under_way(selection, weight):
    peers = ids(9)
    for me in peers:
        made = partners(me, peers, selection=selection, partners=0)
        for partner in made.selector.neighbours(made):
            for others in range(6):
                assert made.max_weight(partner, others) == pytest.approx(weight)


# -- weights -----------------------------------------------------------------------------------------------------------
def test_concurrent_pairs_share_a_node_and_pushes_do_not():
    a, b = ids(2)
    pairs, pushes = partners(a, [a, b]), partners(a, [a, b], mixing="push-sum")
    assert [pairs.max_weight(b, others) for others in range(5)] == [1 / 2, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert {pushes.max_weight(b, others) for others in range(5)} == {0.5}


# -- groups ------------------------------------------------------------------------------------------------------------
def test_a_group_is_drawn_from_those_who_fit_and_has_the_size_that_is_configured():
    peers = ids(12)
    made = partners(peers[0], peers, mixing="group", group_size=4)
    made.members.records[peers[5]] = record(peers[5], ready=False)
    seen = set()
    for _ in range(200):
        group = made.group(0.0)
        assert len(set(group) - {peers[0]}) == 3
        seen |= set(group)
    assert seen - {peers[0]} == set(peers[1:]) - {peers[5]}


def test_a_group_of_everybody_is_everybody_up_to_sixteen():
    few, many = ids(5), ids(40)
    assert set(partners(few[0], few, mixing="group", group_size=0).group(0.0)) - {few[0]} == set(few[1:])
    assert len(set(partners(many[0], many, mixing="group", group_size=0).group(0.0)) - {many[0]}) == 15


def test_an_address_is_that_of_the_record_and_our_own_is_known():
    a, b = ids(2)
    made = partners(a, [a, b])
    assert made.address(a) == Address("10.0.0.1", 1010)
    assert made.address(b) == Address("10.0.0.1", 1011)
    assert made.address(PeerId(b"z" * 16)) is None


# -- strangers ---------------------------------------------------------------------------------------------------------
def crowd():
    """Return a peer's partners, the two that it mixed with, and sixty that are new to it."""
    a, b, c, *strangers = [PeerId(bytes([1 + i]) * 16) for i in range(63)]
    made = partners(a, [a, b, c, *strangers])
    for peer in (b, c):
        made.note_mix(peer, 0.0, True)
    return made, b, c, strangers


def test_the_second_who_is_asked_for_a_mix_is_one_we_know():
    """A crowd that says BUSY to everything then costs one question instead of four."""
    made, b, c, strangers = crowd()
    firsts = {made.choose(set(), 9.0) for _ in range(200)}
    assert firsts & set(strangers)
    assert {made.choose({strangers[0]}, 9.0, is_retry=True) for _ in range(50)} == {b, c}
    assert made.choose({strangers[0], b, c}, 9.0, is_retry=True) in strangers[1:], "where no other is left"


def test_those_that_are_new_to_us_rest_once_exchanges_with_them_fail():
    made, b, c, strangers = crowd()
    for stranger in strangers[:WARY_FAILURES]:
        assert not made.is_unproven(strangers[-1])
        made.note_slow(stranger, 10.0)
    assert made.is_unproven(strangers[-1])
    assert not made.is_unproven(b)
    assert not made.is_unproven(made.me)
    assert {made.choose(set(), 10.0 + WARY_S - 0.1) for _ in range(50)} == {b, c}
    assert made.choose({b, c}, 10.0 + WARY_S - 0.1) is None, "they are busy, and that is no reason to ask a strange one"
    assert {made.choose(set(), 10.0 + WARY_S) for _ in range(200)} & set(strangers), "nobody is left out for good"
    assert {made.choose(set(), 10.0 + WARY_S, is_unproven_busy=True) for _ in range(50)} == {b, c}, "but one at a time"


def test_of_two_members_neither_is_unproven_to_the_other():
    a, b, c = ids(3)
    made = partners(a, [a, b])
    for _ in range(WARY_FAILURES):
        made.note_failure(b, 10.0)
    assert not made.is_unproven(b), "there is nobody to mix with instead"
    made.members.records[c] = record(c)
    assert made.is_unproven(b)


def test_exchanges_with_members_that_are_new_restore_trust_in_the_others():
    made, *_, strangers = crowd()
    for stranger in strangers[: WARY_FAILURES + 5]:
        made.note_failure(stranger, 10.0)
    for stranger in strangers[10:12]:
        made.note_mix(stranger, 20.0, True)
    assert not made.is_unproven(strangers[-1])


def test_one_that_we_know_and_that_fails_makes_nobody_strange():
    made, b, *_, strangers = crowd()
    for _ in range(5):
        made.note_failure(b, 10.0)
    assert not made.is_unproven(strangers[-1])


def test_who_knows_nobody_asks_strangers_all_the_same():
    made, *_, strangers = crowd()
    made.last_mixes.clear()
    for stranger in strangers[:5]:
        made.note_failure(stranger, 10.0)
    assert made.choose(set(), 10.1) is not None


def test_one_that_asks_and_asks_delays_nothing():
    """Otherwise every second mix of ours would be with this member alone."""
    made, b, c, _ = crowd()
    for turn in range(20):
        made.note_mix(b, float(turn), own=False)
        made.note_mix(c, float(turn), own=turn % 2 == 0)
    assert not made.counts_as_mix([b])
    assert made.counts_as_mix([c])
    assert made.counts_as_mix([b, c])
    for turn in range(5):
        made.note_mix(b, 20.0 + turn, own=True)
    assert made.counts_as_mix([b]), "as soon as it is asked as well"
