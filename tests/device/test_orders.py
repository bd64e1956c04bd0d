"""No order of a node's copies and a loop's steps gives a wrong value; without one of the precautions many do."""

import pytest
import torch

from node.model.device.copies import HalfPart
from node.model.device.downloads import Downloads
from node.model.device.guard import StepGuard
from node.model.device.uploads import Uploads
from tests.device import cuda, tensors
from tests.device.orders import Side, wrong_values

ORDERS = 3


@pytest.fixture
def large(monkeypatch):
    """Treat a small model as one that is copied in place and changed in portions."""
    monkeypatch.setattr(Downloads, "MAX_STAGED_ELEMENTS", 0)
    monkeypatch.setattr(Downloads, "MIN_DIRECT_ELEMENTS", 4)
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 7)


@pytest.mark.parametrize(("dtype", "own_stream"), [(torch.float32, False), (torch.bfloat16, True), (None, False)])
def test_every_order_gives_the_hosts_values(dtype, own_stream):
    assert sum(wrong_values(seed, dtype, own_stream) for seed in range(ORDERS)) == 0


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("dtype", "own_stream"), [(torch.float32, True), (torch.bfloat16, False), (None, True)])
def test_every_order_gives_them_for_a_model_that_is_copied_in_place(dtype, own_stream):
    assert sum(wrong_values(seed, dtype, own_stream) for seed in range(ORDERS)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_many_orders_give_the_hosts_values():
    assert sum(wrong_values(seed) for seed in range(100, 400)) == 0


@pytest.mark.parametrize(
    ("owner", "precaution"), [(cuda._Stream, "wait_event"), (tensors.DeviceTensor, "record_stream")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_precaution_values_are_wrong(monkeypatch, owner, precaution, dtype):
    monkeypatch.setattr(owner, precaution, lambda *arguments: None)
    assert any(wrong_values(seed, dtype) for seed in range(ORDERS))


def test_half_precision_that_is_not_widened_is_wrong(monkeypatch):
    monkeypatch.setattr(HalfPart, "widen", lambda part: None)
    assert any(wrong_values(seed, torch.bfloat16) for seed in range(ORDERS))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_guard_values_are_wrong(monkeypatch, dtype):
    def join(guard):
        """Close the watches, and let no stream wait."""
        for watch in guard.pending:
            watch.close()
        guard.pending = []

    monkeypatch.setattr(StepGuard, "order_after_copies", join)
    assert any(wrong_values(seed, dtype) for seed in range(ORDERS))


def test_a_checkpoint_is_written_after_the_copies_in_progress(monkeypatch):
    """Loading waits for the device in between, so that no order of the simulated device shows this."""
    state = Side("cpu", torch.float32).state
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    weights_then = []

    def note(_guard):
        weights_then.append({name: tensor.clone() for name, tensor in state.tensors().items()})

    monkeypatch.setattr(StepGuard, "order_after_copies", note)
    state.load({name: tensor + 100 for name, tensor in before.items()})
    [then] = weights_then
    assert all(torch.equal(then[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(tensor, before[name] + 100) for name, tensor in state.tensors().items())
