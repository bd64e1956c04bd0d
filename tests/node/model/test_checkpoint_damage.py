"""A checkpoint that is cut off, corrupt, a pickle or not there is refused in one sentence."""

import contextlib
import json
import os
import pickle

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from gossip.errors import CheckpointError
from node.model import checkpoint


def framed(header):
    return len(header).to_bytes(8, "little") + header.encode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run.safetensors"
    weight = torch.randn(20, 30)
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": weight * 2}}, "param_groups": [{"betas": (0.9, 0.99)}]}
    checkpoint.save(path, {"w": weight, "tied": weight, "running": torch.arange(3)}, state, {"steps": 1})
    return path.read_bytes()


def test_a_file_cut_off_anywhere_is_refused(tmp_path, whole):
    path = tmp_path / "run.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = {*range(12), *range(12, header, 97), header - 1, header, header + 1, *range(header, len(whole), 211)}
    for cut in sorted({*cuts, len(whole) - 1}):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"is cut off, corrupt, or no checkpoint; use another one\.$"):
            checkpoint.load(path)


@given(st.data())
def test_a_corrupt_header_is_refused_or_read_but_never_anything_else(tmp_path_factory, whole, data):
    header = 8 + int.from_bytes(whole[:8], "little")
    corrupt = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        corrupt[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("corrupt") / "run.safetensors"
    path.write_bytes(corrupt)
    with contextlib.suppress(CheckpointError):
        assert isinstance(checkpoint.load(path), checkpoint.Checkpoint)


@pytest.mark.parametrize(
    "header",
    [
        (1 << 60).to_bytes(8, "little"),  # States a header of 2^60 bytes.
        framed('{"w": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}'),
        framed('{"w": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4]}}'),
        framed('{"w": {"dtype": "F32", "shape": [4294967296, 4294967296, 4294967296], "data_offsets": [0, 4]}}'),
    ],
    ids=["the header", "the file", "a shape", "beyond 64 bits"],
)
def test_a_file_that_claims_terabytes_is_refused_before_they_are_asked_for(header, tmp_path):
    path = tmp_path / "run.safetensors"
    path.write_bytes(header + bytes(4))
    with pytest.raises(CheckpointError, match="is cut off, corrupt, or no checkpoint"):
        checkpoint.load(path)


def header_with(document):
    return {"gossip": document if isinstance(document, str) else json.dumps(document)}


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "{",
        {},
        {"version": 3},
        {"version": 3, "meta": {}},
        {"version": 3, "save": 5, "meta": {}},
        {"version": 3, "save": {"$tuple": []}, "meta": {}},
        {"version": 3, "save": None, "meta": None},
        {"version": 3, "save": None, "meta": []},
        {"version": 3, "save": None, "meta": {"$tuple": []}},
        {"version": 3, "save": None, "meta": {"$float": "1"}},
        {"version": 3, "save": None, "meta": {"$tensor": "w"}},
        {"version": 3, "save": None, "meta": {"x": {"$tensor": "w"}}},
        {"version": 3, "save": None, "meta": {"x": {"$float": "much"}}},
        {"version": 3, "save": None, "meta": {"x": {"$float": None}}},
        {"version": 3, "save": None, "meta": {"x": {"$float": 10**400}}},
        {"version": 3, "save": None, "meta": {"x": {"$map": 3}}},
        {"version": 3, "save": None, "meta": {"x": {"$map": [3]}}},
        {"version": 3, "save": None, "meta": {"x": {"$map": [[[], 1]]}}},
        {"version": 3, "save": None, "meta": {"x": {"$tuple": 3}}},
        "[" * 100_000,
    ],
)
def test_a_header_that_nobody_wrote_is_one_sentence(tmp_path, document):
    path = tmp_path / "run.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path, metadata=header_with(document))
    with pytest.raises(CheckpointError, match="is cut off, corrupt, or no checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"save": None},
        {"save": {"$float": "1"}},
        {"optimizer": None},
        {"optimizer": []},
        {"optimizer": {"$tuple": []}},
        {"optimizer": {"$tensor": "w"}},
        {"optimizer": {"x": {"$tensor": "missing"}}},
        {"optimizer": {"x": {"$tensor": []}}},
        {"optimizer": {"$map": [[[], 1]]}},
    ],
    ids=str,
)
def test_a_header_of_an_optimizer_that_nobody_wrote_leaves_the_weights(tmp_path, fields):
    checkpoint.save(tmp_path / "run", {"w": torch.ones(3)}, {"state": {}, "param_groups": []}, {})
    with safe_open(tmp_path / "run.optimizer", framework="pt") as opened:
        document = json.loads(opened.metadata()["gossip"]) | fields
    for key in () if fields else ("save",):
        del document[key]
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "run.optimizer", metadata=header_with(document))
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.tensors["w"].tolist() == [1.0, 1.0, 1.0]
    assert (loaded.optimizer_state, loaded.lack) == (None, "run.optimizer cannot be read")


@pytest.mark.parametrize("version", [1, 2, 4, "3", None, [3]])
def test_another_format_is_refused_by_its_number(tmp_path, version):
    metadata = header_with({"version": version, "optimizer": None, "tied": {}, "meta": {}})
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "run.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match="this version reads 3: load it with the version that wrote it"):
        checkpoint.load(tmp_path / "run")


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("name", ["run.safetensors", "run.pt"])
@pytest.mark.parametrize("writer", ["pickle", "torch", "torch before 1.6"])
def test_a_pickle_is_refused_and_never_opened(tmp_path, name, writer):
    path, mark = tmp_path / name, tmp_path / "mark"
    if writer == "pickle":
        path.write_bytes(pickle.dumps({"w": Trap(mark)}))
    else:
        torch.save({"w": torch.ones(3), "trap": Trap(mark)}, path, _use_new_zipfile_serialization=writer == "torch")
    with pytest.raises(CheckpointError, match="is a pickle, which may run code"):
        checkpoint.load(path)
    assert not mark.exists()


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*run\.safetensors; check the path"):
        checkpoint.load(tmp_path / "run")
