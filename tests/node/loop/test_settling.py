"""Settling as a meeting point: a node waits for the others, but not for one that has left."""

import hashlib
import json
import queue
import threading
import time

import numpy as np
import pytest
import torch

from gossip import Config
from gossip.effects import MemberState
from node.loop.settling import Standing, apart_sentence
from node.observe.reduced import AGREED, SETTLING, mark_in
from tests.harness.configs import tuned
from tests.harness.marks import slow
from tests.node.trainees import filled, linear, mixed, towards


def ending(trainee, *parts):
    """Let the node's loop run these functions in order. Return the queue for the result of the last one.

    Then the loop stands, as it does at a run's end to evaluate and save, until ``trainee.leave`` is set.
    """
    answer = queue.SimpleQueue()
    trainee.leave = threading.Event()

    def run(node):
        *_, result = [part(node) for part in parts]
        answer.put(result)
        trainee.leave.wait(60)

    trainee.tasks.put((run, queue.SimpleQueue()))
    return answer


def settling(trainee, seconds=20.0, wait_s=60.0):
    """Let the node's loop settle. Return the queue of the answer."""
    return ending(trainee, lambda node: node.settle(seconds, wait_s=wait_s))


def sharing(trainee):
    """Return the records of the other members that hold its run."""
    peer = trainee.side.network.peer
    return peer.membership.run_members(peer.view.run_id)


def marks_at(trainee, name):
    """Return these marks of the other members that hold its run: of nobody while it suspects them."""
    return [mark_in(record, name) for record in sharing(trainee)]


def agreed(until, trainee, check=bool):
    """Wait for the other member's record with a mark of agreement that passes a check, and return the record."""
    told, found = lambda record: (mark := mark_in(record, AGREED)) and check(mark), []
    until(lambda: found.extend(filter(told, sharing(trainee))) or found)
    return found[0]


def bits(model):
    """Return all parameters of a model, as bytes."""
    return b"".join(value.detach().view(-1).view(torch.uint8).numpy().tobytes() for value in model.parameters())


def apart(model, generator):
    """Move the weights like local training, and make one of them subnormal."""
    with torch.no_grad():
        for value in model.parameters():
            value += 0.05 * torch.randn(value.shape, generator=generator).to(value.dtype)
        model.weight[0, 0] = 1e-39


def joined(train, until, count, dtype=torch.float32, **options):
    """Start nodes of one run, move their weights apart, and return them. They do not train."""
    models = [linear(number).to(dtype) for number in range(count)]
    first = train(models[0], **options)
    nodes = [first, *(train(model, seeds=[first.node.address], **options) for model in models[1:])]
    until(lambda: all(len(sharing(node)) == count - 1 for node in nodes))
    generator = torch.Generator().manual_seed(1)
    for node in nodes:
        node.do(lambda _, model=node.model: apart(model, generator))
    return nodes


def settle_all(nodes, seconds=30.0, before=lambda node: None):
    """Let all nodes settle. Return their results, and the number of different models afterwards."""
    parts = [(lambda _, node=node: before(node), lambda made: made.settle(seconds, wait_s=60.0)) for node in nodes]
    answers = [ending(node, *part) for node, part in zip(nodes, parts, strict=True)]
    distances = [answer.get(timeout=90) for answer in answers]
    different = len({bits(node.model) for node in nodes})
    for node in nodes:
        node.leave.set()
    return distances, different


METHODS = {
    "default": Config(), "int8": Config(codec="int8"), "modulo": Config(codec="moniqua4", part="fragments 4"),
    "mask": Config(part="mask 0.1"), "group": Config(mixing="group"),
    "trimmed": Config(mixing="group", filter="trimmed"), "push-sum": Config(mixing="push-sum"),
    "row-stochastic": Config(mixing="row-stochastic", partners=2), "none": Config(filter="none"),
    "balance": Config(filter="balance"), "outer": Config(outer_momentum=0.3, outer_rate=0.9),
    "ring": Config(selection="ring", partners=0), "exponential": Config(selection="exponential"),
    "lockstep": Config(mix_every_steps=4, max_version_gap=1), "clock": Config(mix_every_s=0.2),
}  # fmt: skip


@pytest.mark.parametrize("config", METHODS.values(), ids=METHODS)
def test_whatever_nodes_mix_otherwise_they_settle_on_the_same_bits(config, train, until):
    nodes = joined(train, until, 4, config=config)
    assert settle_all(nodes) == ([0.0] * 4, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [3, slow(8)])
def test_weights_of_every_type_are_the_same_to_the_bit(count, dtype, train, until):
    nodes = joined(train, until, count, dtype)
    assert settle_all(nodes) == ([0.0] * count, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_that_round_to_zero_get_one_sign(dtype, train, until):
    """In float32, -1e-50 is the negative zero and 1e-50 the positive one."""
    nodes = joined(train, until, 3, dtype)
    values = dict(zip(nodes, [1e-50, -1e-50, -0.0], strict=True))

    def set_smallest(node):
        value = values[node]
        with torch.no_grad():
            node.model.weight[0] = torch.tensor([value, -value, -0.0, 0.0], dtype=dtype)

    assert settle_all(nodes, before=set_smallest) == ([0.0] * 3, 1)


def test_the_end_of_settling_is_told_with_a_digest_of_the_weights(train, until, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log.jsonl"))
    nodes = joined(train, until, 2)
    settle_all(nodes)
    until(lambda: all(events(node, "settled") for node in nodes))
    vector = np.concatenate([value.detach().numpy().ravel() for value in nodes[0].model.parameters()])
    digest = hashlib.blake2b(vector.astype("<f4").tobytes(), digest_size=8).hexdigest()
    for node in nodes:
        [event] = events(node, "settled")
        assert (event.distance, event.tensor, event.digest) == (0.0, "", digest)

    def told():
        rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        return [(row["distance"], row["tensor"], row["digest"]) for row in rows if row.get("event") == "settled"]

    until(lambda: len(told()) == 2)  # A node writes its log after its program has the event.
    assert told() == [(0.0, "", digest)] * 2
    assert not [record for record in caplog.records if getattr(record, "kind", "") == "apart"]


def events(node, kind):
    return [event for event in node.node.history() if event.kind == kind]


def test_a_node_that_cannot_agree_says_which_tensor_differs_and_returns_the_distance_that_it_names(
    train, until, monkeypatch
):
    """Its partner changes one tensor before each of its own boundaries."""
    a, b = nodes = joined(train, until, 2)
    visit = b.side.loop.visit

    def spoil(*arguments):  # A step visits the boundary, too.
        with torch.no_grad():
            b.model.bias += 1.0
        visit(*arguments)

    b.do(lambda _: monkeypatch.setattr(b.side.loop, "visit", spoil))
    distances, _ = settle_all(nodes, 3.0)
    monkeypatch.undo()
    assert min(distances) > 0.0
    until(lambda: events(a, "apart") and events(a, "settled"))
    [event], [warning] = events(a, "settled"), events(a, "apart")
    assert event.tensor == "bias"
    assert event.distance == distances[0]
    assert f"tensor 'bias', by {distances[0]:.2g} of its norm" in str(warning)
    assert "1 member has not told of the same weights" in str(warning)
    assert str(warning).endswith("Give settle more than 3 s: it ends as soon as all agree.")


def test_the_last_node_that_hears_that_all_agree_does_not_wait_for_those_that_train_on(train, until):
    nodes = joined(train, until, 3)
    answers = [settling(node, 60.0) for node in nodes]
    for node in nodes:
        node.leave.set()  # Each steps at once, and its record no longer says that it settles.
    began = time.monotonic()
    assert [answer.get(timeout=50) for answer in answers] == [0.0] * 3
    assert time.monotonic() - began < 50.0


def training(train, until, count):
    """Start nodes that train towards different weights, and return them once they have mixed."""
    models = [linear(number) for number in range(count)]
    first = train(models[0], None, towards(models[0], 0.0))
    seeds = [first.node.address]
    nodes = [first, *(train(model, None, towards(model, n), seeds=seeds) for n, model in enumerate(models[1:], 1))]
    until(lambda: all(len(sharing(node)) == count - 1 for node in nodes))
    until(mixed(*nodes))
    return nodes


@pytest.mark.parametrize("before", [lambda _: None, lambda made: made.finish(0.0)], ids=["break", "finish"])
def test_weights_that_a_program_loads_before_it_settles_are_those_on_which_all_end(before, train, until):
    """The loops stop one after another, and each loads the same best weights after its last step."""
    nodes = training(train, until, 3)
    best = linear(7).state_dict()
    answers = []
    for node in nodes:
        load = lambda _, model=node.model: model.load_state_dict(best)  # noqa: E731
        answers.append(ending(node, before, load, lambda made: made.settle(20.0, wait_s=60.0)))
        if node is not nodes[-1]:
            until(mixed(nodes[-1], times=1) if node is nodes[0] else lambda: any(marks_at(nodes[-1], SETTLING)))
            time.sleep(0.5)
    assert [answer.get(timeout=90) for answer in answers] == [0.0] * 3
    assert all(torch.equal(node.model.state_dict()[name], best[name]) for node in nodes for name in best)


def test_an_exchange_that_ends_after_the_last_step_does_not_move_the_weights_that_are_loaded(train, until):
    a, b = training(train, until, 2)
    best = filled(linear(), 3.0).state_dict()

    def wait_for_update(made):
        while not a.side.live.boundary.pending_updates:
            made.step(samples=4)
            time.sleep(0.05)

    stopped = ending(a, wait_for_update, lambda _: a.model.load_state_dict(best), lambda made: made.settle(5.0, 60.0))
    until(lambda: a.side.settling.settled_at is not None)
    second = ending(b, lambda _: b.model.load_state_dict(best), lambda made: made.settle(5.0, 60.0))
    assert (stopped.get(timeout=90), second.get(timeout=90)) == (0.0, 0.0)
    assert all(torch.equal(value, best[name]) for node in (a, b) for name, value in node.model.state_dict().items())


def test_who_settles_again_on_other_weights_waits_for_the_others_each_time(train, until):
    a, b = training(train, until, 2)

    def settle(made):
        return made.settle(20.0, wait_s=60.0)

    def fill(node, value):
        return lambda _: filled(node.model, value)

    resume, has_begun = threading.Event(), threading.Event()
    last = [lambda _: has_begun.set(), fill(a, 1.0), settle]
    first = ending(a, settle, settle, fill(a, 1.0), settle, *last)
    second = ending(b, settle, settle, fill(b, 3.0), settle, lambda _: resume.wait(60), fill(b, 3.0), settle)
    assert has_begun.wait(60)
    time.sleep(0.5)
    assert first.empty()
    resume.set()
    assert (first.get(timeout=60), second.get(timeout=60)) == (0.0, 0.0)
    assert bits(a.model) == bits(b.model) == bits(filled(linear(), 2.0))
    assert a.side.settling.meeting == b.side.settling.meeting
    assert a.side.settling.meeting[0] == 2.0


def test_weights_that_have_settled_stay_until_the_next_step_while_another_node_trains(train, until):
    a, b = training(train, until, 2)
    answers = [settling(node) for node in (a, b)]
    assert [answer.get(timeout=60) for answer in answers] == [0.0, 0.0]
    settled = bits(a.model)
    b.leave.set()
    until(lambda: b.side.settling.settled_at is None)  # It trains on, and looks for a partner.
    until(lambda: marks_at(a, SETTLING) == [None])  # It has taken its word back.
    finished = queue.SimpleQueue()
    a.tasks.put((lambda made: (made.finish(1.0), bits(a.model)), finished))
    a.leave.set()
    assert finished.get(timeout=30)[1] == settled


def test_whoever_waits_to_settle_waits_for_nobody_that_leaves(train, until):
    first, second = joined(train, until, 2)
    early = settling(first, 0.2)
    until(lambda: first.side.settling.settled_at is not None)
    second.stop()
    assert isinstance(early.get(timeout=30), float | None)


def test_whoever_never_comes_to_settle_costs_the_time_that_was_given_and_is_told(train, until, caplog):
    first, _ = joined(train, until, 2)
    began = time.monotonic()
    early = settling(first, 0.1, wait_s=0.7)
    first.leave.set()
    early.get(timeout=30)
    assert time.monotonic() - began >= 0.7
    until(lambda: [record for record in caplog.records if getattr(record, "kind", "") == "waited"])
    assert "Waited 0.7 s to settle with 1 member that has not come" in caplog.text


def test_nodes_that_begin_together_show_what_they_trained_once_they_have_settled(launch, until, tmp_path):
    file = tmp_path / "seeds"
    first = launch(linear(1), wait_for=3, wait_s=60.0)
    file.write_text(first.made.address)
    nodes = [first, *(launch(linear(n), seeds=[f"@{file}"], wait_for=3, wait_s=60.0) for n in (2, 3))]
    assert all(node.running.wait(30) for node in nodes)
    until(lambda: all(node.side.swarm_samples > 3_000 for node in nodes))  # A step of all three counts 12.
    answers = [settling(node, 4.0) for node in nodes]
    for answer in answers:
        answer.get(timeout=60)
    trained = sum(node.side.run.samples for node in nodes)
    until(lambda: all(abs(node.side.swarm_samples / trained - 1) < 0.01 for node in nodes))


def test_what_members_told_in_an_earlier_settlement_is_no_disagreement_once_they_are_gone(train, until, monkeypatch):
    """Early stopping makes all settle in each epoch. One node dies, and the others end with the same weights."""
    nodes = joined(train, until, 2)
    assert settle_all(nodes) == ([0.0] * 2, 1)
    b = nodes[1]
    of_the_last = agreed(until, b)
    generator = torch.Generator().manual_seed(2)
    for node in nodes:
        node.do(lambda made, model=node.model: (apart(model, generator), made.step(samples=4)))
        until(lambda node=node: node.side.settling.settled_at is None)
    side = b.side.settling
    meeting = side.meeting
    answers = [settling(node) for node in nodes]  # Their loops stand until the end, since a step would move weights.
    assert [answer.get(timeout=90) for answer in answers] == [0.0] * 2
    own = side.read_digest()
    told = agreed(until, b, lambda mark: mark[1] == int.from_bytes(own[:6]))
    assert mark_in(of_the_last, AGREED) != mark_in(told, AGREED)
    monkeypatch.setattr(side, "meeting", meeting)

    def digest_with(left, dead):
        gone = {MemberState.LEFT: left, MemberState.DEAD: dead}
        monkeypatch.setattr(side, "members", lambda states: [one for state in states for one in gone[state]])
        return side.digest_of_gone()

    assert digest_with([told], [of_the_last]) == digest_with([told, of_the_last], []) == own
    assert digest_with([], [told]) == own
    assert digest_with([], []) is None
    monkeypatch.setattr(side, "read_digest", lambda: bytes(8))
    assert digest_with([told], []) is None


def test_the_sentence_of_a_settlement_says_why_it_ended():
    for standing, words in [
        (Standing(are_gone=True), "the others are gone and have not told"), (Standing(missing=2), "2 members have not"),
        (Standing(), "no other member settles"),
    ]:  # fmt: skip
        assert f"without agreement: {words}" in apart_sentence(standing, None, "", 1.0)


def test_a_node_without_other_members_settles_at_once(train):
    alone = train(linear(1))
    began = time.monotonic()
    assert alone.do(lambda node: node.settle(20.0, wait_s=20.0)) is None
    assert time.monotonic() - began < 10.0


def test_what_a_program_changes_after_settling_is_no_movement_of_training(train):
    node = train(linear(), config=tuned(outer_momentum=0.5, outer_rate=0.7))

    def prune(made):
        made.settle(1.0)
        filled(node.model, 9.0)
        while node.side.settling.settled_at is not None:  # Until it mixes again.
            made.step(samples=1)
        return node.side.live.outer._phi.copy()

    assert set(node.do(prune)) == {9.0}
