"""Figures that a loop shares with its swarm: packed into a node's member record, and reduced over the members."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from gossip.errors import ConfigError
from gossip.ids import MemberRecord
from gossip.wire.records import MAX_EXTRA_BYTES, clamp_field, is_keepable

MARK = "\0"  # The first character of a mark's name, which no figure may have.
SETTLING = MARK + "s"  # The mark that this loop is in ``node.settle``: the meeting (node.loop.settling).
AGREED = MARK + "a"  # The mark of weights that a settling loop shares with a partner: samples, and part of a digest.
STARTED = MARK + "b"  # The mark that this loop has waited for the others to start: the number that it counted.
DATA = MARK + "d"  # The mark of the data that this loop divides: a checksum and their length.
FIRST_LOSSES = MARK + "l"  # The mark of its first two losses: the second, and a hash of the first.
CONSTANTS = MARK + "c"  # The mark of tensors of its model that do not travel: a checksum and their number.
RATE = MARK + "r"  # The mark of its learning rate.
MAX_MARKS = 6  # Marks that a record has room for besides figures. No loop has DATA and FIRST_LOSSES at once.
MARK_BYTES = 22  # The largest mark: a name of two characters, a float and a count.

FRAMING_BYTES = 4  # msgpack's headers of a record's list of values and of the packed figures in it.

Values = dict[str, tuple[float, int]]
"""Figures by name: the value, and the swarm's samples when it was measured."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """One figure, reduced over the alive members that hold our run's weights, this node included.

    Each member's last value has the same weight. Values are not verified. A liar can move mean, sum, min and max to
    anything. It moves the median only within the range of the others' values, while most members are honest.
    """

    mean: float
    median: float
    sum: float
    min: float
    max: float
    members: int  # Members that sent it.
    oldest_samples: int  # The swarm's samples when the oldest value was measured, according to its owner.


class Figures:
    """This node's own figures and *marks*. Sending a figure again replaces it and leaves the others.

    A mark is a fact about a node that the program itself tells other members, as two numbers.
    """

    def __init__(self) -> None:
        self.run = b""  # The run on whose weights they were measured; empty before the first.
        self.values: Values = {}
        self.marks: Values = {}

    def pack_mark(
        self, name: str, mark: tuple[float, int] | None, run: bytes, swarm_samples: int
    ) -> bytes:  # fmt: skip
        """Return the packed figures for our record with this mark; None removes it."""
        assert name.startswith(MARK), name
        self.marks.pop(name, None)
        if mark is not None:
            self.marks[name] = mark
        assert len(self.marks) <= MAX_MARKS, self.marks
        return self.pack({}, run, swarm_samples)

    def pack(self, figures: Mapping[str, Any], run: bytes, swarm_samples: int) -> bytes:
        """Return the packed figures for our record; empty if there are none.

        A value that is not finite removes its figure.

        Raises :class:`ConfigError` for a value that is no number, and for more than a record has room for.
        """
        values = dict(self.values) if run == self.run else {}
        for name, figure in figures.items():
            value = number_of(name, figure)
            values.pop(name, None)
            if math.isfinite(value):
                values[name] = value, clamp_field("samples", swarm_samples)
        size = len(msgpack.packb(values, use_bin_type=True))
        room = MAX_EXTRA_BYTES - FRAMING_BYTES - MAX_MARKS * MARK_BYTES
        if size > room:
            raise ConfigError(
                f"The figures {', '.join(values)} take {size} bytes, and a member's record has room for {room}: "
                "tell fewer of them, or by shorter names."
            )
        self.run, self.values = run, values
        packed: bytes = msgpack.packb(values | self.marks, use_bin_type=True) if values or self.marks else b""
        assert is_keepable((packed,)), "marks are larger than their room"
        return packed


def number_of(name: object, value: Any) -> float:
    """Return a figure's value as a float. Raises ConfigError for a name that is no text, and for no number."""
    if not isinstance(name, str) or not name or name.startswith(MARK):
        raise ConfigError(f"A figure's name is {name!r}: give a text.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"Figure {name!r} is no number ({error}): give a float, or a tensor of one.") from None


def values_in(record: MemberRecord) -> Values:
    """Return the figures in a member's record. Others pass them on unchecked, so malformed ones are ignored."""
    packed = record.extra[0] if record.extra else None
    if type(packed) is not bytes:
        return {}
    try:
        rows = msgpack.unpackb(packed)
    except ValueError:
        return {}
    values: Values = {}
    for name, row in rows.items() if isinstance(rows, dict) else ():
        if isinstance(name, str) and isinstance(row, list) and len(row) == 2:
            value, samples = row
            if type(value) is float and math.isfinite(value) and type(samples) is int:
                values[name] = value, clamp_field("samples", samples)
    return values


def mark_in(record: MemberRecord, name: str) -> tuple[float, int] | None:
    """Return the mark with this name in a member's record, which may lie; None without it."""
    return values_in(record).get(name)


def reduce(own: Values, records: Iterable[MemberRecord]) -> dict[str, Reduced]:
    """Return each figure reduced over ``own`` and these records."""
    rows_by_name: dict[str, list[tuple[float, int]]] = {}
    for values in (own, *map(values_in, records)):
        for name, row in values.items():
            if not name.startswith(MARK):
                rows_by_name.setdefault(name, []).append(row)
    return {name: reduce_rows(rows) for name, rows in rows_by_name.items()}


def reduce_rows(rows: list[tuple[float, int]]) -> Reduced:
    """Return one figure reduced over the members' rows, each its value and the swarm's samples."""
    values = [value for value, _ in rows]
    total = sum(values)  # fsum would raise where a liar's values exceed the range of a float.
    return Reduced(
        total / len(values), statistics.median(values), total, min(values), max(values), len(values),
        min(samples for _, samples in rows),
    )  # fmt: skip
