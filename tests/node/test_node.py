"""What a training loop holds: nodes in this process over loopback, and processes where signals matter."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gossip.averaging.boundary import Boundary
from gossip.config import Config
from gossip.errors import LocalError
from gossip.ids import parse_address
from node import Node, service
from node.model.snapshot import ModelState
from node.observe.members import members_of
from node.observe.status import query
from node.training import ALONE_S, TrainingSide

CHILD = """
import sys, time, torch
from torch import nn
from gossip.config import Config
from node import Metrics, Node
torch.set_num_threads(1)
model = nn.Linear(int(sys.argv[2]), 2)
seeds, state_dir = [s for s in sys.argv[1:2] if s], (sys.argv[3:] or [None])[0]
with Node(model, seeds=seeds, state_dir=state_dir, config=Config(mix_every_steps=2, progress_period_s=0.1)) as node:
    print(node.id, flush=True)
    for _ in range(20_000):
        node.step(samples=4)
        time.sleep(0.005)
"""


def linear(seed=0, width=4):
    torch.manual_seed(seed)
    return nn.Linear(width, 2)


def towards(model, target, rate=0.1):
    """A training step that pulls every parameter towards a number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def work():
        loss = sum(((p - target) ** 2).sum() for p in model.parameters()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return work


def spread(*models):
    """The largest difference of any parameter between two of them."""
    flat = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
    return max(float((a - b).abs().max()) for a in flat for b in flat)


def alive(trainee):
    return trainee.node.metrics().members_alive


def mixed(*trainees, times=5):
    """Counts from now, so that what was changed before has been mixed."""
    before = [t.node.metrics().exchanges_done for t in trainees]
    return lambda: all(t.node.metrics().exchanges_done >= b + times for t, b in zip(trainees, before, strict=True))


def state_of(node, peer):
    return next((member.state for member in node.members if member.id == peer), None)


@pytest.fixture
def child():
    """``child(seed, width, state_dir)`` starts a node in a process of its own; returns (process, id)."""
    started = []

    def start(seed, width=4, *state_dir):
        command = [sys.executable, "-c", CHILD, seed, str(width), *map(str, state_dir)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        process.stdout.close()


# Alone and together -------------------------------------------------------------------------------------------------


def test_a_node_alone_trains_on_and_says_that_it_is_alone(train, until, tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    model = linear()
    alone = train(model, work=towards(model, 1.0))
    until(lambda: alone.node.metrics().steps > 50)
    assert spread(model, alone_at(1.0)) < 0.1
    assert alone.node.metrics().members_alive == 1
    until(lambda: "alone" in [json.loads(line)["event"] for line in log.read_text().splitlines()])


def alone_at(value):
    model = linear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def test_members_are_listed_when_somebody_asks_and_else_never(train, until, monkeypatch):
    """It walks the whole table: four times a second of 10,000 members it took 6 % of a core."""
    listed = []
    monkeypatch.setattr(service, "members_of", lambda peer: (listed.append(peer.id), members_of(peer))[1])
    node = train(linear()).node
    looked = node._training.view
    until(lambda: node._training.view is not looked)
    assert not listed
    assert [member.id for member in node.members] == [node.id]
    assert listed


def test_a_node_alone_copies_its_model_for_no_mix_and_for_newcomers_once_a_second_at_most(train, until, monkeypatch):
    """Due, it took a spare copy of the whole model along every quarter of a second."""
    visits, kept, visit = [], [], Boundary.visit

    def watched(self, on_adopt, spare=False, keep=False, *more):
        visits.append(spare)
        if keep:
            kept.append(time.monotonic())
        return visit(self, on_adopt, spare, keep, *more)

    monkeypatch.setattr(Boundary, "visit", watched)
    first = train(linear())
    until(lambda: first.side.peer.lonely)
    visits.clear()
    until(lambda: len(visits) > 6)
    assert not any(visits)
    until(lambda: len(kept) > 3)
    assert all(later - before > 0.5 * ALONE_S for before, later in itertools.pairwise(kept))
    train(linear(1), seeds=[first.node.address])
    until(mixed(first))
    until(lambda: any(visits))


@pytest.mark.parametrize("part", ["mask 0.05", "fragments 4"])
def test_of_a_part_its_elements_alone_are_copied_and_added(train, until, monkeypatch, part):
    """A half percent of a model cost a copy and an addition of all of it at every step."""
    touched = []
    for name in ("begin_read", "add", "begin_read_at", "add_at"):
        method = getattr(ModelState, name)

        def noted(self, vector, *more, name=name, method=method):
            touched.append((name, vector.size))
            return method(self, vector, *more)

        monkeypatch.setattr(ModelState, name, noted)
    monkeypatch.setattr(TrainingSide, "keeps", lambda self: False)  # a copy for newcomers now and then is whole
    config = Config(part=part, mix_every_steps=1, progress_period_s=0.1, join_timeout_s=3.0)
    models = [nn.Linear(400, 50), nn.Linear(400, 50)]
    first = train(models[0], config=config)
    second = train(models[1], config=config, seeds=[first.node.address])
    until(mixed(first, second))  # the second has the first's weights, of which all were copied
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


def test_two_nodes_that_pull_apart_stay_together_and_settle_on_one_model(train, until):
    a, b = linear(1), linear(2)
    first = train(a, work=towards(a, 1.0, 0.01))
    second = train(b, work=towards(b, -1.0, 0.01), seeds=[first.node.address])
    until(lambda: alive(first) == alive(second) == 2)
    until(mixed(first, second, times=20))
    assert abs(float(a.weight.mean().detach())) < 0.9
    for trainee in (first, second):
        trainee.work = None
    until(mixed(first, second, times=20))
    distance = first.do(lambda node: node.settle(5.0))
    assert distance < 1e-3
    assert spread(a, b) < 1e-3


def test_a_newcomer_begins_with_exactly_the_weights_of_its_donor(train):
    a, b = linear(1), linear(2)
    first = train(a)
    second = train(b, seeds=[first.node.address])
    for name, value in a.state_dict().items():
        assert torch.equal(second.at_entry[name], value), name


def test_a_newcomer_takes_over_the_optimizer_state(train, until):
    a, b = linear(1), linear(2)
    adam_a, adam_b = torch.optim.Adam(a.parameters(), lr=0.01), torch.optim.Adam(b.parameters(), lr=0.01)
    for _ in range(7):
        a(torch.ones(1, 4)).sum().backward()
        adam_a.step()
    first = train(a, adam_a)
    train(b, adam_b, seeds=[first.node.address])
    for ours, theirs in zip(b.parameters(), a.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(adam_b.state[ours][key], adam_a.state[theirs][key]), key
    assert float(adam_b.state[b.weight]["step"]) == 7


def test_running_statistics_are_averaged_and_counts_are_nobodys_business(train, until):
    a, b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    first = train(a)
    second = train(b, seeds=[first.node.address])
    first.do(lambda node: (a.running_mean.fill_(1.0), a.num_batches_tracked.fill_(5)))
    second.do(lambda node: (b.running_mean.fill_(3.0), b.num_batches_tracked.fill_(9)))
    until(mixed(first, second))
    until(lambda: torch.allclose(a.running_mean, b.running_mean, atol=1e-5))
    assert torch.allclose(a.running_mean, torch.full((3,), 2.0), atol=1e-5)
    assert int(a.num_batches_tracked) == 5
    assert int(b.num_batches_tracked) == 9


def test_the_optimizers_state_stays_each_nodes_own(train, until, quick):
    models = [linear(1), linear(2)]
    adams = [torch.optim.Adam(model.parameters()) for model in models]
    for model, adam in zip(models, adams, strict=True):
        model(torch.ones(1, 4)).sum().backward()
        adam.step()
    first = train(models[0], adams[0], config=quick)
    second = train(models[1], adams[1], config=quick, seeds=[first.node.address])
    first.do(lambda node: adams[0].state[models[0].weight]["exp_avg"].fill_(1.0))
    second.do(lambda node: adams[1].state[models[1].weight]["exp_avg"].fill_(2.0))
    until(mixed(first, second, times=10))
    got = [float(adam.state[model.weight]["exp_avg"].mean()) for model, adam in zip(models, adams, strict=True)]
    assert got == [1.0, 2.0]


# How to mix ---------------------------------------------------------------------------------------------------------


def test_bf16_crosses_the_wire_at_half_the_bytes_and_both_sides_still_agree(train, until, quick):
    width = 4096
    models = [linear(1, width), linear(2, width)]
    config = replace(quick, codec="bf16", mix_every_steps=8)
    first = train(models[0], config=config)
    second = train(models[1], config=config, seeds=[first.node.address])
    second.do(lambda node: models[1].weight.data.add_(1.0))
    until(lambda: alive(first) == 2)
    before = first.node.metrics()
    until(mixed(first, second, times=20))
    after = first.node.metrics()
    sent = (after.bytes_sent - before.bytes_sent) / (after.exchanges_done - before.exchanges_done)
    assert sent < 0.7 * 4 * (2 * width + 2)
    assert spread(*models) < 0.02  # 2^-8 of values near 1


def test_outer_momentum_credits_progress_at_its_rate_and_brings_nodes_together(train, until, quick):
    config = replace(quick, outer_momentum=0.5, outer_rate=0.7)
    a, b = linear(1), linear(2)
    first = train(a, config=config)
    second = train(b, config=config, seeds=[first.node.address])
    base = float(a.weight.detach().mean())
    second.do(lambda node: b.weight.data.add_(2.0))  # the progress of one of two nodes: 1.0 in the mean
    until(mixed(first, second, times=30))
    until(lambda: spread(a, b) < 1e-2)
    # The outer step takes 0.7 of it, and momentum 0.5 adds up to twice that: 0.7 (1 + 0.5 + 0.25 ...) = 1.4.
    assert float(a.weight.detach().mean()) == pytest.approx(base + 1.4, abs=0.02)


def test_a_mapping_of_arrays_is_averaged_in_place(quick, train, until):
    a, b = {"x": np.zeros(5, np.float32)}, {"x": np.zeros(5, np.float32)}
    plain = replace(quick, outer_momentum=0.0)
    first = train(a, config=plain)
    second = train(b, config=plain, seeds=[first.node.address])
    first.do(lambda node: a["x"].fill(4.0))
    until(mixed(first, second))
    until(lambda: np.allclose(b["x"], 2.0))
    np.testing.assert_allclose(a["x"], 2.0)


# Data ---------------------------------------------------------------------------------------------------------------


def test_two_nodes_cover_a_dataset_without_overlap(train, until):
    first = train(linear())
    second = train(linear(), seeds=[first.node.address])
    until(lambda: len(first.side.view.owners) == len(second.side.view.owners) == 2)
    first.side.passes = second.side.passes = 100  # ahead of the swarm's count, so that both divide one pass
    parts = [t.do(lambda node: torch.cat(list(node.shard(torch.arange(400), 16))).tolist()) for t in (first, second)]
    assert sorted(parts[0] + parts[1]) == list(range(400))
    assert min(map(len, parts)) > 100


def test_samples_of_a_departed_node_still_count(train, until):
    """That the newcomer holds the run is known within a gossip period; until then a step counts for one member less."""
    first = train(linear())
    second = train(linear(), seeds=[first.node.address])
    began = time.monotonic()
    until(lambda: second.node.metrics().samples >= 200 and time.monotonic() - began > 4.0)
    seconds = time.monotonic() - began
    second.stop()
    trained = second.node.metrics().samples
    until(lambda: state_of(first.node, second.node.id) == "left")
    first.stop()
    both = first.node.metrics().samples + trained
    assert abs(first.node.swarm_samples - both) <= 0.75 * both / seconds
    assert abs(first.node.swarm_samples - both) < 0.6 * trained, "they are not lost"


# Life ---------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_resumes_into_a_swarm_of_another_size(train, until, tmp_path):
    a = linear(1)
    one = train(a, torch.optim.SGD(a.parameters(), lr=0.1), towards(a, 1.0))
    until(lambda: one.node.metrics().steps > 30)
    one.do(lambda node: node.save(tmp_path / "run"))
    one.stop()
    saved = {name: value.clone() for name, value in a.state_dict().items()}
    b, c, d = linear(2), linear(3), linear(4)
    first = train(b, torch.optim.SGD(b.parameters(), lr=0.1))
    meta = first.do(lambda node: node.load(tmp_path / "run"))
    assert meta["steps"] > 30
    for model in (c, d):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), seeds=[first.node.address])
    until(lambda: alive(first) == 3)
    assert first.node.swarm_samples >= meta["swarm_samples"]
    for model in (b, c, d):
        assert spread(model, a) < 0.05, saved


def test_a_checkpoint_does_not_push_a_living_swarm_back(train, until, tmp_path):
    a, b = linear(1), linear(2)
    first = train(a, work=towards(a, 1.0))
    first.do(lambda node: node.save(tmp_path / "early"))
    until(lambda: first.node.metrics().steps > 100)
    second = train(b, seeds=[first.node.address])
    second.do(lambda node: node.load(tmp_path / "early"))
    assert spread(b, alone_at(1.0)) < 0.1


def test_sigterm_leaves_and_the_others_know_at_once(train, until, child):
    first = train(linear())
    process, peer = child(first.node.address)
    until(lambda: state_of(first.node, peer) == "alive")
    began = time.monotonic()
    process.terminate()
    until(lambda: state_of(first.node, peer) == "left")
    assert process.wait(60) == 128 + signal.SIGTERM  # most of it is torch, which is unloaded after the node left
    print(f"ended in {time.monotonic() - began:.2f} s")


def test_steps_go_on_while_the_partner_is_stopped(train, until, child):
    width = 100_000
    first = train(linear(width=width))
    process, _ = child(first.node.address, width)
    until(mixed(first))
    process.send_signal(signal.SIGSTOP)
    began, slowest = time.monotonic(), 0.0
    steps = first.node.metrics().steps
    while time.monotonic() < began + 2.0:
        slowest = max(slowest, first.do(one_step))
    assert first.node.metrics().steps > steps
    assert slowest < 1.0  # whoever waits for a stopped partner waits for the 3 s of a stall at least


def one_step(node):
    start = time.perf_counter()
    node.step()
    return time.perf_counter() - start


def test_a_node_that_listens_nowhere_takes_part_by_dialling_out(train, until):
    first = train(linear())
    second = train(linear(), seeds=[first.node.address], listen="none")
    third = train(linear(), seeds=[first.node.address])
    assert second.node.address == "none"
    until(lambda: alive(first) == alive(second) == alive(third) == 3)
    until(mixed(second, times=10))


def test_a_restart_finds_its_swarm_again_without_any_seed(train, until, tmp_path):
    first = train(linear(1))
    second = train(linear(2), seeds=[first.node.address], state_dir=tmp_path)
    who = second.node.id
    until(lambda: second.node.metrics().samples > 100)
    second.stop()
    trained = second.node.metrics().samples
    until(lambda: state_of(first.node, who) == "left")
    again = train(linear(3), state_dir=tmp_path)
    assert again.node.id == who
    until(lambda: alive(first) == alive(again) == 2)
    assert again.node.swarm_samples >= trained
    until(mixed(first, again))


def test_a_node_killed_in_its_first_seconds_finds_its_swarm_again_without_any_seed(train, until, child, tmp_path):
    first = train(linear())
    process, peer = child(first.node.address, 4, tmp_path)
    until(lambda: b"127.0.0.1" in (tmp_path / "members.bin").read_bytes())
    process.kill()
    process.wait()
    until(lambda: state_of(first.node, peer) in ("suspect", "dead"))
    again, same = child("", 4, tmp_path)
    assert same == peer
    until(lambda: state_of(first.node, peer) == "alive" and alive(first) == 2)
    until(mixed(first))
    again.terminate()


def test_a_node_is_used_once(quick):
    node = Node(linear(), config=quick)
    with node:
        node.step()
    with pytest.raises(LocalError, match="used already"):
        node.__enter__()


# Looking ------------------------------------------------------------------------------------------------------------


def test_metrics_hold_what_they_promise(train, until):
    first = train(linear(), work=lambda: torch.tensor(0.5))
    second = train(linear(), seeds=[first.node.address])
    until(mixed(first, second, times=10))
    metrics = first.node.metrics()
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


def test_what_a_node_does_not_know_before_anything_happened_is_none(quick):
    with Node(linear(), config=quick) as node:
        metrics = node.metrics()
        assert metrics.exchange_seconds is None
        assert metrics.consensus_distance is None
        assert node.settle(0.05) is None


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
