"""Vectors in files: a node mixes as before, they lie in its folder, and a folder that cannot hold them is said."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gossip.averaging.vectors import Vector
from gossip.errors import ConfigError
from node import Node
from node.cli import main as cli
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.settings import NodeOptions, Settings
from node.storage import vectors
from node.storage.vectors import FileVectors
from tests.node.test_bad_input import one_sentence
from tests.node.trainees import spread

SIZE = 70_000


def lies_in(folder, array):
    """Return True if the memory of an array is a file of this folder."""
    at = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= at < stop:
            return str(folder) in line
    return False


def wide(seed):
    torch.manual_seed(seed)
    return nn.Linear(300, 300)


def test_all_vectors_of_a_node_lie_in_its_folder_and_it_mixes_as_before(train, until, tmp_path):
    one, other = wide(1), wide(2)
    first = train(one, torch.optim.SGD(one.parameters(), lr=0.1), memory_dir=tmp_path)
    second = train(other, torch.optim.SGD(other.parameters(), lr=0.1), seeds=[first.node.address])
    until(lambda: first.node.metrics().exchanges_done >= 3)
    until(lambda: spread(first.model, second.model) < 1e-2)
    live = first.side.live
    assert lies_in(tmp_path, live.outer._phi)
    assert lies_in(tmp_path, live.outer._momentum)
    assert lies_in(tmp_path, live.outer.correction.pull)
    free = []
    until(lambda: free.extend(array for arrays in list(live.pool.free_arrays.values()) for array in arrays) or free)
    assert all(lies_in(tmp_path, array) for array in free)
    assert not lies_in(tmp_path, second.side.live.outer._phi)
    assert not list(tmp_path.iterdir()), "they have no names"


def test_a_newcomer_collects_in_its_folder(train, until, tmp_path):
    first = train(wide(1))
    second = train(wide(2), seeds=[first.node.address], memory_dir=tmp_path)
    assert second.node.swarm_samples > 0
    assert lies_in(tmp_path, second.side.live.outer._phi)
    until(lambda: spread(first.model, second.model) < 1e-2)


def test_kept_weights_lie_there_too(train, tmp_path):
    trainee = train(wide(1), memory_dir=tmp_path)

    def keep(node):
        backup = node._training.live.backup
        assert backup.keep()
        return backup.weights

    assert lies_in(tmp_path, trainee.do(keep))


def test_small_vectors_are_in_memory_and_large_ones_zero(tmp_path):
    files = FileVectors(tmp_path, SIZE)
    large, small = files.zeros(SIZE), files.zeros(SIZE // 2)
    assert lies_in(tmp_path, large)
    assert not lies_in(tmp_path, small)
    assert not large.any()
    large[:] = 1.5
    assert large.sum() == 1.5 * SIZE


def test_a_pool_reuses_its_files_and_gives_memory_to_what_a_donor_claims(tmp_path):
    state = ModelState({"x": np.zeros(SIZE, np.float32)})
    pool = VectorPool(state, FileVectors(tmp_path, SIZE))
    one = pool.take()
    pool.give(one)
    assert pool.take().array is one.array
    assert lies_in(tmp_path, pool.take_mapped(4 * SIZE).array)
    assert not lies_in(tmp_path, pool.take_mapped(4 * SIZE + 1).array)


def test_a_model_whose_memory_is_page_locked_keeps_that(tmp_path):
    state = ModelState({"x": np.zeros(SIZE, np.float32)})
    state.locks = True
    pool = VectorPool(state, FileVectors(tmp_path, SIZE))
    assert not lies_in(tmp_path, pool.take().array)


def test_a_disk_that_is_full_later_costs_memory_and_not_the_node(tmp_path, monkeypatch):
    files = FileVectors(tmp_path, SIZE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    vector = files.vector(SIZE)
    assert isinstance(vector, Vector)
    assert not lies_in(tmp_path, vector.array)
    assert not vector.array.any()


def test_a_folder_that_cannot_hold_them_is_refused_in_a_sentence(tmp_path, monkeypatch, quick):
    with pytest.raises(ConfigError, match=r"does not exist: make it first, on a local disk") as raised:
        Node(wide(1), config=quick, memory_dir=tmp_path / "none")
    one_sentence(raised)

    def denied(**_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(vectors.tempfile, "TemporaryFile", denied)
        with pytest.raises(ConfigError, match=r"cannot be used \(Permission denied\): name a folder") as raised:
            Node(wide(1), config=quick, memory_dir=tmp_path)
        one_sentence(raised)
    monkeypatch.setattr(vectors.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 9, 9, 9, 0, 0, 0, 0, 255)))
    with pytest.raises(ConfigError, match=r"has 0 MB of room, and this node's vectors take 2 MB: make room") as raised:
        Node(wide(1), config=quick, memory_dir=tmp_path)
    one_sentence(raised)


def test_the_variable_and_the_option_name_it(tmp_path):
    changes = cli.environment_of(cli.RunSettings(memory_dir=tmp_path), {})
    assert changes["GOSSIP_MEMORY_DIR"] == str(tmp_path)
    assert Settings.gather(NodeOptions(), {"GOSSIP_MEMORY_DIR": str(tmp_path)}).memory_dir == tmp_path
    assert Settings.gather(NodeOptions(), {}).memory_dir is None
