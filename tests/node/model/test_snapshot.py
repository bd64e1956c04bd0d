from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from gossip.errors import LayoutError
from node.model.snapshot import Copies, ModelState
from tests.node.test_bad_input import one_sentence
from tests.node.vectors import mlp, slow_vector, vector_of


@pytest.fixture(autouse=True)
def _same_weights():
    torch.manual_seed(0)


def convnet():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))


# -- weights ----------------------------------------------------------------------------------------------------------
def test_the_vector_is_the_parameters_then_the_float_buffers():
    model = convnet()
    model(torch.randn(5, 1, 8, 8))
    state = ModelState(model)
    assert [s.name for s in state.layout.segments] == [
        *(name for name, _ in model.named_parameters()),
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert state.layout.parameters == sum(p.numel() for p in model.parameters())
    expected = slow_vector([*model.parameters(), model[1].running_mean, model[1].running_var])
    np.testing.assert_array_equal(vector_of(state), expected)


def mixed_kinds():
    """Return half, double, transposed and empty tensors."""
    torch.manual_seed(3)
    return {
        "a": torch.randn(7, 5), "b": torch.randn(6, 4).t(), "c": torch.randn(50).bfloat16(),
        "d": torch.randn(9).double(), "e": torch.zeros(0),
        "f": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }  # fmt: skip


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("make", [convnet, mixed_kinds])
def test_some_elements_are_read_and_added_as_all_of_them_are(make, share):
    """Reads and additions of some elements equal, bit for bit, those of the whole vector."""
    one, other = ModelState(make()), ModelState(make())
    other.write(vector_of(one, full=True))
    rng = np.random.default_rng(int(100 * share))
    size = one.size()
    positions = np.sort(rng.permutation(size)[: max(1, int(share * size))])
    held = np.empty(positions.size, np.float32)
    assert one.begin_read_at(held, positions).done()
    np.testing.assert_array_equal(held, vector_of(one)[positions])
    shift, whole = rng.standard_normal(positions.size).astype(np.float32), np.zeros(size, np.float32)
    whole[positions] = shift
    one.add_at(shift, positions)
    other.add(whole)
    np.testing.assert_array_equal(vector_of(one), vector_of(other))


def test_positions_beyond_the_model_are_a_changed_model():
    state = ModelState({"x": torch.zeros(5)})
    with pytest.raises(LayoutError, match="outside"):
        state.begin_read_at(np.empty(2, np.float32), np.array([1, 5]))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_add_moves_every_element_and_a_later_forward_sees_it(memory_format):
    model = convnet()
    before = vector_of(ModelState(model))
    state = ModelState(model.to(memory_format=memory_format))
    np.testing.assert_array_equal(vector_of(state), before)
    shift = np.random.default_rng(0).standard_normal(state.size()).astype(np.float32)
    assert state.add(shift).done()
    np.testing.assert_array_equal(vector_of(state), before + shift)
    np.testing.assert_array_equal(model[3].bias.detach().numpy(), (before + shift)[state.layout.parameters - 10 :][:10])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_read_is_a_copy_that_later_steps_do_not_change():
    model = mlp()
    state = ModelState(model)
    out = np.empty(state.size(), np.float32)
    pending = state.begin_read(out)
    assert pending.done()
    before = out.copy()
    with torch.no_grad():
        model[0].weight.zero_()
    np.testing.assert_array_equal(out, before)
    assert not np.array_equal(vector_of(state), before)


def test_each_tensor_keeps_its_dtype_and_is_rounded_once():
    model = nn.ParameterDict(
        {
            "b16": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            "f64": nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64)),
        }
    )
    state = ModelState(model)
    assert {s.name: s.dtype for s in state.layout.segments} == {"b16": "bfloat16", "f64": "float64"}
    shift = np.full(5, 2.0**-7 + 2.0**-9, np.float32)
    state.add(shift)
    assert model["b16"].dtype == torch.bfloat16
    assert model["f64"].dtype == torch.float64
    assert torch.all(model["b16"].float() == 1 + 2.0**-7)  # the nearest of the neighbours 2**-7 apart
    assert torch.all(model["f64"] == torch.full((2,), 1 / 3, dtype=torch.float64) + float(shift[0]))
    vector = vector_of(state)
    state.write(vector)
    np.testing.assert_array_equal(vector_of(state, full=True), vector)


def test_buffers_that_are_replaced_and_a_loaded_state_dict_are_followed():
    model, other = convnet(), convnet()
    state = ModelState(model)
    model[1].running_mean = torch.full((4,), 7.0)
    model._apply(lambda tensor: tensor.clone())  # model.to(device) does the same.
    assert np.all(vector_of(state)[-8:-4] == 7.0)
    model.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(vector_of(state), vector_of(ModelState(other)))


# -- mappings ---------------------------------------------------------------------------------------------------------
class Foreign:
    """An array of another framework."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_of_a_mapping_are_shared_and_never_copied():
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "step": np.array([3]),
        "h": np.ones(2, np.float16),
        "t": torch.zeros(2),
        "f": Foreign(np.full(2, 5.0, np.float32)),
    }
    state = ModelState(arrays)
    kinds = [(n, "parameter") for n in ("w", "h", "t", "f")]
    assert [(s.name, s.kind) for s in state.layout.segments] == [*kinds, ("step", "bits")]
    assert vector_of(state).tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 0, 0, 5, 5]
    state.add(np.ones(12, np.float32))
    assert arrays["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert arrays["h"].tolist() == [2, 2]
    assert arrays["t"].tolist() == [1, 1]
    assert arrays["f"].array.tolist() == [6, 6]
    assert arrays["step"].tolist() == [3]


def read_only():
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    return array


class Older(Foreign):
    """An array from before DLPack could mark memory as read-only."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def test_an_array_that_cannot_say_what_may_be_written_is_taken_at_its_word():
    array = np.ones(3, np.float32)
    ModelState({"w": Older(array)}).add(np.ones(3, np.float32))
    assert array.tolist() == [2, 2, 2]


ImmutableArray = type("ArrayImpl", (Foreign,), {"__module__": "jaxlib._jax"})  # it lends its memory out as writable


@pytest.mark.usefixtures("world")
def test_a_module_of_the_first_fsdp_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    cpu, alone = torch.device("cpu"), ShardingStrategy.NO_SHARD  # torch's own choice for one process
    model = FullyShardedDataParallel(nn.Linear(4, 3), device_id=cpu, sharding_strategy=alone, use_orig_params=True)
    with pytest.raises(LayoutError, match=r"'FullyShardedDataParallel' is sharded by .*fully_shard instead"):
        ModelState(model)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({}, "nothing to average"),
        ({"n": torch.arange(3)}, "nothing to average"),
        (nn.ReLU(), "nothing to average"),
        ({"w": read_only()}, "read-only"),
        ({"w": Foreign(read_only())}, "read-only"),
        ({"w": ImmutableArray(np.ones(3, np.float32))}, r"'w' is one of JAX, .* node\.adapters\.jax\.Pytree"),
        ({"w": np.ones(3, np.longdouble)}, "cannot be shared"),
        ({"w": [1.0, 2.0]}, "'w' is list"),
        ({"w": {"kernel": np.ones(3)}}, "'w' is a mapping itself"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "complex64, .*: keep it as torch.view_as_real"),
        ({"w": torch.eye(2).to_sparse()}, "is sparse, .*: keep it as to_dense"),
        ({"w": torch.ones(2, device="meta")}, "has no memory, .*: give the model some"),
        ({1: torch.ones(2)}, "must be text"),
        (nn.LazyLinear(3), "run one batch"),
        ([torch.ones(2)], "not list"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_in_a_sentence(model, sentence):
    with pytest.raises(LayoutError, match=sentence) as error:
        ModelState(model)
    one_sentence(error)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(LayoutError, match="none of this model's tensors"):
        ModelState(mlp(), torch.optim.SGD(mlp().parameters(), 0.1))


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros(16, 8))


def replace_module(model):
    model[2] = nn.Linear(16, 3)


def reshape_parameter(model):
    model[0].weight.data = torch.zeros(8, 16)


def change_dtype(model):
    model.to(torch.bfloat16)


def remove_parameter(model):
    model[2].bias = None


def add_layer(model):
    model.add_module("head", nn.Linear(3, 2))


@pytest.mark.parametrize(
    "change", [replace_parameter, replace_module, reshape_parameter, change_dtype, remove_parameter, add_layer]
)
def test_a_model_that_changed_while_running_is_refused_and_not_read_wrongly(change):
    model = mlp()
    state = ModelState(model)
    out = np.zeros(state.size(), np.float32)
    model.add_module("activation", nn.ReLU())  # This layer has nothing to exchange.
    state.read(out)
    out.fill(0.0)
    change(model)
    with pytest.raises(LayoutError, match="make a new Node") as error:
        state.read(out)
    one_sentence(error)
    assert not out.any()


def test_an_array_replaced_in_its_mapping_is_refused():
    arrays = {"w": np.zeros(3, np.float32)}
    state = ModelState(arrays)
    arrays["w"] = np.ones(3, np.float32)
    with pytest.raises(LayoutError, match="write into it in place"):
        state.add(np.ones(3, np.float32))


def test_a_vector_of_the_wrong_size_changes_nothing():
    state = ModelState(mlp())
    before = vector_of(state)
    for size in (before.size - 1, before.size + 1):
        wrong = np.ones(size, np.float32)
        for call in (state.read, state.add, state.write):
            with pytest.raises(LayoutError, match="elements where"):
                call(wrong)
    np.testing.assert_array_equal(vector_of(state), before)


# -- devices ----------------------------------------------------------------------------------------------------------
class Event:
    def __init__(self):
        self.ready = False

    def query(self):
        return self.ready

    def synchronize(self):
        self.ready = True


def test_a_copy_is_done_when_all_its_devices_are():
    events = (Event(), Event())
    pending = Copies(events)
    assert not pending.done()
    events[0].ready = True
    assert not pending.done()
    pending.wait()
    assert pending.done()


@pytest.mark.cuda
def test_on_cuda_a_read_is_of_its_moment_and_an_add_is_seen_by_the_next_step():
    host = OrderedDict((name, torch.randn(1000, 1000)) for name in "abcd")
    split = {name: tensor.cuda() if name in "ad" else tensor.clone() for name, tensor in host.items()}
    model = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in split.items()})  # cuda, cpu, cpu, cuda
    state = ModelState(model)
    out = state.buffer(state.size())
    pending = state.begin_read(out)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pending.wait()
    np.testing.assert_array_equal(out, slow_vector(host.values()))
    adding = state.add(out)
    again = np.empty_like(out)
    state.read(again)
    assert adding.done()
    np.testing.assert_array_equal(again, out)
