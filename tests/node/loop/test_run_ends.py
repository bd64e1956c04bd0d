"""The end of `node.epochs`: nodes settle there by themselves, and wait for each other within limits."""

import contextlib
import time
from types import SimpleNamespace

import pytest
from torch import nn

from gossip.errors import ConfigError
from node import Node
from node.loop.settling import Settling
from tests.node.loop.test_settling import bits, ending, events, training
from tests.node.ranks.rank_loops import no_errors, ranks
from tests.node.ranks.rank_threads import play
from tests.node.trainees import children, linear, state_of, towards


def further(nodes, samples=400):
    """Return a number of samples that none of the nodes has reached."""
    return max(node.node.swarm_samples for node in nodes) + samples * len(nodes)


PATIENT = 60.0, 60.0  # Timeouts for settling that a busy machine does not reach.


def epochs(trainee, total, delay_s=0.005, settle=PATIENT):
    """Return a loop that trains epochs up to a total, and returns its final weights."""

    def loop(node):
        for _ in node.epochs(1, total, settle=settle):
            for _ in range(10):
                loss = trainee.work()
                node.step(loss, samples=4)
                time.sleep(delay_s)
        return bits(trainee.model)

    return loop


@pytest.fixture
def swarm_of(train, until):
    return lambda count: training(train, until, count)


def test_a_program_that_also_settles_itself_loses_no_time_though_others_do_not(swarm_of):
    a, b = nodes = swarm_of(2)
    total = further(nodes)
    first = ending(a, lambda made: (epochs(a, total)(made), made.settle(60.0, wait_s=600.0)))
    weights = ending(b, epochs(b, total)).get(timeout=90)
    assert first.get(timeout=90) == (weights, 0.0), "it waited for a node that does not settle again"


@pytest.mark.parametrize("count", [2, 3])
def test_all_nodes_hold_the_same_weights_after_each_of_several_loops(count, swarm_of, until):
    nodes = swarm_of(count)
    totals = further(nodes), further(nodes, 800)
    answers = []
    for number, node in enumerate(nodes, 1):
        loops = [epochs(node, total, 0.002 * number) for total in totals]
        answers.append(ending(node, lambda made, loops=loops: tuple(loop(made) for loop in loops)))
    ((first, second),) = {answer.get(timeout=90) for answer in answers}
    assert first != second, "the second loop trains on"
    until(lambda: all(len(events(node, "settled")) == 2 for node in nodes))
    assert {event.distance for node in nodes for event in events(node, "settled")} == {0.0}


@pytest.fixture
def settled(monkeypatch):
    """Replace ``settle`` by a recorder, and return the list of its calls."""
    calls = []
    monkeypatch.setattr(Node, "settle", lambda node, *times: calls.append(times))
    return calls


@pytest.mark.parametrize(("way", "goes_on"), [("break", False), ("break", True), ("error", True), ("off", True)])
def test_a_loop_that_is_left_or_says_so_does_not_settle_and_is_told(way, goes_on, quick, settled, monkeypatch):
    monkeypatch.setattr(Node, "metrics", lambda node: SimpleNamespace(exchanges_done=1))
    with Node(nn.Linear(4, 2), config=quick) as node:
        with contextlib.suppress(KeyError):
            for _ in node.epochs(2, 8, None if way == "off" else (10.0, 60.0)):
                node.step(samples=4)
                if way == "break":
                    break
                if way == "error":
                    raise KeyError(way)
        assert settled == []
        assert not goes_on or list(node.epochs(1, 4)) == []
        assert settled == [(10.0, 60.0)] * goes_on, "nothing is left to train, and others may wait"
    told = [str(event) for event in node.history() if event.kind == "apart"]
    assert [sentence.startswith("This loop left node.epochs") for sentence in told] == [True][goes_on:]


def test_a_run_that_has_finished_is_not_settled(quick, settled):
    with Node(nn.Linear(4, 2), config=quick) as node:
        node.finish(0.0)
        assert list(node.epochs(2, 8)) == []
    assert settled == []


def test_a_node_that_never_comes_costs_no_more_than_the_limits(swarm_of, until):
    a, _ = nodes = swarm_of(2)
    ending(a, epochs(a, further(nodes, 100), settle=(0.2, 0.5))).get(timeout=60)
    until(lambda: events(a, "waited"))


def test_a_late_node_that_trains_nothing_has_the_weights_of_those_that_settled(swarm_of, quick, until):
    nodes = swarm_of(2)
    total = further(nodes)
    answers = [ending(node, epochs(node, total)) for node in nodes]
    weights = answers[0].get(timeout=90)
    assert answers[1].get(timeout=90) == weights
    late, steps = linear(9), 0
    with Node(late, seeds=[nodes[0].node.address], config=quick, wait_for=3) as node:
        for _ in node.epochs(1, total):
            steps += 1
        until(lambda: any(event.kind == "settled" for event in node.history()))
        [settled] = [event for event in node.history() if event.kind == "settled"]
        assert "all nodes have the same weights" in str(settled)
    assert bits(late) == weights
    assert not steps


@pytest.mark.parametrize("has_company", [True, False])
def test_a_later_node_of_a_program_trains_anew_what_an_earlier_one_has_completed(has_company, train, quick, tmp_path):
    """Cross-validation does so, where one node is still in the last fold."""
    seeds = [train(linear()).node.address] if has_company else []
    runs = []
    for seed in (1, 2):
        model = linear(seed)
        with Node(model, seeds=seeds, config=quick, state_dir=tmp_path) as node:
            for _ in node.epochs(1, node.swarm_samples + 200, settle=None):
                towards(model, seed)()
                node.step(samples=10)
            assert node.metrics().steps > 1
            node.finish(0.0)
            runs.append(node.state_dict()["run_id"])
    assert runs[0] != runs[1]


@pytest.mark.parametrize(("way", "is_new"), [("left", True), ("error", False), ("same model", False)])
def test_a_later_node_over_another_model_trains_anew_what_an_earlier_one_has_left(way, is_new, train, quick):
    """Folds and trials of plain loops end at other times on each machine."""
    first, runs, model = train(linear()), [], linear(1)
    for _ in range(2):
        with contextlib.suppress(KeyError), Node(model, seeds=[first.node.address], config=quick) as node:
            node.step(samples=10)
            runs.append(node.state_dict()["run_id"])
            if way == "error":
                raise KeyError(way)
        model = model if way == "same model" else linear(2)
    assert (runs[0] != runs[1]) == is_new
    assert any("Members still train the run" in str(event) for event in node.history()) == is_new


def test_two_models_of_one_program_in_one_run_are_told(train, quick):
    options = {"seeds": [train(linear()).node.address], "config": quick}
    with Node(linear(1), **options) as one, Node(linear(2), **options) as other:
        pass
    told = [[event for event in node.history() if "trains this run too" in str(event)] for node in (one, other)]
    assert list(map(len, told)) == [0, 1]


def test_limits_that_cannot_be_are_refused_before_the_run(quick):
    with Node(nn.Linear(4, 2), config=quick) as node:
        for limits in (True, 10, (10,), (1, -1), "ab", (1, 2, 3)):
            with pytest.raises(ConfigError, match=r"settle.* is .*seconds"):
                node.epochs(1, 8, settle=limits)


def test_a_loop_whose_nodes_agree_since_its_last_step_does_not_settle_again(quick, monkeypatch):
    settled, distances = [], [0.0, 0.0, 0.0, 0.0, 0.1, 0.0]
    monkeypatch.setattr(Settling, "settle", lambda self, *times: settled.append(times) or distances.pop(0))
    with Node(nn.Linear(4, 2), config=quick) as node:
        for _ in node.epochs(2, 8):
            node.step(samples=8)
            node.settle(20.0, wait_s=60.0)
        assert settled == 2 * [(20.0, 60.0)]
        for _ in node.epochs(3, 8):
            node.settle(20.0, wait_s=60.0)
            node.step(samples=8)
        assert settled == [*3 * [(20.0, 60.0)], (10.0, 60.0)]
        for _ in node.epochs(4, 8):
            node.step(samples=8)
            node.settle(1.0)
    assert settled[4:] == [(1.0, 0.0), (10.0, 60.0)]


def test_all_ranks_of_a_group_settle_at_the_end_of_their_loops(monkeypatch):
    monkeypatch.setattr("node.node.Channel", lambda group: group)
    settled = []
    monkeypatch.setattr(Settling, "settle", lambda self, *times: settled.append(times) or 0.0)

    def loop(node, rank):
        for _ in node.epochs(2, 64):
            node.step(samples=4)
        assert list(node.epochs(2, 64)) == []
        return node.swarm_samples

    no_errors(play(both := ranks(loop)[1]))
    assert both[0].result == both[1].result >= 128
    assert settled == [(10.0, 60.0)]


def test_a_program_is_told_of_weights_that_change_after_the_nodes_have_agreed(swarm_of, until):
    a, b = nodes = swarm_of(2)
    total = further(nodes)

    def change(node):
        weights = bits(a.model)
        a.model.bias.data += 1.0  # Torch does not count it.
        return weights

    answers = [ending(a, epochs(a, total), change), ending(b, epochs(b, total))]
    assert answers[0].get(timeout=90) == answers[1].get(timeout=90)
    for node in nodes:
        node.side.settling.tell_of_changes()
    until(lambda: events(a, "apart"))
    assert "call node.settle(10, wait_s=60) after it" in str(events(a, "apart")[0])
    assert not events(b, "apart")
    # `gossip local` compares these digests. The event of each node follows its notice, if it has one.
    until(lambda: len({e.digest for node in nodes for e in events(node, "settled")[-1:]}) == 2)


child = pytest.fixture(children)


def test_a_node_does_not_wait_for_one_that_dies_at_the_end(train, until, child):
    node = train(linear(1), None, lambda: None)
    process, partner = child(node.node.address)
    until(lambda: state_of(node.node, partner) == "alive")
    answer = ending(node, epochs(node, node.node.swarm_samples + 400, settle=(600.0, 600.0)))
    until(lambda: node.side.settling.settled_at is not None)
    process.kill()
    assert answer.get(timeout=120)
