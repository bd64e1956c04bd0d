"""Faults of one machine: each is noticed, named once, and costs nobody else anything."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import torch
from torch import nn

from node import Node
from node.statedir import StateDir
from tests.node.conftest import Trainee


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def said(log, kind):
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["sentence"] for row in rows if row["event"] == kind]


def test_a_loop_that_stands_is_named_once_and_holds_up_nobody_else(train, quick, until, monkeypatch, tmp_path):
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
    monkeypatch.delenv("GOSSIP_LOG")
    third = train(linear(2), seeds=[first.node.address], config=quick)
    until(lambda: second.node.metrics().exchanges_done >= 2, 20)
    hang.clear()
    assert hangs.wait(10)
    until(lambda: said(log, "boundary"), 20)
    done = third.node.metrics().exchanges_done
    until(lambda: third.node.metrics().exchanges_done >= done + 5, 20)
    assert len(said(log, "boundary")) == 1
    assert "no step boundary" in said(log, "boundary")[0]
    hang.set()
    until(lambda: len(said(log, "boundary")) == 2, 10)
    assert "again" in said(log, "boundary")[1]
    done = second.node.metrics().exchanges_done
    until(lambda: second.node.metrics().exchanges_done >= done + 2, 20)


def test_a_newcomer_is_told_that_its_only_donor_stands_and_joins_when_it_goes_on(
    train, quick, until, monkeypatch, tmp_path
):
    hang, hangs = threading.Event(), threading.Event()

    def work():
        hangs.set()
        hang.wait(60)

    patient = replace(quick, join_timeout_s=60.0)
    donor = train(linear(), None, work, config=patient)
    assert hangs.wait(10)
    address, log = donor.node.address, tmp_path / "log"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    newcomer = Trainee(linear(1), seeds=[address], config=patient)
    newcomer.start()
    until(lambda: log.exists() and said(log, "waiting"), 20)
    assert not newcomer.running.is_set()
    hang.set()
    assert newcomer.running.wait(20)
    newcomer.stop()
    assert newcomer.error is None
    assert len(said(log, "waiting")) == 1


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


def test_a_node_whose_state_directory_goes_away_says_so_and_trains_on(quick, until, monkeypatch, tmp_path):
    home, log = tmp_path / "state", tmp_path / "log"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    with Node(linear(), state_dir=home, config=quick) as node:
        node.step()
        shutil.rmtree(home)
        until(lambda: node.step() or said(log, "state"), 20)
        steps = node.steps
        node.step()
        assert node.steps == steps + 1
    assert len(said(log, "state")) == 1
