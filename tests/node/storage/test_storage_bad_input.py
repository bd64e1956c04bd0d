"""Checkpoints that a store cannot give, and impossible URLs: one sentence each, and nothing is changed."""

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
from tests.node.storage.stores import save_each, weight_of
from tests.node.test_bad_input import one_sentence

# Loading --------------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_for_a_while_gives_the_checkpoint(store, node):
    save_each(node, 2.0)
    store.errors[:] = [ConnectionError("cut")] * (copies.ATTEMPTS - 1)
    node.load("faulty://b/run")
    assert not store.errors


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
def test_a_failed_load_says_why_and_changes_nothing(error, sentence, store, node):
    before = weight_of(node)
    store().pipe_file("/b/run.safetensors", b"x")
    store.errors[:] = [error] * copies.ATTEMPTS
    with pytest.raises(CheckpointError, match=sentence) as raised:
        node.load("faulty://b/run")
    one_sentence(raised)
    assert not list(node._training.run.own_folder.iterdir())
    node.step()
    assert weight_of(node) == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"^There is no checkpoint at faulty://b/run.safetensors; check the"),
        ("junk", r"^faulty://b/run.safetensors is cut off, corrupt, or no checkpoint"),
        ("another model", r"^faulty://b/run\S+ holds another"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_named_by_its_url(content, sentence, quick, store, node):
    if content == "junk":
        store().pipe_file("/b/run.safetensors", b"x" * 100)
    elif content == "another model":
        with Node(nn.Linear(3, 3), config=quick) as other:
            other.save("faulty://b/run")
    with pytest.raises(CheckpointError, match=sentence):
        node.load("faulty://b/run")


def test_loading_from_a_store_that_hangs_ends(store, node, monkeypatch):
    monkeypatch.setattr(copies.LocalCopy, "stall_s", 0.2)
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
def test_a_url_that_cannot_be_is_refused_before_anything_is_written(call, path, sentence, node, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"class": "lacking.FileSystem", "err": "Install lacking to use it"}
    monkeypatch.setitem(known_implementations, "lacking", known)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        getattr(node, call)(path)
    one_sentence(raised)
    node.step()
    assert not list(tmp_path.iterdir())


def test_without_fsspec_paths_are_taken_and_urls_refused_in_a_sentence(node, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for call in (node.save, node.load):
        call(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"pip install 'gossip-trainer\[storage\]', or give a path") as raised:
            call("memory://b/run")
        one_sentence(raised)


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3", True, 101])
def test_a_number_of_checkpoints_that_cannot_be_is_refused(keep, node, tmp_path):
    with pytest.raises(CheckpointError, match="give how many checkpoints to keep, from 1 to 100") as raised:
        node.save(tmp_path / "run", keep=keep)
    one_sentence(raised)
    assert not list(tmp_path.iterdir())


def test_a_local_disk_without_room_is_named_with_the_store(store, node, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.tensor_file, "write", full)
    with pytest.raises(CheckpointError, match=r"from where it goes to faulty://b/run.safetensors: no space") as raised:
        node.save("faulty://b/run")
    one_sentence(raised)
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
    assert numbered_name("run.safetensors", 2) == "run.2.safetensors"
    assert numbered_name("run.json", 2) == "run.2.json"


def test_only_text_with_a_protocol_is_a_url():
    assert is_url("simplecache::s3://b/run")
    assert not any(is_url(path) for path in ("run", "/a/b", "runs/s3:/b", "C:/run", Path("/a/b"), Path("C:/run")))
