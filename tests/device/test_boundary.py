"""A step boundary over a model on the device: the costs of a mix, and of a lack of memory for it."""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from gossip.arithmetic.subsets import Subset
from gossip.averaging.boundary import Boundary
from gossip.averaging.vectors import Cut
from gossip.averaging.visit import Adoption, Update
from node.model.backup import KeptWeights
from node.model.device.downloads import Downloads
from node.model.device.uploads import Uploads
from node.model.inventory.probe import SAMPLED_ELEMENTS
from node.model.optimizers import Optimizers
from node.model.pool import VectorPool
from node.model.snapshot import ModelState

pytestmark = pytest.mark.cuda
SIZE = 600


class Loop:
    """A model of one value, its optimizer, and the boundary that its loop visits."""

    def __init__(self, dtype=torch.float32, value=1.0, **options):
        self.weights = nn.Parameter(torch.full((SIZE,), value, dtype=dtype, device="cuda"))
        self.optimizer = torch.optim.SGD([self.weights], 1.0, **options)
        model = nn.ParameterDict({"w": self.weights})
        self.state = ModelState(model, self.optimizer)
        self.pool, optimizers = VectorPool(self.state), Optimizers(self.optimizer)
        self.boundary = Boundary(self.state, self.pool, KeptWeights(self.state, optimizers), False, threading.Lock())
        self.boundary.uploads_updates = True

    def step(self, amount=1.0):
        self.weights.grad = torch.full_like(self.weights, -amount)
        self.optimizer.step()

    def brings(self, value, **options):
        """Have an exchange deliver a difference."""
        vector = self.pool.take()
        vector.array.fill(value)
        self.boundary.begin_update()
        self.boundary.deliver_update(Update(vector, **options))
        return vector

    def visit(self, **options):
        return self.boundary.visit(lambda vector: None, **options)

    def snapshot(self, session=1):
        self.boundary.request_snapshot(session)
        visit = self.visit()
        return visit, visit.snapshots[0][1]

    def values(self):
        return set(self.weights.detach().float().cpu().tolist())


def finished(visit):
    torch.cuda.synchronize()
    assert all(copy.done() for copy in visit.copies)
    for copy in visit.copies:
        copy.widen()  # A worker thread does this in a node.


def test_a_difference_that_comes_with_its_weight_is_added_by_that_weight():
    loop = Loop()
    loop.brings(2.0, weight=0.5)
    loop.visit()
    assert loop.values() == {2.0}


def test_an_update_is_added_at_the_first_boundary_at_which_it_is_there(accelerator):
    if accelerator is not None:
        accelerator.queues.pace = 0.0
    loop = Loop()
    torch.cuda.synchronize()
    vector = loop.brings(2.0)
    upload = loop.boundary.arrived_updates[0].upload
    if accelerator is not None:
        assert not loop.visit().updates
        assert loop.boundary.has_requests
        assert loop.boundary.pending_updates == 1
        loop.boundary.request_snapshot(1)
        assert not loop.visit().snapshots, "a snapshot would lack it"
    torch.cuda.synchronize()
    assert upload.done()
    visit = loop.visit()
    assert visit.updates[0].vector is vector
    assert not loop.boundary.has_requests
    assert loop.values() == {3.0}


def test_weights_that_are_replaced_have_all_updates_first(accelerator):
    if accelerator is not None:
        accelerator.queues.pace = 0.0
    loop = Loop()
    loop.boundary.backup.keep()
    loop.brings(2.0)
    loop.boundary.request_restore()
    visit = loop.visit()
    assert len(visit.updates) == 1
    assert visit.restored


@pytest.mark.usefixtures("large")
def test_a_large_model_takes_no_memory_for_a_mix(costs, monkeypatch):
    """The device holds two portions of an update, and nothing for a copy."""
    monkeypatch.setattr(Uploads, "AHEAD_PORTIONS", 2)
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 50)
    loop = Loop()
    loop.step()
    loop.state.begin_read(loop.pool.take().array).wait()
    loop.step()
    loop.weights.grad = None
    costs.reset()
    loop.brings(2.0)
    torch.cuda.synchronize()
    costs.check(up=4 * 100)  # The first portions come ahead of the boundary.
    visit, vector = loop.snapshot()
    finished(visit)
    assert set(vector.array.tolist()) == {5.0}
    probe_bytes = 3 * 4 * SAMPLED_ELEMENTS  # Before the mix, after it, and the difference.
    costs.check(up=4 * SIZE, peak=4 * 2 * 50 + 16 + probe_bytes)


@pytest.mark.usefixtures("large")
def test_neither_the_first_read_nor_the_first_snapshot_takes_memory_for_another_copy(costs):
    loop = Loop()
    costs.reset()
    vector = loop.pool.take()
    loop.state.read(vector.array)
    assert set(vector.array.tolist()) == {1.0}
    costs.check(peak=4 * SIZE - 1)
    loop.step()
    loop.weights.grad = None
    costs.reset()
    visit, vector = loop.snapshot()
    finished(visit)
    assert set(vector.array.tolist()) == {2.0}
    costs.check(peak=4 * SIZE - 1)


@pytest.mark.usefixtures("large")
def test_a_copy_of_weights_that_change_outside_the_optimizer_is_of_no_use():
    loop = Loop()
    out = loop.state.buffer(SIZE)
    for torn in (False, True, False):
        loop.state.begin_read(out).wait()
        loop.step()
        copies = loop.state.begin_read(out)
        if torn:
            with torch.no_grad():
                loop.weights.mul_(2.0)
        loop.step()
        copies.wait()
        assert copies.done()
        assert copies.torn == torn


@pytest.mark.usefixtures("large")
def test_captured_steps_are_copied_through_memory_of_their_own():
    loop, graph = Loop(), torch.cuda.CUDAGraph()
    out = loop.state.buffer(SIZE)
    loop.state.begin_read(out).wait()
    loop.step()
    with torch.cuda.graph(graph):
        loop.optimizer.step()
    for expected in (2.0, 3.0, 4.0):
        copies = loop.state.begin_read(out)
        assert not copies.watches
        graph.replay()
        torch.cuda.synchronize()
        assert copies.done()
        assert set(out.tolist()) == {expected}
    adding = loop.state.add(np.full(SIZE, 10.0, np.float32))
    graph.replay()
    adding.wait()
    assert loop.values() == {16.0}


@pytest.mark.usefixtures("large")
def test_a_compiled_step_is_copied_through_memory_of_its_own(monkeypatch):
    """A compiled step calls Python only once, while torch traces it, so a later step cannot protect a copy."""
    loop = Loop()
    out = loop.state.buffer(SIZE)
    loop.step()
    assert loop.state.begin_read(out).watches
    with monkeypatch.context() as tracing:
        tracing.setattr(torch.compiler, "is_compiling", lambda: True)
        loop.state._guard.before_step(loop.optimizer)
    assert not loop.state.begin_read(out).watches


def test_weights_on_trial_are_put_back_with_the_optimizers_state():
    loop = Loop(momentum=0.5)
    loop.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loop.boundary.request_adoption(Adoption(np.full(SIZE, 9.0, np.float32), trial=True))
    visit = loop.visit()
    assert visit.adopted
    assert torch.cuda.memory_allocated() == before, "the backup lies on the host"
    assert loop.values() == {9.0}
    assert visit.trial_distance == (SIZE * 49.0, SIZE * 4.0)
    loop.step()
    loop.boundary.request_restore()
    assert loop.visit().restored
    assert loop.values() == {2.0}
    loop.step(0.0)
    assert loop.values() == {2.5}, "with the momentum of before"


@pytest.mark.usefixtures("large")
def test_a_large_tensor_of_another_type_is_converted_in_portions(costs, monkeypatch):
    monkeypatch.setattr(Downloads, "PORTION_ELEMENTS", 50)
    loop = Loop(torch.float64)
    loop.step()
    loop.weights.grad = None
    costs.reset()
    visit, vector = loop.snapshot()
    finished(visit)
    costs.check(peak=4 * 50 + 100)  # The 100 bytes are for the check of finite values.
    assert set(vector.array.tolist()) == {2.0}
    assert vector.is_finite is None
    visit.record_checks()
    assert not visit.unchecked_vectors(0)


HALF = Cut(Subset("fragment", index=0, count=2), np.arange(300))


@pytest.mark.parametrize("cut", [None, HALF], ids=["whole", "a part and its sample"])
@pytest.mark.parametrize(("value", "place", "expected"), [(1.0, 0, True), (math.nan, 3, False), (math.inf, 590, False)])
def test_a_copy_tells_if_its_values_are_finite(cut, value, place, expected):
    loop = Loop()
    loop.boundary.sampled_positions = np.arange(0, SIZE, 10)
    with torch.no_grad():
        loop.weights[place] = value
    loop.boundary.request_snapshot(1, cut=cut)
    visit = loop.visit()
    finished(visit)
    visit.record_checks()
    assert visit.unchecked_vectors(0) == []
    ((_, vector, _),) = visit.snapshots
    assert vector.is_finite is expected


# -- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_without_memory_holds_up_training_instead(simulated_device, dtype):
    loop, memory = Loop(dtype), simulated_device.memory
    torch.cuda.synchronize()
    memory.limit_bytes = memory.bytes
    visit, vector = loop.snapshot()
    loop.optimizer.param_groups[0]["params"][0].data.zero_()
    finished(visit)
    assert set(vector.array.tolist()) == {1.0}


def test_a_snapshot_that_finds_no_memory_costs_a_mix_and_not_the_loop(simulated_device):
    loop, memory = Loop(torch.float64), simulated_device.memory  # Conversion takes memory in any case.
    torch.cuda.synchronize()
    memory.limit_bytes = memory.bytes + 100
    simulated_device.queues.pace = 0.0
    loop.boundary.request_snapshot(1)
    visit = loop.visit(spare=True, keep=True)
    (free,) = loop.pool.free_arrays.values()
    free[0].fill(4.0)
    torch.cuda.synchronize()
    assert (free[0] == 4.0).all(), "nothing writes there any more"
    assert visit.failed_sessions == (1,)
    assert not visit.snapshots
    assert visit.spare_copy is visit.newcomers_copy is None
    assert not visit.has_only_updates
    assert sum(len(kept) for kept in loop.pool.free_arrays.values()) == 1, "the vector has come back"
    memory.limit_bytes = math.inf
    visit, vector = loop.snapshot()
    finished(visit)
    assert set(vector.array.tolist()) == {1.0}


@pytest.mark.parametrize(
    ("mass", "is_part", "is_ahead"), [(None, False, True), (3.0, False, True), (3.0, False, False), (None, True, True)]
)
@pytest.mark.parametrize("follows", [False, True], ids=["", "slow weights follow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_memory_is_left_an_update_is_applied_whole_or_lost_and_counted(
    simulated_device, mass, dtype, is_part, is_ahead, follows
):  # fmt: skip
    """Blocks take multiples of the bytes of a half: each sum of them is tried, and a byte more and less."""
    whole, memory = 2.5 if mass is not None else 3.0, simulated_device.memory
    seen = set()
    for extra in sorted({max(blocks * SIZE + one, 0) for blocks in range(18) for one in (-1, 0, 1)}):
        loop = Loop(dtype)
        loop.boundary.uploads_updates = is_ahead
        slow = torch.ones(SIZE, device="cuda")
        loop.optimizer.state[loop.weights] = {"slow_params": slow} if follows else {}
        torch.cuda.synchronize()
        positions = np.arange(0, SIZE, 2) if is_part else None
        vector = loop.pool.take(SIZE // 2 if is_part else None)
        vector.array.fill(3.0 if mass is not None else 2.0)
        memory.limit_bytes = memory.bytes + extra
        lost = 0
        try:
            loop.boundary.begin_update()
            loop.boundary.deliver_update(Update(vector, mass=mass, positions=positions))
            for _ in range(2):  # An update that is on its way to the device may come a visit later.
                lost += loop.visit().lost_updates
                torch.cuda.synchronize()
        finally:
            memory.limit_bytes = math.inf
        assert loop.boundary.pending_updates == 0
        values = loop.weights.detach().float().cpu()
        assert not follows or torch.equal(values, slow.cpu())
        changed = values[::2] if is_part else values
        seen.add((float(changed.min()), float(changed.max()), lost))
    assert seen <= {(1.0, 1.0, 1), (whole, whole, 0)}
    assert (whole, whole, 0) in seen
    assert ((1.0, 1.0, 1) in seen) == (is_part or follows), "without memory whole vectors are added on the host"
