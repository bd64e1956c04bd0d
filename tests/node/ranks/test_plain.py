"""Plain data between the ranks of a node: it comes back as it was, and nothing that is received can run code."""

import contextlib
import enum
import math
import pickle
import random
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

import node
from gossip.errors import CheckpointError, ConfigError, LocalError
from gossip.ids import PeerId
from node.observe.members import Member, SwarmView
from node.observe.reduced import Reduced
from node.ranks.boundary import UpdateTold
from node.ranks.optimizers import Place
from node.ranks.plain import MAX_BYTES, MAX_DEPTH, RECORD, TUPLE, pack_value, unpack_value
from node.ranks.report import SwarmReport

NEWS = SwarmReport(
    PeerId(b"i" * 16), "127.0.0.1:1", SwarmView((PeerId(b"o" * 16),), 3, b"run", 1 << 60, 7, 2), False,
    {"run_id": "ab", "samplers": {"seed": 1 << 90, "left": [1, 2]}}, (Member("a", None, "alive", 1, 2, None),),
    {"loss": 0.5, "alone": True, "state": None},
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        None, True, -1, 1 << 200, -(1 << 64), 0.1, math.inf, "text", b"bytes", [], (), [1, (2, [3, ()])],
        {"betas": (0.9, 0.999), 3: None}, UpdateTold(7, True, None), Place(torch.Size((2, 3)), torch.bfloat16, True),
        {"loss": Reduced(0.5, 0.5, 1.0, 0.0, 1.0, 2, 7)}, NEWS, (None, None, NEWS),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    again = unpack_value(pack_value(value))
    assert again == value
    assert type(again) is type(value)


def test_subclasses_become_the_plain_type():
    class Level(enum.IntEnum):
        HIGH = 3

    given = OrderedDict(a=Level.HIGH, b=np.float32(0.5), c=np.int64(7))
    assert pack_value(given) == pack_value({"a": 3, "b": 0.5, "c": 7})
    assert math.isnan(unpack_value(pack_value(math.nan)))


def test_an_error_of_rank_0_is_raised_as_what_it_was():
    for error in (CheckpointError("It is cut off."), ConfigError("It cannot work."), LocalError("It has ended.")):
        again = unpack_value(pack_value(error))
        assert type(again) is type(error)
        assert str(again) == str(error)


@pytest.mark.parametrize("value", [print, object(), {1, 2}, Path("x"), [lambda: 1], torch.zeros(1)])
def test_a_value_that_is_not_plain_is_refused_in_a_sentence(value):
    with pytest.raises(ConfigError, match=r"Rank 0 of this node's group holds a \w+ where only numbers"):
        pack_value(value)


def test_a_pickle_runs_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    for data in (pickle.dumps(Trap()), msgpack.packb(msgpack.ExtType(3, msgpack.packb(["Path", "x"])))):
        with pytest.raises((ValueError, LocalError, msgpack.UnpackException)):
            unpack_value(data)
    assert not (tmp_path / "ran").exists()


def nested(levels):
    return (nested(levels - 1),) if levels else ()


def test_tuples_are_sent_as_deep_as_they_can_be_read_and_no_deeper():
    """Each level takes 40 KB of the C stack. Once, a few hundred levels ended the process."""
    assert unpack_value(pack_value(nested(MAX_DEPTH - 1))) == nested(MAX_DEPTH - 1)
    with pytest.raises(ConfigError, match="nested deeper than 24 levels"):
        pack_value(nested(MAX_DEPTH))
    data = b"\xc0"
    for _ in range(2000):
        data = msgpack.packb(msgpack.ExtType(TUPLE, b"\x91" + data))
    with pytest.raises(LocalError, match="nested too deep"):
        unpack_value(data)


def test_a_message_has_a_largest_size():
    with pytest.raises(ConfigError, match="has 32 MB to send the others besides tensors, and may send 32 MB"):
        pack_value([bytes(MAX_BYTES)])
    with pytest.raises(LocalError, match=f"{MAX_BYTES + 1} bytes at once"):
        unpack_value(bytes(MAX_BYTES + 1))


def test_more_lists_than_any_rank_tells_are_refused_before_they_take_memory(monkeypatch):
    monkeypatch.setattr("node.ranks.plain.MAX_CONTAINERS", 1 << 12)  # A lower limit makes the test fast.
    with pytest.raises(LocalError, match="more than 4096 lists and mappings"):
        unpack_value(b"\xdd" + (1 << 13).to_bytes(4, "big") + b"\x90" * (1 << 13))
    assert unpack_value(b"\xdd" + (1 << 11).to_bytes(4, "big") + b"\x90" * (1 << 11)) == [[]] * (1 << 11)


@pytest.mark.parametrize(
    "fields",
    [
        ["7", True, None], [7, 1, None], [7, True, "half"], [7, True], [7, True, None, None], [None, True, None],
        [7, None, True],
    ],
)  # fmt: skip
def test_a_record_whose_fields_are_of_other_types_is_refused(fields):
    data = msgpack.packb(msgpack.ExtType(RECORD, msgpack.packb(["UpdateTold", *fields])))
    with pytest.raises(LocalError, match="is no message of this version"):
        unpack_value(data)


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [7], [0.5]), (float, [7, 0.5], ["7"]), (str, ["x"], [7]), (str | None, [None, "x"], [7]),
        (PeerId, [b"id"], ["id"]), (tuple[PeerId, ...], [(), (b"a", b"b")], [(b"a", "b"), [b"a"]]),
        (tuple[int, str], [(1, "x")], [(1,), (1, "x", 2), ()]), (list[int], [[1, 2]], [[1, "2"]]),
        (Mapping[str, Any], [{"a": [()]}], [{1: 2}, [("a", 1)]]),
        (dict[str, list[int]], [{"a": [1]}], [{"a": ["x"]}]), (torch.dtype, [torch.float32], ["float32"]),
        (Any, [[()]], []), (list[Any], [[b"x", ()]], [(1,)]), (Place | None, [None], ["x"]),
        (tuple[Any, LocalError | None, SwarmView | None], [(1, None, SwarmView())], [(1, "x", None)]),
    ],
)  # fmt: skip
def test_a_value_must_be_of_the_annotated_type(hint, good, bad):
    for value in good:
        assert unpack_value(pack_value(value), hint) == value
    for value in bad:
        with pytest.raises(LocalError, match="is no message of this version"):
            unpack_value(pack_value(value), hint)


def test_the_text_of_an_error_is_one_line():
    again = unpack_value(pack_value(LocalError("\x1b[2JIt\nis\r" + "long" * 10_000)))
    assert str(again).startswith("?[2JIt?is?long")
    assert len(str(again)) == 2000


@pytest.mark.parametrize("seed", range(20))
def test_spoiled_bytes_are_read_or_refused_in_a_sentence(seed):
    rng, data = random.Random(seed), pack_value((None, LocalError("It has ended."), NEWS))
    for _ in range(200):
        spoiled = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            spoiled[rng.randrange(len(spoiled))] = rng.choice((rng.randrange(256), 0xC7, 0xC9, 0xDD, 0xDF, 0xC6, 0xFF))
        cut = bytes(spoiled[: rng.choice((len(data), rng.randrange(len(data))))])
        with contextlib.suppress(LocalError):  # nothing else
            unpack_value(cut)


def test_no_module_of_a_node_can_unpickle():
    for source in Path(node.__file__).parent.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        for way in ("import pickle", "pickle.loads", "_object_list", "broadcast_object", "torch.load("):
            assert way not in text, source
