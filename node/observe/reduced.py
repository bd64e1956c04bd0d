"""Figures of a loop that its swarm may know: packed behind a node's record, and reduced over those who told theirs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from gossip.errors import ConfigError
from gossip.ids import MemberRecord
from gossip.wire.records import MAX_EXTRA_BYTES, keepable, within

__all__ = ["Figures", "Reduced", "reduce", "settles", "told_in"]

SETTLING = ""  # the name, which no owner's figure has, under which a loop says that it stands in settle

Told = dict[str, tuple[float, int]]
"""By name: the value, and the swarm's samples when it was measured."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """One figure over the members that are alive and hold our run's weights, this node included: of each what it told
    last, all weighing alike. No more than what members say: one that lies moves mean, sum, min and max wherever it
    likes, and the median no further than among the values of the others, while most are honest."""

    mean: float
    median: float
    sum: float
    min: float
    max: float
    members: int  # that told it
    oldest_samples: int  # the swarm's samples when the oldest of these was measured, by what its owner says


class Figures:
    """This node's own. Those that are told again are replaced, the others stay as they were."""

    def __init__(self) -> None:
        self.run = b""  # whose weights they were measured on
        self.told: Told = {}
        self.settling = False  # others that settle need not wait for us

    def settle(self, on: bool, run: bytes, swarm_samples: int) -> bytes:
        """What a record is to carry from now on, when the loop comes to its meeting point, and when it goes on."""
        self.settling = on
        return self.tell({}, run, swarm_samples)

    def tell(self, figures: Mapping[str, Any], run: bytes, swarm_samples: int) -> bytes:
        """What a record is to carry from now on; empty for nothing. What is not finite is told no more.

        Raises :class:`ConfigError` for what is no number, and for more than a record has room for.
        """
        told = dict(self.told) if run == self.run else {}
        for name, given in figures.items():
            value = number_of(name, given)
            told.pop(name, None)
            if math.isfinite(value):
                told[name] = value, within("samples", swarm_samples)
        packed: bytes = msgpack.packb(told, use_bin_type=True) if told else b""
        settled: bytes = msgpack.packb(told | {SETTLING: (1.0, 0)}, use_bin_type=True)  # for which room is kept
        if not keepable((settled,)):
            room = MAX_EXTRA_BYTES - 3 - (len(settled) - len(packed))
            raise ConfigError(
                f"The figures {', '.join(told)} take {len(packed)} bytes, and a member's record has room for {room}: "
                "tell fewer of them, or by shorter names."
            )
        self.run, self.told = run, told
        return settled if self.settling else packed


def number_of(name: object, value: Any) -> float:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"A figure's name is {name!r}: give a text.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"Figure {name!r} is no number ({error}): give a float, or a tensor of one.") from None


def told_in(record: MemberRecord) -> Told:
    """What a record's owner told. Others hand it on unchecked, so whatever else stands there is nothing."""
    packed = record.extra[0] if record.extra else None
    if type(packed) is not bytes:
        return {}
    try:
        found = msgpack.unpackb(packed)
    except ValueError:
        return {}
    told: Told = {}
    for name, row in found.items() if isinstance(found, dict) else ():
        if isinstance(name, str) and isinstance(row, list) and len(row) == 2:
            value, samples = row
            if type(value) is float and math.isfinite(value) and type(samples) is int:
                told[name] = value, within("samples", samples)
    return told


def settles(record: MemberRecord) -> bool:
    """Whether its owner's loop stands in settle, as it says."""
    return SETTLING in told_in(record)


def reduce(own: Told, records: Iterable[MemberRecord]) -> dict[str, Reduced]:
    """By name, over ``own`` and what stands in these records."""
    rows: dict[str, list[tuple[float, int]]] = {}
    for told in (own, *map(told_in, records)):
        for name, row in told.items():
            if name:
                rows.setdefault(name, []).append(row)
    return {name: reduced([value for value, _ in row], min(at for _, at in row)) for name, row in rows.items()}


def reduced(values: list[float], oldest: int) -> Reduced:
    total = sum(values)  # fsum would raise where a liar's values leave the range of a float
    return Reduced(
        total / len(values), statistics.median(values), total, min(values), max(values), len(values), oldest
    )  # fmt: skip
