"""Tests of the simulated device: work runs late, and every mistake shows.

``test_orders.py`` shows that streams run in any order, and that freed memory is poisoned while they read it;
``test_boundary.py`` shows that captured work happens at each replay.
"""

import pytest
import torch
from torch import nn

from tests.device.cuda import simulated

SIZE = 64


@pytest.fixture
def device():
    with simulated(seed=3) as on:
        yield on


def test_a_model_trains_as_on_the_host(device):
    model, host = (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(at) for at in ("cuda", "cpu"))
    host.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    batch = torch.randn(5, 4)
    found = []
    for one, data in ((model, batch.cuda()), (host, batch)):
        optimizer = torch.optim.Adam(one.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            one(data).square().sum().backward()
            optimizer.step()
        found.append(torch.cat([parameter.detach().cpu().flatten() for parameter in one.parameters()]))
    assert str(model[0].weight.device) == "cuda:0"
    assert torch.equal(*found)


def test_a_host_buffer_is_poison_until_its_event(device):
    device.queues.pace = 0.0
    weights = torch.ones(SIZE, device="cuda")
    buffer = torch.empty(SIZE, pin_memory=True)
    buffer.copy_(weights, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert buffer.isnan().all()
    assert not event.query()
    event.synchronize()
    assert (buffer == 1).all()


def test_a_host_buffer_that_is_written_to_too_early_arrives_changed(device):
    device.queues.pace = 0.0
    buffer = torch.ones(SIZE, pin_memory=True)
    there = buffer.to("cuda", non_blocking=True)
    buffer.fill_(7.0)
    assert there.cpu().tolist() == [7.0] * SIZE


def test_each_wait_is_counted_with_its_line(device):
    weights = torch.ones(SIZE, device="cuda")
    asks = [
        lambda: weights[0].item(), lambda: float(weights.sum()), lambda: weights.cpu(), lambda: weights.nonzero(),
        lambda: bool(weights.any()), lambda: torch.ones(SIZE).to("cuda"), lambda: torch.empty(SIZE).copy_(weights),
        lambda: torch.ones(SIZE).to("cuda", non_blocking=True), lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.cuda.current_stream().synchronize(), lambda: weights[torch.tensor([1])],
        lambda: weights[weights > 0],
    ]  # fmt: skip
    for ask in asks:
        before = len(device.waits)
        ask()
        assert len(device.waits) == before + 1, ask
        assert __file__ in device.waits[-1].at
    (weights + 1).mul_(2).sum()
    torch.ones(SIZE, pin_memory=True).to("cuda", non_blocking=True)
    assert len(device.waits) == len(asks)


def test_bytes_are_counted_and_memory_can_run_out(device):
    weights = torch.ones(SIZE, device="cuda")
    assert torch.cuda.memory_allocated() == 4 * SIZE
    sums = weights + weights
    assert torch.cuda.memory_allocated() == 8 * SIZE
    del sums
    assert torch.cuda.memory_allocated() == 4 * SIZE
    assert torch.cuda.max_memory_allocated() == 8 * SIZE
    device.memory.limit_bytes = 8 * SIZE - 1
    with pytest.raises(torch.OutOfMemoryError):
        weights + weights
    weights.add_(1.0)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_two_devices_in_one_operator_are_refused(kind):
    with simulated(kind), pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(SIZE, device=kind).index_select(0, torch.tensor([1]))
