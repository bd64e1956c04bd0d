"""Values against type annotations, as decoded records are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gossip.errors import LocalError
from gossip.ids import PeerId
from node.loop.ranks.annotations import fits, hints_of
from node.loop.ranks.boundary import UpdateTold
from node.observe.members import SwarmView


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (7, int), (7, float), (0.5, float), ("x", str), (None, str | None), ("x", str | None), (b"id", PeerId),
        ((), tuple[PeerId, ...]), ((b"a", b"b"), tuple[PeerId, ...]), ((1, "x"), tuple[int, str]), ([1, 2], list[int]),
        ({"a": object()}, Mapping[str, Any]), ({"a": [1]}, dict[str, list[int]]), (torch.float32, torch.dtype),
        (object(), Any), ([object()], list[Any]), (LocalError("x"), LocalError | None),
        ((1, None, SwarmView()), tuple[Any, LocalError | None, SwarmView | None]),
    ],
)  # fmt: skip
def test_a_value_of_its_type_fits(value, hint):
    assert fits(value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (0.5, int), ("7", float), (7, str), (7, str | None), ("id", PeerId), ((b"a", "b"), tuple[PeerId, ...]),
        ([b"a"], tuple[PeerId, ...]), ((1,), tuple[int, str]), ((1, "x", 2), tuple[int, str]), ((), tuple[int, str]),
        ([1, "2"], list[int]), ({1: 2}, Mapping[str, Any]), ([("a", 1)], Mapping[str, Any]),
        ({"a": ["x"]}, dict[str, list[int]]), ("float32", torch.dtype), ("x", LocalError | None),
        ((1, "x", None), tuple[Any, LocalError | None, SwarmView | None]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_does_not_fit(value, hint):
    assert not fits(value, hint)


def test_the_annotations_of_a_record_are_in_the_order_of_its_fields():
    assert hints_of(UpdateTold) == (int, bool, float | None, tuple[int, ...])
