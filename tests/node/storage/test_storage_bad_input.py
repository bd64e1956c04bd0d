"""Checkpoints that a store cannot give, and impossible URLs: one sentence each, and nothing is changed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from fsspec.registry import known_implementations
from torch import nn

from gossip.errors import CheckpointError
from node import Node
from node.model import checkpoint
from node.storage import copies
from node.storage.older import numbered_name
from node.storage.urls import beside, error_text, is_url, public_url
from tests.node.storage.stores import drained, linear
from tests.node.test_bad_input import one_sentence

# Loading --------------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_for_a_while_gives_the_checkpoint(quick, store):
    with Node(linear(2.0), config=quick) as node:
        node.save("faulty://b/run")
        drained(node)
        store.errors[:] = [ConnectionError("cut")] * (copies.ATTEMPTS - 1)
        node.load("faulty://b/run")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "Access denied"), r"The store refuses to give \S+run.safetensors \(access"),
        (ConnectionError("cut"), r"Could not read faulty://b/run.safetensors: cut; check the URL"),
        (OSError(errno.ENOSPC, "No space left"), "no space left in .*, where it is copied first; free room there"),
        (RuntimeError("a\nlong " + "text " * 200), "Could not read faulty://b/run.safetensors: a long text"),
    ],
    ids=["refused", "cut", "full", "of a package"],
)
def test_what_failed_is_said_when_loading(error, sentence, quick, store):
    model = linear(1.0)
    with Node(model, config=quick) as node:
        store().pipe_file("/b/run.safetensors", b"x")
        store.errors[:] = [error] * copies.ATTEMPTS
        with pytest.raises(CheckpointError, match=sentence) as raised:
            node.load("faulty://b/run")
        one_sentence(raised)
        assert not list(node._training.run.own_folder.iterdir())
        node.step()
    assert float(model.weight[0, 0].detach()) == 1.0


def test_what_is_not_there_or_is_damaged_is_said_by_its_url(quick, store):
    with Node(linear(), config=quick) as node:
        with pytest.raises(CheckpointError, match=r"^There is no checkpoint at faulty://b/run.safetensors; check the"):
            node.load("faulty://b/run")
        store().pipe_file("/b/run.safetensors", b"x" * 100)
        with pytest.raises(CheckpointError, match=r"^faulty://b/run.safetensors is cut off, corrupt, or no checkpoint"):
            node.load("faulty://b/run")


def test_another_model_is_refused_by_its_url(quick, store):
    with Node(nn.Linear(3, 3), config=quick) as node:
        node.save("faulty://b/run")
    with (
        Node(linear(), config=quick) as node,
        pytest.raises(CheckpointError, match=r"^faulty://b/run\S+ holds another"),
    ):
        node.load("faulty://b/run")


def test_loading_from_a_store_that_hangs_ends(quick, store, monkeypatch):
    monkeypatch.setattr(copies, "STALL_S", 0.2)
    with Node(linear(), config=quick) as node:
        store.goes_on.clear()
        with pytest.raises(CheckpointError, match=r"the store gives nothing for 0\.2 s; look at it") as raised:
            node.load("faulty://b/run")
        one_sentence(raised)


# What cannot be a checkpoint's place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere://b/run", "begins with 'nowhere', which fsspec does not know: correct it, or install the package"),
        ("lacking://b/run", r"needs a package that is not installed \(install lacking to use it\): install it"),
        ("s3://bucket", r"s3://bucket names no file; give one, as s3://bucket/run\.safetensors"),
        ("faulty://b/folder/", r"names no file; give one, as faulty://b/folder/run\.safetensors"),
        (Path("s3://bucket/run"), "was a URL before it became a Path: give it as text, with two slashes"),
    ],
    ids=["unknown", "lacking", "a bucket", "a folder", "a Path"],
)
def test_a_url_that_cannot_be_is_refused_before_anything_is_written(call, path, sentence, quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"class": "lacking.FileSystem", "err": "Install lacking to use it"}
    monkeypatch.setitem(known_implementations, "lacking", known)
    with Node(linear(), config=quick) as node:
        with pytest.raises(CheckpointError, match=sentence) as raised:
            getattr(node, call)(path)
        one_sentence(raised)
        node.step()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_url_without_fsspec_is_refused_in_a_sentence(call, quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with Node(linear(), config=quick) as node:
        with pytest.raises(CheckpointError, match=r"pip install 'gossip-trainer\[storage\]', or give a path") as raised:
            getattr(node, call)("memory://b/run")
        one_sentence(raised)


def test_a_path_needs_no_fsspec(quick, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with Node(linear(), config=quick) as node:
        node.save(tmp_path / "run")
        node.load(tmp_path / "run")


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3", True, 101])
def test_a_number_of_checkpoints_that_cannot_be_is_refused(keep, quick, tmp_path):
    with Node(linear(), config=quick) as node:
        with pytest.raises(CheckpointError, match="give how many checkpoints to keep, from 1 to 100") as raised:
            node.save(tmp_path / "run", keep=keep)
        one_sentence(raised)
    assert not list(tmp_path.iterdir())


def test_a_local_disk_without_room_is_named_with_the_store(quick, store, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Node(linear(), config=quick) as node:
        monkeypatch.setattr(checkpoint.tensor_file, "write", full)
        with pytest.raises(CheckpointError, match=r"from where it goes to faulty://b/run.safetensors: no space") as got:
            node.save("faulty://b/run")
        one_sentence(got)
        assert not list(node._training.run.own_folder.iterdir())
        monkeypatch.setattr(copies.tempfile, "mkdtemp", full)
        with pytest.raises(CheckpointError, match=r"needs a local file on its way, and no folder for it can be"):
            node.save("faulty://b/run")


def test_keys_in_a_url_are_not_shown():
    assert public_url("ftp://user:word@host/run?token=1") == "ftp://host/run"
    error = ConnectionError("no answer from ftp://user:word@host/run")
    assert "word" not in error_text(error, "ftp://user:word@host/run")


def test_names_of_other_checkpoints():
    assert beside("s3://b/run", "before-merge") == "s3://b/run.before-merge.safetensors"
    assert numbered_name("run.safetensors", 0) == "run.safetensors"
    assert [numbered_name(name, 2) for name in ("run.safetensors", "run.json")] == [
        "run.2.safetensors", "run.2.json",
    ]  # fmt: skip
    assert is_url("simplecache::s3://b/run")
    assert not is_url("runs/s3:/b")
    assert not any(is_url(path) for path in ("run", "/a/b", "C:/run", Path("/a/b"), Path("C:/run")))
