"""A model's tensors as one flat float32 vector: what lies where, its fingerprint, and how two models differ."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from gossip.errors import LayoutError, ProtocolError

__all__ = ["Layout", "LayoutSummary", "Segment"]

Kind = Literal["parameter", "buffer", "frozen"]
SENT: Final[dict[Kind, bool | int]] = {"parameter": False, "buffer": True, "frozen": 2}
"""How a kind travels; they lie in the vector in this order."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
"""What can be averaged: float8 has no arithmetic, complex has no place in a float32 vector, integers have no mean."""

MAX_NAME_CHARACTERS = 512  # the longest names seen in real models are under 150
MAX_DIMENSIONS = 64  # torch's own limit
MAX_EXTENT = 1 << 48  # of one dimension and of a whole model: far above memory, far below what overflows an int64
MAX_SUMMARY_SEGMENTS = 4096  # the longest array that a frame header may hold
MAX_SUMMARY_BYTES = 48 * 1024  # a frame header holds 64 KiB, and Hello carries a signed record beside the summary
SHOWN_NAME_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a model. ``dtype`` is torch's name of its own type; in the flat vector everything is float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @property
    def size(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """What another node said about its layout: only for telling people how two models differ, never to size memory."""

    fingerprint: str
    size: int  # elements
    count: int  # tensors
    segments: tuple[Segment, ...]  # the first ones; all of them when they are ``count``


class Layout:
    """The order, shapes and offsets of a model's floating-point tensors in one flat float32 vector.

    Parameters come first, in the model's order, and buffers (BatchNorm's running statistics) behind them: the outer
    momentum step applies to the prefix ``[:layout.parameters]`` alone, because momentum could push a running variance
    below zero; what lies behind it is averaged plainly. Last are frozen ones, which nobody changes: newcomers get them,
    and exchanges carry the prefix ``[:layout.exchanged]``. Integer and boolean tensors have no mean and no place here.

    Raises :class:`LayoutError` for an empty model, a name that comes twice, and a dtype that cannot be averaged.
    """

    __slots__ = ("contents", "exchanged", "fingerprint", "parameters", "segments", "size")

    segments: tuple[Segment, ...]
    size: int  # elements of the whole vector
    exchanged: int  # elements of the prefix that exchanges carry: all but the frozen ones
    parameters: int  # elements of the prefix that parameters fill
    fingerprint: str  # 32 hexadecimal digits: equal exactly when names, order, shapes, dtypes and kinds are
    contents: str  # the same as if nothing were frozen: of a checkpoint, which fits whatever is trained next

    def __init__(self, segments: Iterable[Segment]) -> None:
        given = tuple(segments)
        ordered = [segment for kind in SENT for segment in given if segment.kind == kind]
        names: set[str] = set()
        for segment in ordered:
            if segment.dtype not in FLOATS:
                raise LayoutError(
                    f"Tensor {_shown(segment.name)} is {segment.dtype}, which cannot be averaged: "
                    f"use one of {', '.join(sorted(FLOATS))}."
                )
            if segment.name in names:
                raise LayoutError(f"Two tensors are named {_shown(segment.name)}: give each a name of its own.")
            names.add(segment.name)
        size = sum(segment.size for segment in ordered)
        self.exchanged = sum(segment.size for segment in ordered if segment.kind != "frozen")
        if self.exchanged == 0:
            raise LayoutError("The model has no floating-point tensor, so there is nothing to average: add parameters.")
        self.segments = tuple(ordered)
        self.size = size
        self.parameters = sum(segment.size for segment in ordered if segment.kind == "parameter")
        self.fingerprint = self.contents = fingerprint_of(ordered)
        if self.exchanged < size:
            thawed = [replace(segment, kind="parameter") for segment in given if segment.kind != "buffer"]
            self.contents = fingerprint_of([*thawed, *(segment for segment in given if segment.kind == "buffer")])

    def __eq__(self, other: object) -> bool:
        return self.segments == other.segments if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.segments)

    def __repr__(self) -> str:
        return f"Layout({len(self.segments)} tensors, {self.size} elements, {self.fingerprint})"

    def summary(self) -> tuple[object, ...]:
        """The wire form, ``(fingerprint, size, count, ((name, shape, dtype, kind), ...))``, within 48 KiB of
        msgpack and 4096 tensors: a model that has more sends only its first ones, with the count of all."""
        sent: list[tuple[object, ...]] = []
        room = MAX_SUMMARY_BYTES - 64  # the fingerprint and the two counts
        for segment in self.segments:
            room -= _packed_bytes(segment)
            unsendable = len(segment.name) > MAX_NAME_CHARACTERS or len(segment.shape) > MAX_DIMENSIONS
            if room < 0 or unsendable or len(sent) == MAX_SUMMARY_SEGMENTS:
                break
            sent.append((segment.name, segment.shape, segment.dtype, SENT[segment.kind]))
        return (self.fingerprint, self.size, len(self.segments), tuple(sent))

    @staticmethod
    def parse(summary: object) -> LayoutSummary:
        """What :meth:`summary` sent, every field checked; raises :class:`ProtocolError`."""
        fingerprint, size, count, entries = _items(summary, 4, 4)
        if not isinstance(fingerprint, str) or not re.fullmatch("[0-9a-f]{32}", fingerprint):
            raise ProtocolError("A layout's fingerprint is not 32 hexadecimal digits.")
        parsed: list[Segment] = []
        room = MAX_SUMMARY_BYTES
        for entry in _items(entries, 0, MAX_SUMMARY_SEGMENTS):
            name, shape, dtype, sent = _items(entry, 4, 4)
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
                raise ProtocolError("A tensor's name is not text, or too long.")
            kind = next((kind for kind, value in SENT.items() if type(sent) is type(value) and sent == value), None)
            if not isinstance(dtype, str) or dtype not in FLOATS or kind is None:
                raise ProtocolError("A tensor's dtype or kind is not one that a layout holds.")
            extents = tuple(_count(extent) for extent in _items(shape, 0, MAX_DIMENSIONS))
            segment = Segment(name, extents, dtype, kind)
            room -= _packed_bytes(segment)
            if room < 0:
                raise ProtocolError("A layout's summary is over its limit of 48 KiB.")
            parsed.append(segment)
        if len(parsed) > _count(count):
            raise ProtocolError("A layout lists more tensors than it counts.")
        return LayoutSummary(fingerprint, _count(size), _count(count), tuple(parsed))

    def difference(self, other: Layout | LayoutSummary) -> str:
        """One sentence on the first difference between this layout ("here") and the other ("there"), for people.

        Empty when the fingerprints agree. True of a cut summary as well: it claims nothing about what was not sent.
        """
        if self.fingerprint == other.fingerprint:
            return ""
        there = other.segments
        kinds = {segment.name: segment.kind for segment in there}
        for ours in self.segments:  # this first: it changes where everything lies
            kind = kinds.get(ours.name, ours.kind)
            if kind != ours.kind and "frozen" in (kind, ours.kind):
                here, elsewhere = ("frozen" if one == "frozen" else "trained" for one in (ours.kind, kind))
                return (
                    f"Tensor {_shown(ours.name)} is {here} here and {elsewhere} there: freeze the same ones on every "
                    "node before its Node is made, or give every Node frozen=True."
                )
        cut = isinstance(other, LayoutSummary) and len(there) < other.count
        our_names = {segment.name for segment in self.segments}
        their_names = {segment.name for segment in there}
        for index, (ours, theirs) in enumerate(zip(self.segments, there, strict=False)):
            if ours.name != theirs.name:
                if theirs.name not in our_names:
                    return f"Tensor {_shown(theirs.name)} exists there and not here."
                if ours.name not in their_names and not cut:
                    return f"Tensor {_shown(ours.name)} exists here and not there."
                return f"Tensor {index + 1} is {_shown(ours.name)} here and {_shown(theirs.name)} there."
            for what, mine, its in (
                ("shape", ours.shape, theirs.shape),
                ("dtype", ours.dtype, theirs.dtype),
                ("kind", ours.kind, theirs.kind),
            ):
                if mine != its:
                    return f"Tensor {_shown(ours.name)} has {what} {mine} here and {its} there."
        if len(there) > len(self.segments):
            return f"Tensor {_shown(there[len(self.segments)].name)} exists there and not here."
        if not cut and len(there) < len(self.segments):
            return f"Tensor {_shown(self.segments[len(there)].name)} exists here and not there."
        count = other.count if isinstance(other, LayoutSummary) else len(there)
        return (
            f"The first {len(there)} tensors are the same and a later one differs "
            f"({len(self.segments)} tensors of {self.size} elements here, {count} of {other.size} there)."
        )


def fingerprint_of(ordered: Iterable[Segment]) -> str:
    """JSON is canonical here: it quotes every name, so that no choice of names makes two layouts read alike."""
    text = json.dumps([[s.name, s.shape, s.dtype, s.kind] for s in ordered], separators=(",", ":"))
    return hashlib.sha256(b"gossip layout 1\n" + text.encode()).hexdigest()[:32]


def _shown(name: str) -> str:
    """A name as people see it: quoted, control characters escaped (it may come from a stranger), cut when long."""
    return repr(name if len(name) <= SHOWN_NAME_CHARACTERS else name[:SHOWN_NAME_CHARACTERS] + "...")


def _packed_bytes(segment: Segment) -> int:
    """An upper bound on one entry of the summary in msgpack."""
    extents = sum(1 if n < 1 << 7 else 3 if n < 1 << 16 else 5 if n < 1 << 32 else 9 for n in segment.shape)
    return 1 + 3 + len(segment.name.encode()) + 3 + extents + 1 + len(segment.dtype) + 1


def _items(value: object, least: int, most: int) -> tuple[object, ...]:
    if not isinstance(value, tuple | list) or not least <= len(value) <= most:
        raise ProtocolError("A layout's summary has a list of the wrong length, or none where one belongs.")
    return tuple(cast("tuple[object, ...]", value))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_EXTENT:  # bool is an int too, and not a count
        raise ProtocolError("A layout's summary has a size that is not a number within limits.")
    return value
