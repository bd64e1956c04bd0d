"""Tests of the record of copies, which gives their times without waiting for the device."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from node.model.device import streams
from node.model.device.uploads import Uploads
from node.model.snapshot import ModelState

pytestmark = pytest.mark.cuda
SIZE = 600
GPU = torch.device("cuda", 0)


@pytest.fixture
def state():
    return ModelState(nn.ParameterDict({"w": nn.Parameter(torch.ones(SIZE, device="cuda"))}))


def test_copies_in_both_directions_are_recorded_once_they_have_ended(accelerator, costs, state, monkeypatch):
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 100)
    out = state.buffer(SIZE)
    state.read(out)
    record = state.record_copies()
    costs.reset()
    began = time.time()
    if accelerator is not None:
        accelerator.queues.pace = 0.0
    state.begin_read(out)
    assert accelerator is None or record.ended() == []
    costs.check(waits=0)
    torch.cuda.synchronize()
    (down,) = record.ended()
    assert record.ended() == []
    upload = state.begin_upload(out)
    torch.cuda.synchronize()
    upload.add()
    torch.cuda.synchronize()
    ups = record.ended()
    assert (down.device, down.direction, down.size_bytes) == (GPU, "down", 4 * SIZE)
    assert [(up.direction, up.size_bytes) for up in ups] == [("up", 400)] * 6
    ends = [began, *(at for one in (down, *ups) for at in (one.begin_s, one.end_s)), time.time()]
    slack_s = 0.01  # The clocks of a real device and its host differ a little.
    assert all(later >= earlier - slack_s for earlier, later in pairwise(ends))


def test_uploads_of_positions_and_of_a_correction_are_recorded(state, monkeypatch):
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 200)
    record, pull = state.record_copies(), state.buffer(SIZE)
    state.prepare_positions(np.arange(50))
    while not state.add_scaled(pull, 2.0, 1):
        torch.cuda.synchronize()
    assert [(up.direction, up.size_bytes) for up in record.ended()] == [("up", 400), *[("up", 800)] * 3]


def test_a_copy_that_finds_no_memory_is_not_recorded(simulated_device, state):
    state.read(state.buffer(SIZE))
    vector, record, memory = state.buffer(SIZE), state.record_copies(), simulated_device.memory
    memory.limit_bytes = memory.bytes
    assert state.begin_upload(vector) is None
    torch.cuda.synchronize()
    assert record.ended() == []


def test_the_copies_that_wait_to_be_recorded_are_bounded(state, monkeypatch):
    monkeypatch.setattr(streams, "MAX_PENDING", 3)
    out, record = state.buffer(SIZE), state.record_copies()
    for _ in range(5):
        state.read(out)
    assert len(record.ended()) == 3
    state.read(out)
    assert len(record.ended()) == 1


def test_an_anchor_is_renewed(state, monkeypatch):
    record = state.record_copies()
    first = record.anchor(GPU)
    assert record.anchor(GPU) is first
    monkeypatch.setattr(streams, "ANCHORED_S", -1.0)
    assert record.anchor(GPU) is not first
    assert len(record.streams) == 1, "streams of a device are few"
