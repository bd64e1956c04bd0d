"""Half precision crosses in its own two bytes, and is widened on the host in the vector's own memory."""

import numpy as np
import pytest
import torch
from torch import nn

from node.model.device import copies
from node.model.device.copies import HALF_TYPES, HalfPart
from node.model.snapshot import ModelState
from tests.device.test_boundary import SIZE, Loop

TYPES = pytest.mark.parametrize("dtype", HALF_TYPES)
CHECK_BYTES = 1  # Each copy also brings the result of a check that all values are finite.


# -- in the vector's own memory --------------------------------------------------------------------------------------
@TYPES
@pytest.mark.parametrize(
    ("last", "sizes"), [(1, (*range(20), 1001)), (5, (*range(20), 1001)), (copies.LAST_ELEMENTS, (65_536,))]
)
def test_every_value_is_widened_exactly_and_once(monkeypatch, dtype, last, sizes):
    monkeypatch.setattr(copies, "LAST_ELEMENTS", last)
    for size in sizes:
        # Infinities, NaN and subnormals are among the values.
        values = torch.arange(65_536).roll(99)[:size].to(torch.uint16).view(dtype)
        vector = torch.full((size + 2,), -1.0)
        part = HalfPart(vector[1:-1], dtype)
        part.narrow.copy_(values)
        for _ in range(2):
            part.widen()
            np.testing.assert_array_equal(part.wide.numpy(), values.float().numpy())
        assert vector[0] == vector[-1] == -1.0, "neighbours stay"


# -- from the device -------------------------------------------------------------------------------------------------
@pytest.fixture(params=["staged", "direct"])
def is_staged(request):
    """Run a test with tensors that are copied on the device first, and with tensors that are copied in place."""
    if request.param == "direct":
        request.getfixturevalue("large")
    return request.param == "staged"


@TYPES
@pytest.mark.cuda
def test_a_snapshot_crosses_as_two_bytes_an_element_and_waits_for_nothing(costs, is_staged, monkeypatch, dtype):
    loop = Loop(dtype)
    loop.step()
    loop.state.begin_read(loop.pool.take().array).wait()  # The first read locks pages and makes the stream.
    loop.pool.reserve(SIZE)
    loop.weights.grad = None
    costs.reset()
    with monkeypatch.context() as inside_step:
        inside_step.setattr(HalfPart, "widen", lambda part: pytest.fail("widened in the loop's thread"))
        visit, vector = loop.snapshot()
        loop.step()
    costs.check(waits=0)
    torch.cuda.synchronize()
    gradient_bytes = 2 * SIZE
    staged_bytes = 2 * SIZE if is_staged else 0
    # The staged copy may still be on its way when the next step allocates its gradient; 99 bytes are for the check.
    costs.check(down=2 * SIZE + CHECK_BYTES, peak=gradient_bytes + staged_bytes + 99)
    (copy,) = visit.copies
    assert copy.done()
    assert copy.is_narrow
    copy.widen()
    assert not copy.is_narrow
    assert set(vector.array.tolist()) == {2.0}
    visit.record_checks()
    assert vector.is_finite is True


@TYPES
@pytest.mark.cuda
def test_a_part_of_the_weights_crosses_as_two_bytes_an_element(costs, dtype):
    loop = Loop(dtype)
    positions = torch.arange(0, SIZE, 3).numpy()
    out = loop.state.buffer(positions.size)
    loop.state.prepare_positions(positions)
    costs.reset()
    loop.state.begin_read_at(out, positions).wait()
    costs.check(down=2 * positions.size + CHECK_BYTES)
    assert set(out.tolist()) == {1.0}


@pytest.mark.cuda
def test_the_optimizers_state_crosses_as_two_bytes_an_element():
    weights = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16, device="cuda"))
    optimizer = torch.optim.SGD([weights], 1.0, momentum=0.5)
    state = ModelState({"w": weights}, optimizer)
    weights.grad = torch.full_like(weights, 3.0)
    optimizer.step()
    torch.cuda.synchronize()
    out, record = state.buffer(SIZE), state.record_copies()
    state.begin_read_optimizer(out, state.optimizer_range().start).wait()
    assert [copy.size_bytes for copy in record.ended()] == [2 * SIZE]
    assert set(out.tolist()) == {3.0}


@pytest.mark.cuda
@pytest.mark.usefixtures("is_staged")
def test_tensors_of_several_types_cross_each_in_its_own():
    """In a model whose types alternate, only the other types are converted on the device."""
    types = [torch.float32, *HALF_TYPES, torch.float64, torch.bfloat16, torch.float32]
    tensors = [torch.arange(7 * number, 7 * number + 7).to("cuda", dtype) for number, dtype in enumerate(types)]
    model = nn.ParameterList(map(nn.Parameter, tensors))
    state = ModelState(model, torch.optim.SGD(model.parameters(), 1.0))
    state._guard.stepped_optimizers.add(id(state._guard.optimizers[0]))
    torch.cuda.synchronize()
    out, record = state.buffer(state.size()), state.record_copies()
    copies = state.begin_read(out)
    copies.wait()
    assert out.tolist() == list(range(7 * len(types)))
    assert copies.finite is True
    assert [copy.size_bytes for copy in record.ended()] == [7 * (4 + 2 + 2 + 4 + 2 + 4)]


# -- to the device ---------------------------------------------------------------------------------------------------
@pytest.mark.cuda
def test_a_difference_crosses_as_four_bytes_because_its_last_bits_decide(costs):
    difference = 2.0**-8 + 2.0**-20  # Just more than half of the distance from 1 to the next bfloat16.
    loop = Loop(torch.bfloat16)
    costs.reset()
    loop.brings(difference)
    torch.cuda.synchronize()
    loop.visit()
    torch.cuda.synchronize()
    costs.check(up=4 * SIZE)
    assert loop.values() == {1.0 + 2.0**-7}
    rounded = torch.tensor(difference).bfloat16()
    assert float(torch.tensor(1.0).bfloat16() + rounded) == 1.0
