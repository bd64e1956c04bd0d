"""Round trips of checkpoints, and failed saves, which leave the previous file in place."""

import fcntl
import json
import math
import os
import resource
import threading

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossip.errors import CheckpointError
from node.model import checkpoint
from tests.node.vectors import train


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


# Round trips ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path, make, steps):
    model = model_of(0)
    optimizer = make(model.parameters())
    train(model, optimizer, steps, seed=1)
    checkpoint.save(tmp_path / "run", model.state_dict(), optimizer.state_dict(), {"steps": steps})
    expected = train(model, optimizer, 5, seed=2)

    other = model_of(1)
    again = make(other.parameters())
    loaded = checkpoint.load(tmp_path / "run")
    other.load_state_dict(loaded.tensors)
    again.load_state_dict(loaded.optimizer_state)
    assert train(other, again, 5, seed=2) == expected
    assert loaded.meta == {"steps": steps}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers() | st.sampled_from(["$map", "$tensor"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5).filter(lambda key: not key.startswith("$")), plain, max_size=4))
def test_plain_data_comes_back_as_it_was(tmp_path_factory, meta):
    path = tmp_path_factory.mktemp("plain") / "run"
    checkpoint.save(path, {}, None, meta)
    back = checkpoint.load(path).meta
    assert back == meta
    assert repr(back) == repr(meta)  # also True apart from 1, and (1,) from [1]


def test_numbers_that_json_lacks_come_back(tmp_path):
    meta = {"loss": math.nan, "best": -math.inf, "lr": np.float32(0.5), "n": np.int64(3), "ok": np.bool_(True)}
    checkpoint.save(tmp_path / "run", {}, None, meta)
    back = checkpoint.load(tmp_path / "run").meta
    assert math.isnan(back.pop("loss"))
    assert back == {"best": -math.inf, "lr": 0.5, "n": 3, "ok": True}
    strict = (tmp_path / "run.json").read_text()
    json.loads(strict, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16),
    *(torch.uint8, torch.bool),
]


def test_every_type_and_shape_is_what_the_library_reads(tmp_path):
    tied = torch.randn(100, 100)
    tensors = {"embedding": tied, "head": tied, "row": tied[0], "across": tied.t()}
    for dtype in DTYPES:
        values = torch.arange(6).to(dtype)
        tensors |= {f"{dtype}.flat": values, f"{dtype}.scalar": values[3].clone(), f"{dtype}.none": values[:0]}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).t()
    tensors["strided"] = torch.arange(6.0)[::2]
    tensors["conjugate"] = torch.tensor([1 + 2j]).conj()
    tensors["parameter"] = nn.Parameter(torch.ones(2))
    tensors["ünïcode/and spaces"] = torch.ones(1)
    checkpoint.save(tmp_path / "run", tensors, None, {})
    ours = checkpoint.load(tmp_path / "run").tensors
    library = safetensors.torch.load_file(tmp_path / "run.safetensors")
    assert set(ours) == set(library) == set(tensors)
    for name, tensor in tensors.items():
        for back in (ours[name], library[name]):
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(back.to(torch.complex128), tensor.detach().to(torch.complex128)), name


def test_a_checkpoint_is_as_readable_as_any_file_of_its_owner(tmp_path):
    (tmp_path / "any").touch()
    checkpoint.save(tmp_path / "run", {"w": torch.ones(1)}, None, {})
    modes = {(tmp_path / name).stat().st_mode for name in ("any", "run.safetensors", "run.json")}
    assert len(modes) == 1


def test_the_json_beside_describes_the_checkpoint(tmp_path):
    model = model_of(0)
    state = OPTIMIZERS["adam"](model.parameters()).state_dict()
    checkpoint.save(tmp_path / "new" / "run", model.state_dict(), state, {"steps": 7})
    assert sorted(os.listdir(tmp_path / "new")) == ["run.json", "run.optimizer", "run.safetensors"]
    described = json.loads((tmp_path / "new" / "run.json").read_text())
    assert len(described.pop("save")) == 32
    assert described == {
        "checkpoint": "run.safetensors",
        "version": 3,
        "elements": sum(t.numel() for t in model.state_dict().values()),
        "meta": {"steps": 7},
    }


@pytest.mark.parametrize("name", ["a.st", "run.v1", "weights.json", "b.safetensors"])
def test_a_name_with_an_ending_is_the_name_of_the_file(name, tmp_path):
    checkpoint.save(tmp_path / name, {"w": torch.ones(1)}, None, {"steps": 7})
    beside = "b.json" if name == "b.safetensors" else name + ".json"
    assert sorted(os.listdir(tmp_path)) == sorted([name, beside])
    assert checkpoint.load(tmp_path / name).meta == {"steps": 7}
    assert torch.equal(checkpoint.load(tmp_path / name).tensors["w"], torch.ones(1))


# What cannot be saved ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tensors", "state", "meta", "sentence"),
    [
        ({}, {"state": {0: {"hook": print}}, "param_groups": []}, {}, r"'state\.0\.hook' in the optimizer's state"),
        ({}, {"state": {}, "param_groups": [{"betas": {1, 2}}]}, {}, r"'param_groups\.0\.betas'.* is set"),
        ({}, None, {"x": torch.ones(1)}, "'x' in meta is Tensor"),
        ({}, None, {"x": b""}, "'x' in meta is bytes"),
        ({"__metadata__": torch.ones(1)}, None, {}, "rename it"),
        ({"w": torch.ones(1, dtype=torch.complex128)}, None, {}, "w is torch.complex128"),
        ({"w": torch.ones(2, 2).to_sparse()}, None, {}, "w is .*sparse"),
        ({"w": torch.ones(2, device="meta")}, None, {}, "w is .*meta"),
    ],
)
def test_what_cannot_be_written_is_named_and_nothing_is_touched(tmp_path, tensors, state, meta, sentence):
    checkpoint.save(tmp_path / "run", {"w": torch.ones(1)}, None, {"steps": 1})
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.save(tmp_path / "run", tensors, state, meta)
    assert checkpoint.load(tmp_path / "run").meta == {"steps": 1}
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.safetensors"]


def test_a_file_of_settings_is_not_overwritten_by_the_description(tmp_path):
    (own := tmp_path / "run.json").write_text('{"rate": 0.1}')
    with pytest.raises(CheckpointError, match=r"run\.json is no checkpoint's; choose another name"):
        checkpoint.save(tmp_path / "run", {}, None, {})
    assert own.read_text() == '{"rate": 0.1}'
    own.write_text("")  # It is no JSON, as a full disk may leave it.
    for _ in range(2):
        checkpoint.save(tmp_path / "run", {}, None, {})


def test_a_directory_is_no_place_for_a_checkpoint(tmp_path):
    for call in (lambda p: checkpoint.save(p, {}, None, {}), checkpoint.load):
        with pytest.raises(CheckpointError, match="is a directory; give a file name, as in"):
            call(tmp_path)
    (tmp_path / "run.safetensors").mkdir()
    (tmp_path / "other.json").mkdir()
    for name in ("run", "other"):
        with pytest.raises(CheckpointError, match="no regular file"):
            checkpoint.save(tmp_path / name, {}, None, {})
    with pytest.raises(CheckpointError, match="no regular file"):
        checkpoint.load(tmp_path / "run")


def test_a_path_below_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Could not save to .*; nothing was written; choose another path\.$"):
        checkpoint.save(tmp_path / "file" / "run", {}, None, {})
    with pytest.raises(CheckpointError, match=r"Could not read|no checkpoint at"):
        checkpoint.load(tmp_path / "file" / "run")


@pytest.mark.parametrize("limit", [0, 100, 4096, 500_000, 1_000_000])
def test_a_file_that_cannot_grow_leaves_the_previous_checkpoint(tmp_path, limit):
    # RLIMIT_FSIZE cuts the write off at a chosen byte (EFBIG), without needing root or a disk to fill.
    path = tmp_path / "run.safetensors"
    checkpoint.save(path, {"w": torch.ones(1000)}, None, {"steps": 1})
    before = path.read_bytes(), path.with_suffix(".json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(path, {"w": torch.ones(1_000_000)}, None, {"steps": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == (
        f"Could not save to {path}: file too large; the previous checkpoint is intact; "
        "free room or choose another path."
    )
    assert (path.read_bytes(), path.with_suffix(".json").read_bytes()) == before
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.safetensors"]
    checkpoint.save(path, {"w": torch.ones(1000)}, None, {"steps": 3})
    assert checkpoint.load(path).meta == {"steps": 3}


# Kills and rivals ----------------------------------------------------------------------------------------------------
def test_what_a_killed_save_left_is_swept_once_no_other_writes(tmp_path):
    """test_plain_checkpoint.py has kills between the renames; a kill before them leaves a part of a file."""
    left = tmp_path / ".run.safetensors.killed.tmp"
    left.mkdir()
    (left / "run.safetensors").write_bytes(b"cut off")
    rival = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(rival, fcntl.LOCK_SH)
    checkpoint.save(tmp_path / "run", {"w": torch.ones(1)}, None, {})
    assert left.exists(), "it may be the rival's"
    os.close(rival)
    checkpoint.save(tmp_path / "run", {"w": torch.ones(1)}, None, {})
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.safetensors"]


def test_rivals_saving_to_one_path_at_once_all_succeed_and_one_stays(tmp_path):
    failures = []

    def save(number):
        try:
            for _ in range(15):
                checkpoint.save(tmp_path / "run", {"w": torch.full((50_000,), float(number))}, None, {"who": number})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.tensors["w"].unique().tolist() == [loaded.meta["who"]]
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.safetensors"]
