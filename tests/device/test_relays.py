"""Updates that go from rank 0's device to another rank's: the same values in any order of streams, and no waits."""

import numpy as np
import pytest
import torch
from torch import nn

from node.model.device.uploads import Uploads
from node.model.snapshot import ModelState

pytestmark = pytest.mark.cuda
SIZES = (70, 30, 5, 45)  # Portions of 50 elements: one tensor is split, and others go together.
PORTION = 50


class Wire:
    """A broadcast between two ranks' devices with the order that NCCL keeps.

    Values are sent once the sender's current stream comes to it, and received before the receiver's goes on.
    """

    def __init__(self):
        self.sent = []

    def send(self, values):
        self.sent.append((values.clone(), torch.cuda.current_stream().record_event()))

    def receive(self, values):
        copy, event = self.sent.pop(0)
        torch.cuda.current_stream().wait_event(event)
        values.copy_(copy)
        copy.record_stream(torch.cuda.current_stream())


class Rank:
    """A rank's model, whose training has its own stream."""

    def __init__(self, dtype):
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            tensors = {
                str(n): nn.Parameter(torch.full((size,), 1.0, dtype=dtype, device="cuda"))
                for n, size in enumerate(SIZES)
            }
            self.model = nn.ParameterDict(tensors)
            self.state = ModelState(self.model)

    def weights(self):
        with torch.cuda.stream(self.stream):
            return torch.cat([value.detach().float() for value in self.model.values()]).cpu()


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", PORTION)


def host_values(state):
    values = state.buffer(sum(SIZES))
    values[:] = np.arange(values.size)
    return values


@pytest.mark.parametrize("ratio", [None, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_hold_what_an_update_of_the_host_gives(accelerator, dtype, ratio, seed):
    if accelerator is not None:
        accelerator.queues.random.seed(seed)
    wire, first, second, expected = Wire(), Rank(dtype), Rank(dtype), Rank(dtype)
    values = host_values(expected.state)
    copy = values.copy()
    with torch.cuda.stream(expected.stream):
        for _ in range(3):
            values[:] = copy
            (expected.state.add(values) if ratio is None else expected.state.merge(values, ratio)).wait()
    values[:] = copy
    torch.cuda.synchronize()
    for _ in range(3):
        for rank, call, given in ((first, wire.send, values), (second, wire.receive, None)):
            with torch.cuda.stream(rank.stream):
                update = rank.state.begin_relay(sum(SIZES), ratio, call, given)
                assert update.portions == (50, 50, 50)
                assert update.done()
                rank.copies = update.add() if ratio is None else update.merge(ratio)
    assert torch.equal(first.weights(), expected.weights())
    assert torch.equal(second.weights(), expected.weights())
    assert first.copies.done()


def test_nothing_waits_and_no_rank_has_more_than_its_portions(simulated_device, costs):
    first, second = Rank(torch.float32), Rank(torch.float32)
    values, wire = host_values(first.state), Wire()
    costs.reset()
    with torch.cuda.stream(second.stream):
        wire.sent = [(torch.ones(PORTION, device="cuda"), second.stream.record_event()) for _ in range(3)]
        second.state.begin_relay(sum(SIZES), None, wire.receive).add()
    with torch.cuda.stream(first.stream):
        copies = first.state.begin_relay(sum(SIZES), None, lambda sent: None, values).add()
    costs.check(waits=0)
    torch.cuda.synchronize()
    assert copies.done(), "the host vector is free"
    costs.check(peak=4 * PORTION * (3 + 2 + 1))


def test_state_that_follows_the_weights_moves_with_a_relayed_update():
    weights = nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = torch.optim.SGD([weights], 1.0)
    optimizer.state[weights] = {"slow_params": torch.full((5,), 3.0, device="cuda")}
    state = ModelState({"w": weights}, optimizer)
    state.begin_relay(5, None, lambda values: values.fill_(2.0)).add()
    assert optimizer.state[weights]["slow_params"].tolist() == [5.0] * 5


def test_without_memory_or_off_the_device_nothing_is_relayed(accelerator):
    state = ModelState(nn.ParameterDict({"w": nn.Parameter(torch.ones(5))}))
    assert state.begin_relay(5, None, lambda values: None) is None
    if accelerator is not None:
        rank = Rank(torch.float32)
        accelerator.memory.limit_bytes = accelerator.memory.bytes
        assert rank.state.begin_relay(sum(SIZES), None, lambda values: None) is None
