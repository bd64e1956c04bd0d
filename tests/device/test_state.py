"""A model's state on a device, apart from its mixes: parts, scalars, backups, checkpoints, ranks."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from gossip.arithmetic.subsets import ALL
from gossip.averaging.vectors import Cut
from gossip.errors import LayoutError
from node.model import checkpoint
from node.model.device.uploads import Uploads
from node.model.optimizers import Optimizers
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.ranks.channel import Channel
from node.ranks.optimizers import RankOptimizers
from node.ranks.ranks import Ranks
from tests.device.cuda import simulated
from tests.node.conftest import world  # noqa: F401, a fixture
from tests.node.vectors import mlp, vector_of

cuda = pytest.mark.cuda


def trained(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


# -- a device without streams ------------------------------------------------------------------------------------------
def test_parts_are_read_and_added_on_mps():
    with simulated("mps"):
        model = mlp().to("mps")
        there, here = ModelState(model), ModelState(mlp())
        there.write(np.arange(there.size(), dtype=np.float32))
        here.write(np.arange(there.size(), dtype=np.float32))
        places = np.array([3, 7, 130, 150, there.size() - 1])
        for state in (there, here):
            state.add_at(np.ones(5, np.float32), places)
            state.add(np.ones(state.size(), np.float32))
            state.merge(np.zeros(state.size(), np.float32), 0.5)
        out = np.empty(5, np.float32)
        there.begin_read_at(out, places)
        assert model[0].weight.device.type == "mps"
        np.testing.assert_array_equal(vector_of(there), vector_of(here))
        np.testing.assert_array_equal(out, vector_of(here)[places])


# -- positions and the optimizer's scalars -----------------------------------------------------------------------------
@cuda
def test_positions_of_a_cut_go_to_the_device_once_and_those_of_a_few_cuts_stay_there(costs):
    state = ModelState(mlp().cuda())
    places = np.arange(0, state.size(), 3)
    out = state.buffer(places.size)
    costs.reset()
    for _ in range(2):
        state.begin_read_at(out, places).wait()
    costs.check(up=places.nbytes)
    cuts = [places.copy() for _ in range(10)]
    costs.reset()
    for cut in cuts:
        state.prepare_positions(cut)
    assert [state.has_positions(cut) for cut in cuts] == [False] * 6 + [True] * 4
    costs.check(peak=4 * places.nbytes)


@cuda
def test_the_optimizers_scalars_come_in_one_copy_that_nobody_waits_for(costs):
    model = mlp().cuda()
    state = ModelState(model, trained(model, fused=True))
    costs.reset()
    assert state.recent_optimizer_scalars() is None
    torch.cuda.synchronize()
    assert state.recent_optimizer_scalars() == {"step": 1.0}
    costs.check(waits=0)
    assert state.optimizer_scalars() == {"step": 1.0}
    costs.check(waits=1)


def test_parameters_that_are_empty_on_this_rank_are_refused():
    model = mlp()
    model[0].weight.ds_shape = model[0].weight.shape  # DeepSpeed's ZeRO-3 leaves a weight in this state.
    model[0].weight.data = torch.empty(0)
    with pytest.raises(LayoutError, match=r"Parameter '0\.weight' has no elements on this rank: DeepSpeed's ZeRO-3"):
        ModelState(model)


# -- memory ------------------------------------------------------------------------------------------------------------
@cuda
def test_a_checkpoint_of_a_model_on_the_device_has_each_tensor_in_its_type(tmp_path):
    model = mlp().cuda()
    model.register_buffer("small", torch.tensor([1.5, 2.5], dtype=torch.bfloat16, device="cuda"))
    model.register_buffer("count", torch.tensor(7, device="cuda"))
    optimizer = trained(model)
    checkpoint.save(tmp_path / "run", model.state_dict(), optimizer.state_dict(), {"steps": 3})
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.meta == {"steps": 3}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.tensors[name], value.cpu())
        assert loaded.tensors[name].dtype == value.dtype
    moments = optimizer.state[model[0].weight]["exp_avg"].cpu()
    assert torch.equal(loaded.optimizer_state["state"][0]["exp_avg"], moments)


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(VectorPool, "MAPPED_ELEMENTS", 10)
    return VectorPool(ModelState(mlp().cuda()))


@cuda
def test_page_locked_memory_is_at_hand_once_a_snapshot_and_its_difference_have_it(pool):
    size = pool.state.size()
    assert not pool.has_free(size)
    pool.reserve(size)
    assert pool.has_free(size)
    first, second = pool.take(), pool.take()
    assert not pool.has_free(size)
    pool.give(first)
    assert not pool.has_free(size)
    pool.give(second)
    assert pool.has_free(size)


@cuda
def test_a_part_finds_its_memory_and_its_positions_and_nothing_else_is_page_locked(accelerator, costs, pool):
    places = np.arange(0, pool.state.size(), 3)
    cut, copied = Cut(ALL, places), places.size + 20
    assert not pool.has_free(copied, cut)
    pool.reserve(copied, cut)
    assert pool.has_free(copied, cut)
    costs.reset()
    if accelerator is not None:
        accelerator.locking_bytes = 1
    snapshot, difference, scratch = pool.take(copied), pool.take(places.size), pool.take_scratch(pool.state.size())
    torch.cuda.synchronize()
    pool.state.add_at(difference.array, places)
    assert [torch.from_numpy(one.array).is_pinned() for one in (snapshot, difference, scratch)] == [True, True, False]
    costs.check(waits=0)


@cuda
def test_an_optimizers_state_from_another_rank_goes_into_the_memory_that_is_there():
    """A captured step refers to it by address."""
    model = mlp().cuda()
    optimizer = trained(model, fused=True)
    weight = model[0].weight
    held = dict(optimizer.state[weight])
    ranks = mock.Mock(spec=Ranks, broadcast=lambda host: host.fill_(5.0))
    optimizers = RankOptimizers(Optimizers(optimizer), ranks, 10**6)
    optimizers.send()
    [(_, described)] = [call.args for call in ranks.send_command.call_args_list]

    def filled(before):
        optimizer.state[weight] = before
        optimizers.fill(described)
        return optimizer.state[weight]

    taken = filled(held)
    assert all(taken[key] is held[key] for key in held)
    assert float(taken["exp_avg"].sum()) == 5.0 * weight.numel()
    fresh = filled({})
    assert all(fresh[key].is_cuda and fresh[key] is not held[key] for key in held)
    wider = filled({key: torch.zeros(2, device="cuda") for key in held})
    assert [wider[key].shape for key in held] == [held[key].shape for key in held]


@pytest.fixture
def sweeping(simulated_device, costs, monkeypatch):
    """A model of 600 ones whose portions have 50 elements, its state, and a page-locked vector of threes."""
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 50)
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(600, device="cuda"))})
    state = ModelState(model)
    pull = state.buffer(600)
    pull.fill(3.0)
    costs.reset()
    simulated_device.queues.pace = 0.0
    return model, state, pull


def weights_of(model):
    torch.cuda.synchronize()
    return set(model["w"].tolist())


@cuda
def test_values_are_added_a_few_portions_at_a_boundary_and_nothing_waits(accelerator, costs, sweeping):
    model, state, pull = sweeping
    boundaries = 1
    while not state.add_scaled(pull, 2.0, 1):
        boundaries += 1
        accelerator.synchronize()
    assert boundaries == 4, "twelve portions, four at a time, after a first boundary that has none"
    costs.check(waits=0, peak=4 * (4 * 50 + 50))  # Four portions, and what the addition takes.
    assert weights_of(model) == {7.0}
    assert not state.add_scaled(pull, 2.0, 1)
    assert weights_of(model) == {7.0}, "the next addition begins with an upload"


@cuda
def test_values_that_change_while_they_are_uploaded_are_uploaded_again(accelerator, sweeping):
    model, state, pull = sweeping
    assert not state.add_scaled(pull, 2.0, 1)
    accelerator.synchronize()
    pull.fill(1.0)  # In a node another thread does this.
    assert not state.add_scaled(pull, 2.0, 2)
    accelerator.synchronize()
    pull[:300] = 4.0
    assert not state.add_scaled(pull, 2.0, 3)
    accelerator.synchronize()
    pull[:] = 1.0
    pull[300:] = 5.0
    while not state.add_scaled(pull, 2.0, 4):
        accelerator.synchronize()
    assert weights_of(model) == {3.0, 11.0}
    assert model["w"][:300].tolist() == [3.0] * 300


@cuda
def test_tensors_that_find_no_memory_are_added_once_while_others_are_still_swept(accelerator, sweeping):
    model = nn.ParameterList([torch.ones(600, device="cuda"), torch.ones(1), torch.ones(20, device="cuda")])
    state = ModelState(model)
    pull = state.buffer(621)
    pull.fill(3.0)
    accelerator.memory.refuse = lambda size: size <= 4 * 20  # The last tensor finds no memory.
    while not state.add_scaled(pull, 2.0, 1):
        accelerator.synchronize()
    accelerator.memory.refuse = lambda size: False
    assert {value for tensor in model for value in tensor.tolist()} == {7.0}


@cuda
def test_a_model_that_moves_ends_the_addition_in_progress_and_takes_an_update_where_it_is(accelerator, sweeping):
    model, state, pull = sweeping
    assert not state.add_scaled(pull, 2.0, 1)
    upload = state.begin_upload(pull)
    accelerator.synchronize()
    model.to("cpu")
    assert state.add_scaled(pull, 2.0, 1)
    upload.add()
    assert set(model["w"].tolist()) == {4.0}


def test_vectors_of_ranks_go_over_the_models_device(monkeypatch, world):  # noqa: F811
    """The current device would be the first one on every rank that has not called set_device."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for place, expected in ((None, "cuda:0"), (torch.device("cuda", 1), "cuda:1")):
        channel = Channel(torch.distributed.group.WORLD)
        channel.device = place
        channel.open()
        channel.close()
        assert str(channel.vector_device) == expected
