"""Plain PyTorch reads a checkpoint's weights, and an optimizer's state of another save is never taken with them."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from gossip.errors import CheckpointError
from node import Node
from node.model import checkpoint
from node.model.snapshot import ModelState
from tests.node.storage.stores import drained, notices


class Tied(nn.Module):
    """A model with tied weights, running statistics and an integer, some of it in half precision."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.body, self.head = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("order", torch.randperm(7))

    def forward(self, x):
        return self.head(self.body(self.norm(self.embedding(x)).bfloat16()).float())


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained():
    """Return a model and its optimizer, which has taken a step and so has a state."""
    model = Tied(1)
    optimizer = adam(model)
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def same(one, other):
    """Return True if two models, which may be checkpointed, have the same tensors."""
    ours, theirs = (
        {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in model.state_dict().items()}
        for model in (one, other)
    )
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def moments(optimizer):
    """Return all tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values()]


# Plain PyTorch -------------------------------------------------------------------------------------------------------
class Compiled(nn.Module):
    """A module that is wrapped as by torch.compile, without minutes of compilation."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


def wrapped_for(way, model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if way == "checkpointed":
        model.body = checkpoint_wrapper(model.body)
        return model
    if "parallel" in way:
        model = nn.DataParallel(model) if "threads" in way else nn.parallel.DistributedDataParallel(model)
    return Compiled(model) if "compiled" in way else model


@pytest.mark.parametrize("call", ["save", "export"])
@pytest.mark.parametrize(
    "way",
    [
        *("plain", "compiled", "parallel", "compiled parallel", "threads, parallel", "compiled threads, parallel"),
        "checkpointed",
    ],
)
def test_torch_loads_the_weights_strictly_and_a_wrapped_model_has_the_plain_models_names(
    way, call, quick, tmp_path, world
):
    (model, _), other, loading = trained(), Tied(2), Tied(3)
    with Node(wrapped_for(way, model), config=quick) as node:
        assert node._training.live.state.layout == ModelState(other).layout
        getattr(node, call)(tmp_path / "run")
    other.load_state_dict(load_file(tmp_path / "run.safetensors"))
    assert same(model, other)
    with Node(wrapped_for(way, loading), config=quick) as node:
        node.load(tmp_path / "run")
    assert same(model, loading)


def test_an_export_is_weights_and_nothing_else(quick, tmp_path):
    model, optimizer = trained()
    with Node(model, optimizer, config=quick) as node:
        node.export(tmp_path / "weights")
        node.export(tmp_path / "weights")
        with pytest.raises(CheckpointError, match=r"is a URL, which only node\.save and node.load take"):
            node.export("s3://bucket/weights")
    assert os.listdir(tmp_path) == ["weights.safetensors"]
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as opened:
        assert set(opened.keys()) == set(model.state_dict())
        assert opened.metadata() == {"format": "pt"}
    save(tmp_path / "weights", 1)
    checkpoint.export(tmp_path / "weights", model.state_dict())
    assert sorted(os.listdir(tmp_path)) == ["weights.optimizer", "weights.safetensors"], "no description of others"


def test_arrays_are_exported_by_their_names(quick, tmp_path):
    arrays = {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.float16)}
    with Node(arrays, config=quick) as node:
        node.export(tmp_path / "weights")
    found = load_file(tmp_path / "weights.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {"w": torch.float32, "half": torch.float16}
    assert all(torch.equal(found[name], arrays[name]) for name in arrays)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("call", ["save", "export"])
def test_extra_state_that_is_no_tensor_is_named(call, quick, tmp_path):
    with (
        Node(Extra(2, 2), config=quick) as node,
        pytest.raises(
            CheckpointError, match=r"'_extra_state' of the model is a dict, and safetensors hold tensors alone"
        ),
    ):
        getattr(node, call)(tmp_path / "run")
    assert not os.listdir(tmp_path)


# The optimizer's state -----------------------------------------------------------------------------------------------
def save(path, step, keep=1):
    """Save a checkpoint whose weights and whose optimizer's state are all the number of its step."""
    state = {"state": {0: {"m": torch.full((2,), float(step))}}, "param_groups": []}
    checkpoint.save(path, {"w": torch.full((2,), float(step))}, state, {"steps": step}, keep)


def test_a_state_of_another_save_is_not_taken(tmp_path):
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    (tmp_path / "b.optimizer").replace(tmp_path / "a.optimizer")
    loaded = checkpoint.load(tmp_path / "a")
    assert loaded.tensors["w"].tolist() == [1.0, 1.0]
    assert (loaded.optimizer_state, loaded.lack) == (None, "a.optimizer is of another save")
    loaded = checkpoint.load(tmp_path / "b")
    assert (loaded.optimizer_state, loaded.lack) == (None, "b.optimizer is not beside it")
    (tmp_path / "b.optimizer").write_bytes(b"cut off")
    loaded = checkpoint.load(tmp_path / "b")
    assert (loaded.optimizer_state, loaded.lack) == (None, "b.optimizer cannot be read")


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("renames", range(10))
def test_a_kill_before_any_rename_never_pairs_weights_with_another_steps_state(keep, renames, tmp_path, monkeypatch):
    for step in range(keep):
        save(tmp_path / "run", step, keep)
    done, replace = [], os.replace

    class Kill(BaseException):
        pass

    def killed(*names):
        if len(done) == renames:
            raise Kill
        done.append(names)
        replace(*names)

    monkeypatch.setattr(os, "replace", killed)
    try:
        save(tmp_path / "run", keep, keep)
        is_whole = True
    except Kill:
        is_whole = False
    monkeypatch.undo()
    assert is_whole == (renames >= 3 + 3 * (keep - 1))
    for file in tmp_path.glob("*.safetensors"):  # A kill may omit one of the older ones.
        loaded = checkpoint.load(file)
        step = loaded.meta["steps"]
        assert loaded.tensors["w"].tolist() == [step, step]
        assert bool(loaded.optimizer_state) != bool(loaded.lack)
        if loaded.optimizer_state:
            assert loaded.optimizer_state["state"][0]["m"].tolist() == [step, step]
    newest = checkpoint.load(tmp_path / "run").meta["steps"]
    assert newest == (keep if is_whole else keep - 1)
    save(tmp_path / "run", keep + 1, keep)
    if keep > 1 and not 3 * (keep - 1) < renames < 3 * keep:  # The kill has not parted the newest weights from theirs.
        assert not checkpoint.load(tmp_path / "run.1.safetensors").lack


def test_each_older_checkpoint_keeps_its_state(tmp_path):
    for step in range(4):
        save(tmp_path / "run", step, keep=3)
    for name, step in {"run": 3.0, "run.1": 2.0, "run.2": 1.0}.items():
        path = tmp_path / f"{name}.safetensors"  # "run.1" by itself would be a name with an ending.
        assert checkpoint.load(path).optimizer_state["state"][0]["m"].unique().tolist() == [step]
    assert len(os.listdir(tmp_path)) == 9


def test_weights_without_their_optimizers_state_are_loaded_and_that_is_said_once(quick, tmp_path):
    model, optimizer = trained()
    with Node(model, optimizer, config=quick) as node:
        node.step(samples=7)
        node.save(tmp_path / "run")
    (tmp_path / "run.optimizer").unlink()
    other = Tied(2)
    again = adam(other)
    with Node(other, again, config=quick) as node:
        node.load(tmp_path / "run")
        assert notices(node, "load") == [
            f"{tmp_path / 'run'} is loaded without the optimizer's state, since run.optimizer is not beside it: this "
            "node's own stays."
        ]
    assert same(model, other)
    assert not moments(again)
    with Node(Tied(3), config=quick) as node:  # A node without an optimizer misses nothing.
        node.load(tmp_path / "run")
        assert not notices(node, "load")


def test_an_optimizers_file_is_no_checkpoint(tmp_path):
    save(tmp_path / "a", 1)
    with pytest.raises(
        CheckpointError, match=r"a\.optimizer is an optimizer's state alone: give the checkpoint beside"
    ):
        checkpoint.load(tmp_path / "a.optimizer")
    with pytest.raises(CheckpointError, match=r"an optimizer's file is called so; choose another name"):
        checkpoint.save(tmp_path / "a.optimizer", {}, None, {})
    assert checkpoint.load(tmp_path / "a").optimizer_state is not None


@pytest.mark.parametrize("name", ["run{}.safetensors", "deep/run{}.bin"])
def test_a_store_holds_the_state_and_gives_it_back(name, quick, store, tmp_path):
    model, optimizer = trained()
    url = "faulty://b/" + name
    with Node(model, optimizer, config=quick, state_dir=tmp_path) as node:
        node.step(samples=7)
        for _ in range(2):
            node.save(url.format(""), keep=2)
            drained(node)
        node._training.run.save_before_merge()
        drained(node)
    for place in (*(url.format(word) for word in ("", ".1", ".before-merge")), tmp_path / "before-merge.safetensors"):
        other = Tied(2)
        again = adam(other)
        with Node(other, again, config=quick) as node:
            node.load(place)
            assert not notices(node, "load")
        assert same(model, other)
        assert all(torch.equal(one, two) for one, two in zip(moments(again), moments(optimizer), strict=True))


def test_a_checkpoint_that_cannot_be_sent_stays_with_its_state(quick, store, tmp_path):
    model, optimizer = trained()
    with Node(model, optimizer, config=quick, state_dir=tmp_path) as node:
        store.errors[:] = [PermissionError(13, "Access denied")]
        node.save("faulty://b/run")
        drained(node)
        assert checkpoint.load(tmp_path / "unsent.safetensors").optimizer_state is not None
        node.save("faulty://b/run")
        drained(node)
        assert not list(tmp_path.glob("unsent*"))


def test_an_upload_that_ends_between_two_files_leaves_the_pair_before_it(quick, store, tmp_path):
    model, optimizer = trained()
    with Node(model, optimizer, config=quick, state_dir=tmp_path) as node:
        node.save("faulty://b/run")
        drained(node)
        before = {path: file.getvalue() for path, file in store.store.items()}
        store.errors[:] = [None, None, PermissionError(13, "Access denied")]  # The weights come last.
        node.save("faulty://b/run")
        drained(node)
    assert {path: file.getvalue() for path, file in store.store.items()} == before


# Damaged files -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "spoil", [lambda file: os.truncate(file, 100), lambda file: file.write_bytes(b"\xff" * 100_000)]
)
def test_what_was_loaded_does_not_depend_on_the_file_any_more(spoil, tmp_path):
    model = nn.Linear(100, 100)
    optimizer = adam(model)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "run", model.state_dict(), optimizer.state_dict(), {})
    loaded, expected = checkpoint.load(tmp_path / "run"), [value.clone() for value in moments(optimizer)]
    optimizer.load_state_dict(loaded.optimizer_state)
    for name in ("run.optimizer", "run.safetensors"):
        spoil(tmp_path / name)
    assert all(torch.equal(one, two) for one, two in zip(moments(optimizer), expected, strict=True))
    assert torch.equal(loaded.tensors["weight"], model.weight)
    optimizer.step()


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}},
        {"param_groups": []},
        {"state": [], "param_groups": [{"params": [0, 1]}]},
        {"state": {}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": 2}]},
        {"state": {}, "param_groups": [3]},
        {"state": {}, "param_groups": 3},
        {"optimizers": [3]},
        {"optimizers": 3},
        {},
    ],
    ids=str,
)
def test_a_state_that_torch_would_refuse_is_refused_before_the_weights_change(state, quick, tmp_path):
    model = nn.Linear(4, 2)
    checkpoint.save(tmp_path / "run", nn.Linear(4, 2).state_dict(), state, {"run_id": "ab" * 16, "swarm_samples": 5})
    before = model.weight.detach().clone()
    with Node(model, adam(model), config=quick) as node:
        with pytest.raises(CheckpointError, match=r"is not loaded: its AdamW has other groups of parameters"):
            node.load(tmp_path / "run")
        node.step()
    assert torch.equal(model.weight, before)
