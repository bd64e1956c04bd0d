"""Plain data between the ranks of a node: it comes back as it was, and nothing that is received can run code."""

from __future__ import annotations

import enum
import math
import pickle
from collections import OrderedDict
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch

import node
from gossip.errors import CheckpointError, ConfigError, LocalError
from gossip.ids import PeerId
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced
from node.ranks.boundary import UpdateTold
from node.ranks.mirror import Place
from node.ranks.news import News
from node.ranks.plain import packed, unpacked

NEWS = News(
    PeerId(b"i" * 16), "127.0.0.1:1", SwarmView((PeerId(b"o" * 16),), 3, b"run", 1 << 60, 7, 2), False, 4,
    {"genesis": "ab", "samplers": {"seed": 1 << 90, "left": [1, 2]}}, (Member("a", None, "alive", 1, 2, None),),
    Metrics({"loss": 0.5, "alone": True, "state": None}),
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        None, True, -1, 1 << 200, -(1 << 64), 0.1, math.inf, "text", b"bytes", [], (), [1, (2, [3, ()])],
        {"betas": (0.9, 0.999), 3: None}, UpdateTold(7, True, None), Place(torch.Size((2, 3)), torch.bfloat16, True),
        {"loss": Reduced(0.5, 0.5, 1.0, 0.0, 1.0, 2, 7)}, NEWS, (None, None, NEWS),
    ],
)  # fmt: skip
def test_what_is_said_comes_back_as_it_was(value):
    again = unpacked(packed(value))
    assert again == value
    assert type(again) is type(value)


def test_subclasses_become_the_plain_type():
    class Level(enum.IntEnum):
        HIGH = 3

    given = OrderedDict(a=Level.HIGH, b=np.float32(0.5), c=np.int64(7))
    assert packed(given) == packed({"a": 3, "b": 0.5, "c": 7})
    assert math.isnan(unpacked(packed(math.nan)))


def test_an_error_of_rank_0_is_raised_as_what_it_was():
    for error in (CheckpointError("It is cut off."), ConfigError("It cannot work."), LocalError("It has ended.")):
        again = unpacked(packed(error))
        assert type(again) is type(error)
        assert str(again) == str(error)


@pytest.mark.parametrize("value", [print, object(), {1, 2}, Path("x"), [lambda: 1], torch.zeros(1)])
def test_what_is_not_plain_is_refused_in_a_sentence(value):
    with pytest.raises(ConfigError, match=r"Rank 0 of this node's group holds a \w+ where only numbers"):
        packed(value)


def test_a_pickle_runs_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    for data in (pickle.dumps(Trap()), msgpack.packb(msgpack.ExtType(3, msgpack.packb(["Path", "x"])))):
        with pytest.raises((ValueError, LocalError, msgpack.UnpackException)):
            unpacked(data)
    assert not (tmp_path / "ran").exists()


def test_no_module_of_a_node_can_unpickle():
    for source in Path(node.__file__).parent.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        for way in ("import pickle", "pickle.loads", "_object_list", "broadcast_object", "torch.load("):
            assert way not in text, source
