"""Faults of one machine: each is noticed, reported once, and costs the other nodes nothing."""

import math
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch

from gossip.state_transfer.donating import MAX_SERVED, ServedPiece
from gossip.wire.messages import Fetch
from node.identity.statedir import StateDir
from tests.harness.marks import slow
from tests.node.trainees import linear, sentences_in


def test_a_loop_that_stands_is_named_once_and_holds_up_nobody_else(train, quick, until, monkeypatch, tmp_path):
    quick = replace(quick, mix_every_steps=10)  # the test waits for seconds
    first, second = train(linear(), config=quick), None
    log = tmp_path / "log"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    hang, hangs = threading.Event(), threading.Event()
    hang.set()

    def work():
        if not hang.is_set():
            hangs.set()
            hang.wait(60)

    second = train(linear(1), None, work, seeds=[first.node.address], config=quick)
    heard = []
    second.node.on("stalled", heard.append), second.node.on("moving", heard.append)
    monkeypatch.delenv("GOSSIP_LOG")
    third = train(linear(2), seeds=[first.node.address], config=quick)
    until(lambda: second.node.metrics().exchanges_done >= 2, 20)
    hang.clear()
    assert hangs.wait(10)
    until(lambda: sentences_in(log, "stalled") and heard, 20)
    assert [event.kind for event in heard] == ["stalled"], "told while the loop stands"
    assert heard[0].seconds >= 5.0
    done = third.node.metrics().exchanges_done
    until(lambda: third.node.metrics().exchanges_done >= done + 5, 20)
    assert sentences_in(log, "stalled") == [str(heard[0])]
    assert "no step boundary" in str(heard[0])
    hang.set()
    until(lambda: sentences_in(log, "moving") and len(heard) == 2, 10)
    assert sentences_in(log, "moving") == [str(heard[1])]
    assert "again" in str(heard[1])
    assert heard[1].seconds >= heard[0].seconds
    done = second.node.metrics().exchanges_done
    until(lambda: second.node.metrics().exchanges_done >= done + 2, 20)


def test_a_newcomer_is_told_that_nobody_gives_it_the_weights_and_joins_when_somebody_does(
    train, launch, quick, until, monkeypatch, tmp_path
):
    patient = replace(quick, join_timeout_s=60.0)
    donor = train(linear(), config=patient)
    donating = donor.side.network.peer.donating
    others = {number: ServedPiece(b"x" * 16, Fetch(number, (), 0, 1), math.inf) for number in range(MAX_SERVED)}
    donor.side.network.call(donating.table.update, others)
    until(lambda: len(donating.table) == len(others))
    address, log = donor.node.address, tmp_path / "log"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    newcomer = launch(linear(1), seeds=[address], config=patient)
    until(lambda: log.exists() and sentences_in(log, "waiting"), 20)
    assert not newcomer.running.is_set()
    donor.side.network.call(donating.table.clear)
    assert newcomer.running.wait(20)
    assert len(sentences_in(log, "waiting")) == 1


@pytest.mark.parametrize(
    ("steps", "adam"),
    [
        pytest.param(0, False, id="before its first step"),
        pytest.param(40, True, id="amid training, and the optimizer's state"),
        slow(0, True, id="before its first step, and the optimizer's state"),
        slow(40, False, id="amid training"),
    ],
)
def test_a_newcomer_takes_the_last_snapshot_of_a_donor_that_stands(train, quick, steps, adam):
    """The loop takes no step for longer than any member waits, as in an evaluation or a notebook's cell."""
    hang, hangs = threading.Event(), threading.Event()
    model, mine = linear(), linear(1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) if adam else None for one in (model, mine)]
    seen = []  # The model at each step boundary.

    def work():
        if len(seen) == steps:
            hangs.set()
            hang.wait(60)
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        if adam:
            optimizers[0].step()
            optimizers[0].zero_grad()
        else:
            with torch.no_grad():
                model.weight -= 0.01 * model.weight.grad
        time.sleep(0.05)
        seen.append(model.weight.detach().clone())

    seen_at_first = model.weight.detach().clone()
    patient = replace(quick, join_timeout_s=60.0)
    donor = train(model, optimizers[0], work, config=patient)
    try:
        assert hangs.wait(20)
        time.sleep(3.0)  # By then no member expects it to reach a boundary soon.
        newcomer = train(mine, optimizers[1], seeds=[donor.node.address], config=patient)
        assert newcomer.side.network.peer.local.run_id == donor.side.network.peer.local.run_id
        taken = newcomer.at_entry["weight"]
        assert any(torch.equal(taken, one) for one in [seen_at_first, *seen]), "of a boundary, and whole"
        if steps:
            assert any(torch.equal(taken, one) for one in seen[steps // 2 :]), "and of a late one"
    finally:
        hang.set()


def test_an_address_book_that_cannot_be_written_is_said_once_and_so_that_it_can_again(tmp_path):
    home = tmp_path / "state"
    home.mkdir()
    state = StateDir(home)
    assert state.write(1, 8, []) == ""
    shutil.rmtree(home)
    assert "cannot be written" in state.write(1, 16, [])
    assert state.write(1, 24, []) == ""
    home.mkdir()
    assert "again" in state.write(1, 32, [])
    assert state.write(1, 40, []) == ""
    assert StateDir(home).read().samples == 40
