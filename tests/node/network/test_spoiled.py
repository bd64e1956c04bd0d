"""Weights that are no longer finite: noticed, reported once, given to no node, and replaced by the swarm's."""

import math
import time

import torch

from tests.node.trainees import linear, sentences_in, step_of

QUIET_S = 1.5


def work_of(model, optimizer, broken):
    """Return a step that pulls all weights to 1; while ``broken`` is not empty, its loss is NaN."""

    def loss_of():
        scale = math.nan if broken else 1.0
        return scale * sum(((p - 1.0) ** 2).sum() for p in model.parameters())

    return step_of(loss_of, optimizer)


def finite(model):
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def pair(train, quick, monkeypatch, tmp_path, broken):
    """Start two nodes. The second has a log, and breaks while ``broken`` is not empty."""
    first, model = linear(), linear(1)
    one = train(first, None, work_of(first, torch.optim.SGD(first.parameters(), lr=0.05), []), config=quick)
    log = tmp_path / "log"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    two = train(model, optimizer, work_of(model, optimizer, broken), seeds=[one.node.address], config=quick)
    return one, two, first, model, log


def test_spoiled_weights_are_said_once_given_to_nobody_and_replaced_by_the_swarms(
    train, quick, until, monkeypatch, tmp_path
):
    broken = []
    one, two, first, model, log = pair(train, quick, monkeypatch, tmp_path, broken)
    until(lambda: two.node.metrics().exchanges_done >= 3, 20)
    refused = dict(one.side.network.peer.exchanges.refusals.counts)
    broken.append(True)
    until(lambda: not two.side.network.peer.local.sound, 10)
    until(lambda: not finite(model), 5)
    time.sleep(QUIET_S)  # The second node goes on breaking what it takes.
    assert finite(first)
    assert one.side.network.peer.exchanges.refusals.counts == refused, "nothing spoiled was ever offered"
    broken.clear()
    until(lambda: two.side.network.peer.local.sound and two.side.network.peer.view.ready and finite(model), 30)
    done = two.node.metrics().exchanges_done
    until(lambda: two.node.metrics().exchanges_done >= done + 3, 20)
    assert finite(model), "with Adam's spoiled state its next step would spoil the weights again"
    assert finite(first)
    assert 1 <= len(sentences_in(log, "spoiled")) <= 4, "once each time, and ever more rarely"
    assert "gives them to no member" in sentences_in(log, "spoiled")[0]
    assert not sentences_in(log, "loss")


def test_a_loss_that_is_no_number_beside_sound_weights_is_said_once_and_stops_nothing(
    train, quick, until, monkeypatch, tmp_path
):
    one, two, _, model, log = pair(train, quick, monkeypatch, tmp_path, [])
    work = two.work
    two.work = lambda: work() * math.inf
    until(lambda: sentences_in(log, "loss"), 10)
    done = two.node.metrics().exchanges_done
    until(lambda: two.node.metrics().exchanges_done >= done + 5, 20)
    assert len(sentences_in(log, "loss")) == 1
    assert two.side.network.peer.local.sound
    assert finite(model)
    assert one.side.network.peer.local.sound


def test_weights_that_the_loop_mends_by_itself_are_mixed_again(train, quick, until):
    model = linear()
    alone = train(model, None, lambda: None, config=quick)

    def fill(value):
        with torch.no_grad():
            model.weight.fill_(value)
        return torch.tensor(value)

    alone.work = lambda: fill(math.inf)
    until(lambda: not alone.side.network.peer.local.sound, 10)
    assert not alone.side.network.peer.view.ready
    alone.work = lambda: fill(1.0)
    until(lambda: alone.side.network.peer.local.sound and alone.side.network.peer.view.ready, 10)
