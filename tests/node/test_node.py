"""Training loops with nodes over loopback in this process, alone and together."""

import itertools
import os
import time

import pytest
import torch
from torch import nn

from gossip.averaging.boundary import Boundary
from gossip.config import Config
from gossip.errors import LocalError
from gossip.ids import parse_address
from node.loop.training import LONE_COPY_S, TrainingSide
from node.model.snapshot import ModelState
from node.network import service
from node.observe.members import members_of
from node.observe.status import query
from tests.node.trainees import alive, linear, mixed


def test_members_are_listed_when_somebody_asks_and_else_never(train, until, monkeypatch):
    """A listing walks the whole table: with 10,000 members, four times a second, it took 6 % of a core."""
    listed = []
    monkeypatch.setattr(
        service, "members_of", lambda peer, path_of: (listed.append(peer.id), members_of(peer, path_of))[1]
    )
    node = train(linear()).node
    looked = node._training.view
    until(lambda: node._training.view is not looked)
    assert not listed
    assert [member.id for member in node.members] == [node.id]
    assert listed


def test_a_node_alone_copies_its_model_for_no_mix_and_for_newcomers_once_a_second_at_most(train, until, monkeypatch):
    """Once, a mix that was due made each visit copy the whole model, every quarter of a second."""
    visits, kept, visit = [], [], Boundary.visit

    def watched(self, on_adopt, spare=False, keep=False, *more):
        visits.append(spare)
        if keep:
            kept.append(time.monotonic())
        return visit(self, on_adopt, spare, keep, *more)

    monkeypatch.setattr(Boundary, "visit", watched)
    first = train(linear())
    until(lambda: first.side.network.peer.initiator.is_lonely)
    visits.clear()
    until(lambda: len(visits) > 6)
    assert not any(visits)
    until(lambda: len(kept) > 3)
    assert all(later - before > 0.5 * LONE_COPY_S for before, later in itertools.pairwise(kept))
    train(linear(1), seeds=[first.node.address])
    until(mixed(first))
    until(lambda: any(visits))


@pytest.mark.parametrize("part", ["mask 0.05", "fragments 4"])
def test_of_a_part_its_elements_alone_are_copied_and_added(train, until, monkeypatch, part):
    """Once, mixing half a percent of a model copied and added all of it at every step."""
    touched = []
    for name in ("begin_read", "add", "begin_read_at", "add_at"):
        method = getattr(ModelState, name)

        def noted(self, vector, *more, name=name, method=method):
            touched.append((name, vector.size))
            return method(self, vector, *more)

        monkeypatch.setattr(ModelState, name, noted)
    monkeypatch.setattr(TrainingSide, "is_copy_due", lambda self: False)  # Copies for newcomers are whole.
    config = Config(part=part, mix_every_steps=1, join_timeout_s=3.0)
    models = [nn.Linear(400, 50), nn.Linear(400, 50)]
    first = train(models[0], config=config)
    second = train(models[1], config=config, seeds=[first.node.address])
    until(mixed(first, second))  # The second has the first's weights, all of which were copied.
    touched.clear()
    until(mixed(first, second, times=20))
    seen = list(touched)
    assert {name for name, _ in seen} == {"begin_read_at", "add_at"}
    assert max(size for _, size in seen) < 50 * 401 / 3


def test_the_members_at_the_end_can_be_asked_for_afterwards(train):
    trainee = train(linear())
    trainee.stop()
    began = time.monotonic()
    for _ in range(20):
        assert [member.id for member in trainee.node.members] == [trainee.node.id]
    assert time.monotonic() - began < 10.0, "nobody waits for a thread that has ended"


def test_metrics_hold_what_they_promise(train, until):
    first = train(linear(), work=lambda: torch.tensor(0.5))
    second = train(linear(), seeds=[first.node.address])
    until(mixed(first, second, times=10))
    metrics = first.do(lambda node: node.metrics())  # A step adds to both.
    assert metrics.samples == 4 * metrics.steps
    assert metrics.bytes_sent > 40 * metrics.exchanges_done  # ten parameters of 4 bytes in each
    assert metrics.bytes_received > 40 * metrics.exchanges_done
    assert metrics.exchange_seconds > 0
    assert metrics.step_overhead_seconds > 0
    assert metrics.members_alive == 2
    assert metrics.consensus_distance >= 0
    until(lambda: {m.loss for m in second.node.members} == {0.5, None})
    assert {m.id for m in second.node.members} == {first.node.id, second.node.id}
    assert {m.address for m in second.node.members} == {first.node.address, second.node.address}


def test_status_answers_an_observer_who_joins_nothing(train, until):
    first = train(linear())
    second = train(linear(), seeds=[first.node.address])
    until(lambda: alive(first) == alive(second) == 2)
    answer = query(parse_address(first.node.address))
    assert answer["id"] == first.node.id
    assert answer["address"] == first.node.address
    assert [(m["id"], m["state"]) for m in answer["members"]] == [(second.node.id, "alive")]
    assert answer["metrics"]["members_alive"] == 2
    assert alive(first) == 2


def test_status_counts_steps_and_samples_of_the_same_life(train, until, tmp_path):
    """A node that another one has seen before goes on counting steps in its record, for those who follow it."""
    witness = train(linear())
    for life in range(2):
        one = train(linear(1), state_dir=tmp_path, seeds=[witness.node.address])
        until(lambda one=one: alive(one) == 2 and one.node.metrics().steps > 20)
        said = query(parse_address(one.node.address))["metrics"]
        assert said["steps"] <= one.node.metrics().steps, f"in life {life}"
        one.stop()


def test_a_swarm_with_a_secret_mixes_and_answers_only_those_who_hold_it(train, until, secret):
    a, b = linear(1), linear(2)
    first = train(a, secret=secret)
    second = train(b, secret=secret, seeds=[first.node.address])
    until(mixed(first, second))
    key = first.side.settings.secret
    where = parse_address(first.node.address)
    assert query(where, key)["id"] == first.node.id
    for wrong in (None, os.urandom(32)):
        with pytest.raises(LocalError):
            query(where, wrong, timeout_s=3.0)
