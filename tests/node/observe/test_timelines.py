"""Tests of the timelines of real nodes."""

import json
import logging

import pytest
import torch
from torch import nn

from gossip.errors import ConfigError
from gossip.timeline import merge
from node import Node
from tests.node.trainees import heard_of, linear


def events(path):
    return json.loads(path.read_text())


def test_two_nodes_record_their_steps_and_the_exchanges_that_they_share(train, until, tmp_path):
    files = tmp_path / "a.json", tmp_path / "b.json"
    first = train(linear(), trace=files[0])
    second = train(linear(), seeds=[first.node.address], trace=files[1])
    until(lambda: second.node.metrics().exchanges_done > 5)
    steps = first.do(lambda node: node.metrics().steps)
    first.stop(), second.stop()
    for file in files:
        found = events(file)
        names = [one["name"] for one in found]
        assert names.count("join") == 1
        assert {"train", "boundary", "streams"} <= set(names)
        assert any(one.get("args", {}).get("updates") for one in found if one["name"] == "boundary")
        assert all(one["dur"] >= 0 for one in found if one["ph"] == "X")
    trained = [one["args"]["step"] for one in events(files[0]) if one["name"] == "train"]
    assert trained == list(range(trained[0], trained[-1] + 1)), "every step has its span"
    assert trained[-1] >= steps
    merged = merge(files, tmp_path / "all.json")
    assert merged.shifts_s[1] == pytest.approx(0.0, abs=0.5), "they share exchanges and one machine's clock"
    arrows = [one for one in events(tmp_path / "all.json") if one["ph"] in "sf"]
    ends = {kind: {one["id"] for one in arrows if one["ph"] == kind} for kind in "sf"}
    assert len(ends["s"] & ends["f"]) > 3


@pytest.mark.cuda
def test_a_timeline_shows_copies_on_tracks_of_their_own(accelerator, train, until, tmp_path):
    trainees = []
    for seed in range(2):
        torch.manual_seed(seed)
        seeds = [one.node.address for one in trainees]
        model = nn.Linear(16, 16).to("cuda")
        trainees.append(train(model, seeds=seeds, trace=tmp_path / f"{seed}.json"))
    until(lambda: all(one.node.metrics().exchanges_done > 3 for one in trainees))
    if accelerator is not None:
        accelerator.waits.clear()
    until(lambda: all(one.node.metrics().exchanges_done > 6 for one in trainees))
    assert accelerator is None or [wait for wait in accelerator.waits if wait.ours] == []
    for one in trainees:
        one.stop()
    found = events(tmp_path / "0.json")
    tracks = {one["tid"]: one["args"]["name"] for one in found if one["name"] == "thread_name"}
    size = 4 * (16 * 16 + 16)
    for name in ("cuda:0 to host", "host to cuda:0"):
        spans = [one for one in found if one["ph"] == "X" and tracks[one["tid"]] == name]
        assert len(spans) > 3
        assert all(one["name"] == name and one["dur"] >= 0 for one in spans)
        # The first upload is that of the sampled positions, here all, of 8 bytes each.
        positions = [2 * size] if name == "host to cuda:0" else []
        assert [one["args"]["bytes"] for one in spans] == positions + [size] * (len(spans) - len(positions))
    loop = [one["ts"] for one in found if one["ph"] == "X" and tracks[one["tid"]] == "training loop"]
    assert all(min(loop) - 1e6 < one["ts"] < max(loop) + 1e6 for one in spans)


def test_a_full_disk_costs_the_timeline_and_no_step(train, until, caplog):
    caplog.set_level(logging.WARNING, "gossip")
    trainee = train(linear(), trace="/dev/full")
    until(lambda: trainee.node.metrics().steps > 300)
    trainee.stop()
    assert trainee.error is None
    assert heard_of(caplog, "timeline") == [
        f"Node {trainee.made._training.me.hex()[:8]}: The timeline /dev/full is incomplete, as it could not be "
        "written: No space left on device."
    ]


def test_a_folder_that_is_not_there_is_refused_before_the_start(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"timeline's folder .* does not exist: make it first"):
        Node(linear(), trace=tmp_path / "missing" / "a.json")
    monkeypatch.setenv("GOSSIP_TRACE", str(tmp_path / "missing" / "a.json"))
    with pytest.raises(ConfigError, match=r"timeline's folder .* does not exist: make it first"):
        Node(linear())
