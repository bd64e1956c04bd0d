"""The choices of each rule: exact ones with equal views, and what must never happen with different views."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.config.selections import SELECTIONS
from gossip.errors import ConfigError
from gossip.ids import Address, PeerId
from gossip.selection.graphs import Graph
from gossip.selection.nearest import Nearest
from gossip.selection.registry import selector
from gossip.selection.rule import Options
from gossip.selection.topologies import Grid, cell_mates, sides
from tests.theory.mixing_matrices import (
    complete,
    dumbbell,
    graph_of,
    metropolis,
    one_peer_exponential,
    ring,
    spectral_gap,
    torus,
)

PLACED = ("ring", "torus", "exponential", "grid")  # placed by rank; any member may be chosen when no neighbour is left


def ids(count):
    """Return this many sorted ids, so that an index is a rank."""
    return [PeerId(bytes([i >> 8, i & 255]) + bytes(14)) for i in range(count)]


class View:
    """One peer's view of a swarm, for a selector to choose in."""

    def __init__(self, me, alive, *, unfit=(), addresses=(), round=0):
        self.me, self.round, self.changes = me, round, 0
        self.living, self.unfit, self.addresses = list(alive), set(unfit), dict(addresses)

    def alive(self):
        return self.living

    def fits(self, peer):
        return peer != self.me and peer not in self.unfit

    def address(self, peer):
        return self.addresses.get(peer)


def made(name, n=0):
    return selector(name, Options(graph=graph_of(ring(n)))) if name == "graph" else selector(name)


def shuffled(peers, seed=1):
    return random.Random(seed).sample(peers, len(peers))


def neighbourhood(choose, n, **view):
    """Return (n, n): 1 where the row's member has the column's for a neighbour, all with one view."""
    peers = ids(n)
    rank = {peer: i for i, peer in enumerate(peers)}
    matrix = np.zeros((n, n))
    for peer in peers:
        matrix[rank[peer], [rank[other] for other in choose.neighbours(View(peer, shuffled(peers), **view))]] = 1
    return matrix


# -- equal views -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "graph"), [*(("ring", ring(n)) for n in (1, 2, 3, 7, 30)), *(("torus", torus(q, q)) for q in (1, 2, 3, 5))]
)
def test_ranks_form_the_ring_and_a_square_of_them_the_torus(name, graph):
    assert np.array_equal(neighbourhood(selector(name), len(graph)), graph)


@pytest.mark.parametrize(("n", "gap"), [(2, 0.3), (7, 0.3), (20, 0.2), (32, 0.16), (50, 0.1), (63, 0.11)])
def test_a_torus_with_a_short_last_row_is_symmetric_and_mixes_nearly_as_a_square(n, gap):
    graph = neighbourhood(selector("torus"), n)
    assert np.array_equal(graph, graph.T)
    assert 1 <= graph.sum(1).min() <= graph.sum(1).max() <= 4
    assert spectral_gap(np.eye(n) + (graph - np.diag(graph.sum(1))) / 5) > gap  # a ring of as many: 0.0066 at 32


@pytest.mark.parametrize("n", [2, 3, 8, 13])
@pytest.mark.parametrize("round", [0, 1, 2, 7])
def test_the_exponential_graph_leads_a_power_of_two_further_on(n, round):
    graph = neighbourhood(selector("exponential"), n, round=round)
    assert np.array_equal(graph, one_peer_exponential(n, round))
    assert (graph.sum(0) == 1).all()  # each member is chosen by one, so that push-sum's weights stay near 1


@pytest.mark.parametrize(("side", "dimensions"), [(2, 4), (4, 2), (3, 3), (16, 1)])
def test_moshpit_groups_of_m_reach_the_exact_mean_of_m_to_the_d_members_in_d_rounds(side, dimensions):
    n = side**dimensions
    peers, grid = ids(n), Grid(group_size=side)
    values = np.random.default_rng(1).integers(0, 1000, n) * float(n)  # sums and their quotients are exact
    mean = values.mean()
    for round in range(5, 5 + dimensions):
        groups = {tuple(grid.group(View(peer, shuffled(peers), round=round), side)) for peer in peers}
        assert sorted(peer for group in groups for peer in group) == peers  # each in one group, and all agree on it
        assert {len(group) for group in groups} == {side}
        for group in groups:
            places = [peers.index(peer) for peer in group]
            values[places] = values[places].mean()
    assert (values == mean).all()


@given(st.integers(1, 300), st.integers(2, 16), st.integers(0, 5))
def test_groups_of_any_number_of_members_divide_them_and_are_no_larger_than_asked(n, size, round):
    peers = ids(n)
    groups = {tuple(cell_mates(peers, rank, size, round)) for rank in range(n)}
    assert sorted(peer for group in groups for peer in group) == peers
    assert max(map(len, groups)) <= size
    shape = sides(n, size)
    assert math.prod(shape) >= n
    assert max(shape, default=0) - min(shape, default=0) <= 1


@given(st.integers(2, 300), st.integers(2, 16))
def test_no_two_members_are_parted_by_the_grid_whatever_their_number(n, size):
    peers = ids(n)
    rank = {peer: i for i, peer in enumerate(peers)}
    reached, edge = {0}, [0]
    while edge:
        here = edge.pop()
        for round in range(len(sides(n, size))):
            for peer in cell_mates(peers, here, size, round):
                if rank[peer] not in reached:
                    reached.add(rank[peer])
                    edge.append(rank[peer])
    assert len(reached) == n


def test_a_grid_that_is_not_full_mixes_though_its_last_layer_is_one_member():
    n, rng = 33, np.random.default_rng(1)  # in groups of 2: 6 dimensions, 64 cells
    values = rng.standard_normal((n, 50))
    before = values.var(0).sum()
    for round in range(60):
        mixed = values.copy()
        for rank in range(n):
            mixed[rank] = values[cell_mates(list(range(n)), rank, 2, round)].mean(0)
        values = mixed
    assert values.var(0).sum() < 0.5**60 * before


def test_a_group_as_large_as_the_swarm_is_everybody_ready():
    peers = ids(100)
    view = View(peers[3], shuffled(peers), unfit={peers[9]}, round=4)
    assert Grid().group(view, 100) == [peer for peer in peers if peer != peers[9]]
    assert Grid().group(View(peers[0], []), 16) == [peers[0]]


def test_a_graph_is_followed_and_nobody_else_is_mixed_with():
    graph = graph_of(dumbbell(10))
    assert np.array_equal(neighbourhood(selector("graph", Options(graph=graph)), 10), dumbbell(10))
    more = neighbourhood(selector("graph", Options(graph=graph)), 12)
    assert np.array_equal(more[:10, :10], dumbbell(10))
    assert not more[10:].any()
    peers = ids(10)
    busy = [peer for peer in peers[:5] if peer != peers[2]]
    assert selector("graph", Options(graph=graph)).choose(View(peers[2], peers), busy, random.Random(1)) is None


def test_a_graph_of_addresses_follows_them_and_not_ranks():
    peers = ids(3)
    addresses = {peer: Address("10.0.0.1", 7000 + i) for i, peer in enumerate(reversed(peers))}
    graph = selector(
        "graph", Options(graph=Graph.from_text("10.0.0.1:7000 10.0.0.1:7001\n10.0.0.1:7001 10.0.0.1:7002\n"))
    )
    assert graph.neighbours(View(peers[0], peers, addresses=addresses)) == [peers[1]]
    assert graph.neighbours(View(peers[1], peers, addresses=addresses)) == [peers[2], peers[0]]


def test_uniform_is_everybody_and_each_as_often_as_any():
    peers = ids(6)
    view, rng = View(peers[0], peers, unfit={peers[5]}), random.Random(1)
    everybody = selector("uniform")
    assert everybody.neighbours(view) == peers[1:5]
    draws = Counter(everybody.choose(view, {peers[1]}, rng) for _ in range(3000))
    assert draws.keys() == set(peers[2:5])
    assert max(draws.values()) < 1000 + 4 * math.sqrt(3000 * 2 / 9)


@pytest.mark.parametrize("name", ["ring", "torus", "grid", "graph"])
def test_every_neighbour_is_chosen_and_nobody_else(name):
    peers = ids(16)
    view, rng, rule = View(peers[5], shuffled(peers)), random.Random(1), made(name, 16)
    assert {rule.choose(view, (), rng) for _ in range(200)} == set(rule.neighbours(view))
    first, *rest = rule.neighbours(view)
    assert {rule.choose(view, {first}, rng) for _ in range(200)} == set(rest)


# -- members come and go -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [3, 5, 16, 31])
@pytest.mark.parametrize("name", ["ring", "torus"])
def test_a_graph_closes_over_whoever_cannot_be_mixed_with_now_and_stays_symmetric(name, n):
    peers = ids(n)
    out = set(random.Random(n).sample(peers, n // 3))
    here = [i for i, peer in enumerate(peers) if peer not in out]
    graph = neighbourhood(selector(name), n, unfit=out)[np.ix_(here, here)]
    assert graph.any(1).all()
    if name == "ring":
        assert np.array_equal(graph, ring(len(here)))
    else:
        assert np.array_equal(graph, graph.T)


PEERS = ids(24)


def drawn_view(data, me, changes):
    """Draw what one peer sees of a swarm in which every peer sees different members."""
    those = st.sets(st.sampled_from(PEERS))
    view = View(me, shuffled(sorted(data.draw(those))), unfit=data.draw(those), round=data.draw(st.integers(0, 100)))
    view.changes = changes
    view.addresses = {peer: Address("h", i) for i, peer in enumerate(PEERS) if i % 3}
    return view


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data(), st.sampled_from(sorted(SELECTIONS)), st.integers(0, 2**32))
def test_with_members_coming_and_going_nobody_chooses_itself_or_one_unfit_and_progress_goes_on(data, name, seed):
    rng, rule = random.Random(seed), made(name, 24)
    me = data.draw(st.sampled_from(PEERS))
    for changes in range(4):
        view = drawn_view(data, me, changes)
        possible = {peer for peer in view.living if view.fits(peer)}
        asked = data.draw(st.sets(st.sampled_from(PEERS), max_size=3))
        neighbours = rule.neighbours(view)
        assert set(neighbours) <= possible
        assert len(set(neighbours)) == len(neighbours)
        chosen = rule.choose(view, asked, rng)
        assert chosen is None or chosen in possible - asked
        if name in PLACED:
            assert bool(neighbours) == bool(possible)
        if name != "graph":
            assert (rule.choose(view, set(), rng) is None) == (not possible)
        if chosen is not None:
            rule.note_rate(chosen, rng.random())


@pytest.mark.parametrize("name", [*PLACED, "graph"])
def test_sorted_members_are_kept_until_a_change_and_not_after_it(name):
    peers = ids(9)
    rule, view = made(name, 9), View(peers[4], shuffled(peers))
    before = rule.neighbours(view)
    gone = before[0]
    view.living.remove(gone)
    view.living.append(PeerId(b"\xff" * 16))  # the same number of members: only the count of changes tells
    assert rule.ranking(view)[0] is rule.ranking(view)[0]
    assert gone in rule.ranking(view)[0]
    view.changes += 1
    assert gone not in rule.ranking(view)[0]
    assert gone not in rule.neighbours(view)


def test_one_instance_serves_all_peers_that_share_one_table():
    peers, rule = ids(30), selector("ring")
    table = shuffled(peers)
    orders = {id(rule.ranking(View(peer, table))[0]) for peer in peers}
    assert len(orders) == 1
    stranger = PeerId(b"\xff" * 16)
    assert rule.neighbours(View(stranger, table)) == [peers[0], peers[29]]  # not in the table, and yet with a rank


@pytest.mark.parametrize("name", PLACED)
def test_a_choice_among_ten_thousand_asks_about_few_of_them(name):
    class Counted(View):
        asked = 0

        def fits(self, peer):
            self.asked += 1
            return super().fits(peer)

    peers = ids(10_000)
    view, rng, rule = Counted(peers[5000], shuffled(peers)), random.Random(1), selector(name)
    for view.round in range(100):
        assert rule.choose(view, (), rng) is not None
    assert view.asked <= 400


# -- weights -----------------------------------------------------------------------------------------------------------
def test_a_graph_of_ids_has_metropolis_weights_the_same_on_both_sides_whatever_each_sees():
    peers = [PeerId(bytes([i]) * 16) for i in range(10)]
    matrix = dumbbell(10)
    text = "\n".join(f"{peers[a].hex()[:8]} {peers[b].hex()[:8]}" for a, b in np.argwhere(np.triu(matrix)))
    rule = selector("graph", Options(at_once=True, graph=Graph.from_text(text)))
    expected = metropolis(matrix)
    for a, b in np.argwhere(matrix):
        mine = rule.weight(View(peers[a], peers), peers[b])
        theirs = rule.weight(View(peers[b], [peers[a]]), peers[a])
        assert mine == theirs == expected[a, b]


@given(st.data(), st.sampled_from([name for name, rule in SELECTIONS.items() if rule.neighbours]))
def test_both_sides_of_a_pair_give_it_one_weight_though_they_see_different_members(data, name):
    graph = graph_of(dumbbell(20)) if name == "graph" else None
    a, b = data.draw(st.lists(st.sampled_from(PEERS), min_size=2, max_size=2, unique=True))
    one, other = (selector(name, Options(at_once=True, graph=graph)) for _ in range(2))
    assert one.weight(drawn_view(data, a, 0), b) == other.weight(drawn_view(data, b, 0), a)


@pytest.mark.parametrize("name", [name for name, rule in SELECTIONS.items() if rule.neighbours])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_weights_at_once_leave_every_node_a_share_of_itself(name, n):
    graph = graph_of(complete(n)) if name == "graph" else None
    rule = selector(name, Options(at_once=True, graph=graph))
    for peer in ids(n):
        view = View(peer, ids(n))
        neighbours = rule.neighbours(view)
        assert sum(rule.weight(view, other) for other in neighbours) < 1 - 1e-9
        assert {made(name, n).weight(view, other) for other in neighbours} == {0.5}, "of one at a time"


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("rings", {}, "selection = 'rings' is unknown: take one of uniform, ring"),
        ("graph", {}, "selection = 'graph' needs a graph"),
        ("ring", {"graph": graph_of(ring(3))}, "selection = 'ring' uses no graph"),
        ("grid", {"group_size": 1}, "group_size = 1 cannot work: a group has from 2 to 16"),
        ("grid", {"group_size": 17}, "group_size = 17 cannot work"),
        ("nearest", {"shortcut": 0.0}, "shortcut = 0 cannot work"),
        ("nearest", {"shortcut": 1.5}, "shortcut = 1.5 cannot work"),
    ],
)
def test_what_cannot_work_is_refused_naming_what_would(name, options, sentence):
    with pytest.raises(ConfigError) as error:
        selector(name, Options(**options))
    assert sentence in str(error.value)


def test_every_name_has_its_selector():
    assert {made(name, 4).name for name in SELECTIONS} == set(SELECTIONS)
    assert isinstance(selector("nearest", Options(shortcut=0.2)), Nearest)
