"""The layout of a model's tensors in one flat float32 vector, its fingerprint, and the comparison of two models."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from gossip.errors import LayoutError, ProtocolError

Kind = Literal["parameter", "buffer", "frozen", "bits"]
WIRE_KINDS: Final[dict[Kind, bool | int]] = {"parameter": False, "buffer": True, "frozen": 2, "bits": 3}
"""The wire value of each kind. The vector holds the kinds in this order."""

WAYS: Final[dict[Kind, str]] = {
    "parameter": "trained", "buffer": "a statistic that is averaged", "frozen": "frozen", "bits": "only copied",
}  # fmt: skip
"""What each kind is called in messages to users."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
"""The dtypes that can be averaged.

float8 has no arithmetic, complex does not fit float32, and integers have no mean.
"""

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element by dtype, for all dtypes that a newcomer can take as bits."""

MAX_NAME_CHARACTERS = 512  # The longest names seen in real models are under 150.
MAX_DIMENSIONS = 64  # torch's own limit.
MAX_EXTENT = 1 << 48  # Limit of a dimension and of a model: far above memory, far below an int64's overflow.
MAX_SUMMARY_SEGMENTS = 4096  # The longest array that a frame header may hold.
# A frame header holds 64 KiB, and Hello also carries a signed record.
MAX_SUMMARY_BYTES = 48 * 1024
SHOWN_NAME_CHARACTERS = 80  # Of a tensor's name in messages to users.


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a model. ``dtype`` is torch's name of its own type; in the flat vector everything is float32.

    A tensor of the kind "bits" has any type. The vector holds its bytes, as numbers of 16 bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @property
    def size(self) -> int:
        """Return its number of elements in the vector; 1 for a scalar."""
        elements = math.prod(self.shape)
        return elements if self.kind != "bits" else -(-elements * ITEM_BYTES[self.dtype] // 2)


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """Another node's statement about its layout. It is only for messages to users, never for allocation."""

    fingerprint: str
    size: int  # In elements.
    count: int  # Number of tensors.
    segments: tuple[Segment, ...]  # The first ones; all of them if there are ``count``.


class Layout:
    """The order, shapes and offsets of a model's floating-point tensors in one flat float32 vector.

    Parameters come first, in the model's order, followed by buffers (BatchNorm's running statistics). The outer
    momentum step applies only to the prefix ``[:layout.parameters]``, because momentum could push a running variance
    below zero. Everything else is averaged plainly. Exchanges carry the prefix ``[:layout.exchanged]``. Frozen tensors
    follow, up to ``layout.frozen_stop``. Newcomers get them, unless their own are the same. The bits of other tensors
    come last, which have no mean (integers) or are not mixed. Newcomers always get them.

    Args:
        segments: The tensors in the model's order.
        contents: All floating-point tensors of the model, if ``segments`` lacks some or has them as bits.

    Raises:
        LayoutError: The model is empty, a name occurs twice, or a dtype cannot be averaged.
    """

    __slots__ = ("contents_fingerprint", "exchanged", "fingerprint", "frozen_stop", "parameters", "segments", "size")

    segments: tuple[Segment, ...]
    size: int  # Elements of the whole vector.
    exchanged: int  # Elements of the prefix that exchanges carry: parameters and buffers.
    frozen_stop: int  # Elements of the prefix of all values: those, and the frozen ones.
    parameters: int  # Elements of the prefix of parameters.
    fingerprint: str  # 32 hexadecimal digits, equal exactly if names, order, shapes, dtypes and kinds are.
    # The fingerprint as if nothing were frozen. Checkpoints use it, so that they fit whichever tensors are frozen next.
    contents_fingerprint: str

    def __init__(self, segments: Iterable[Segment], contents: Iterable[Segment] | None = None) -> None:
        in_model_order = tuple(segments)
        ordered = [segment for kind in WIRE_KINDS for segment in in_model_order if segment.kind == kind]
        names: set[str] = set()
        for segment in ordered:
            if segment.dtype not in (ITEM_BYTES if segment.kind == "bits" else FLOATS):
                problem = "has a type that cannot travel: name it in local=."
                if segment.kind != "bits":
                    problem = f"is {segment.dtype}, which cannot be averaged: use one of {', '.join(sorted(FLOATS))}."
                raise LayoutError(f"Tensor {quoted(segment.name)} {problem}")
            if segment.name in names:
                raise LayoutError(f"Two tensors are named {quoted(segment.name)}: give each a name of its own.")
            names.add(segment.name)
        sizes = {kind: sum(segment.size for segment in ordered if segment.kind == kind) for kind in WIRE_KINDS}
        self.parameters = sizes["parameter"]
        self.exchanged = self.parameters + sizes["buffer"]
        self.frozen_stop = self.exchanged + sizes["frozen"]
        self.size = self.frozen_stop + sizes["bits"]
        if self.exchanged == 0:
            raise LayoutError(
                "The model has no floating-point tensor that travels, so there is nothing to average: add parameters."
            )
        self.segments = tuple(ordered)
        self.fingerprint = fingerprint_of(ordered)
        known = in_model_order if contents is None else tuple(contents)
        values = [replace(segment, kind="parameter") for segment in known if segment.kind in ("parameter", "frozen")]
        self.contents_fingerprint = fingerprint_of([*values, *[each for each in known if each.kind == "buffer"]])

    def __eq__(self, other: object) -> bool:
        return self.segments == other.segments if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.segments)

    def __repr__(self) -> str:
        return f"Layout({len(self.segments)} tensors, {self.size} elements, {self.fingerprint})"

    def name_at(self, position: int) -> str:
        """Return the name of the tensor that has this position in the vector; empty behind all of them."""
        return next((segment.name for segment, _, stop in self.places() if position < stop), "")

    def places(self) -> Iterator[tuple[Segment, int, int]]:
        """Yield each tensor with its bounds in the vector."""
        start = 0
        for segment in self.segments:
            yield segment, start, start + segment.size
            start += segment.size

    def summary(self) -> tuple[object, ...]:
        """Return the wire form, ``(fingerprint, size, count, ((name, shape, dtype, kind), ...))``.

        It is limited to 48 KiB of msgpack and 4096 tensors. A larger model sends only its first tensors, with the
        count of all.
        """
        sent: list[tuple[object, ...]] = []
        room = MAX_SUMMARY_BYTES - 64  # Bytes left, without 64 for the fingerprint and the two counts.
        for segment in self.segments:
            room -= packed_bytes(segment)
            unsendable = len(segment.name) > MAX_NAME_CHARACTERS or len(segment.shape) > MAX_DIMENSIONS
            if room < 0 or unsendable or len(sent) == MAX_SUMMARY_SEGMENTS:
                break
            sent.append((segment.name, segment.shape, segment.dtype, WIRE_KINDS[segment.kind]))
        return (self.fingerprint, self.size, len(self.segments), tuple(sent))

    @staticmethod
    def parse(summary: object) -> LayoutSummary:
        """Parse a :meth:`summary`, checking every field; raise :class:`ProtocolError`."""
        fingerprint, size, count, entries = checked_list(summary, 4, 4)
        if not isinstance(fingerprint, str) or not re.fullmatch("[0-9a-f]{32}", fingerprint):
            raise ProtocolError("A layout's fingerprint is not 32 hexadecimal digits.")
        parsed: list[Segment] = []
        room = MAX_SUMMARY_BYTES
        for entry in checked_list(entries, 0, MAX_SUMMARY_SEGMENTS):
            name, shape, dtype, wire_kind = checked_list(entry, 4, 4)
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
                raise ProtocolError("A tensor's name is not text, or too long.")
            kind = kind_of(wire_kind)
            if not isinstance(dtype, str) or kind is None or dtype not in (ITEM_BYTES if kind == "bits" else FLOATS):
                raise ProtocolError("A tensor's dtype or kind is not one that a layout holds.")
            extents = tuple(checked_count(extent) for extent in checked_list(shape, 0, MAX_DIMENSIONS))
            segment = Segment(name, extents, dtype, kind)
            room -= packed_bytes(segment)
            if room < 0:
                raise ProtocolError("A layout's summary is over its limit of 48 KiB.")
            parsed.append(segment)
        if len(parsed) > checked_count(count):
            raise ProtocolError("A layout lists more tensors than it counts.")
        return LayoutSummary(fingerprint, checked_count(size), checked_count(count), tuple(parsed))

    def difference(self, other: Layout | LayoutSummary) -> str:
        """Return a sentence for users on the first difference between this layout ("here") and the other ("there").

        It is empty if the fingerprints agree. With a truncated summary it claims nothing about the rest.
        """
        if self.fingerprint == other.fingerprint:
            return ""
        their_segments = other.segments
        kinds = {segment.name: segment.kind for segment in their_segments}
        for ours in self.segments:  # Check this first: it changes the offsets of all tensors.
            kind = kinds.get(ours.name, ours.kind)
            if kind != ours.kind:
                return (
                    f"Tensor {quoted(ours.name)} is {WAYS[ours.kind]} here and {WAYS[kind]} there: freeze the same "
                    "ones on every node before its Node is made, and give every Node the same local=, copy= and "
                    "average=."
                )
        is_truncated = isinstance(other, LayoutSummary) and len(their_segments) < other.count
        our_names = {segment.name for segment in self.segments}
        their_names = {segment.name for segment in their_segments}
        for index, (ours, theirs) in enumerate(zip(self.segments, their_segments, strict=False)):
            if ours.name != theirs.name:
                if theirs.name not in our_names:
                    return f"Tensor {quoted(theirs.name)} exists there and not here."
                if ours.name not in their_names and not is_truncated:
                    return f"Tensor {quoted(ours.name)} exists here and not there."
                return f"Tensor {index + 1} is {quoted(ours.name)} here and {quoted(theirs.name)} there."
            for field, our_value, their_value in (
                ("shape", ours.shape, theirs.shape),
                ("dtype", ours.dtype, theirs.dtype),
            ):
                if our_value != their_value:
                    return f"Tensor {quoted(ours.name)} has {field} {our_value} here and {their_value} there."
        if len(their_segments) > len(self.segments):
            return f"Tensor {quoted(their_segments[len(self.segments)].name)} exists there and not here."
        if not is_truncated and len(their_segments) < len(self.segments):
            return f"Tensor {quoted(self.segments[len(their_segments)].name)} exists here and not there."
        count = other.count if isinstance(other, LayoutSummary) else len(their_segments)
        return (
            f"The first {len(their_segments)} tensors are the same and a later one differs "
            f"({len(self.segments)} tensors of {self.size} elements here, {count} of {other.size} there)."
        )


def kind_of(wire_kind: object) -> Kind | None:
    """Return the kind with this wire value, None if there is none; types are compared because ``False == 0``."""
    for kind, value in WIRE_KINDS.items():
        if type(wire_kind) is type(value) and wire_kind == value:
            return kind
    return None


def fingerprint_of(ordered: Iterable[Segment]) -> str:
    """Return the fingerprint of these segments. JSON quotes every name, so no two layouts have the same text."""
    text = json.dumps([[s.name, s.shape, s.dtype, s.kind] for s in ordered], separators=(",", ":"))
    return hashlib.sha256(b"gossip layout 1\n" + text.encode()).hexdigest()[:32]


def quoted(name: str) -> str:
    """Return a name to print: quoted, with control characters escaped (any peer may send it), and truncated."""
    return repr(name if len(name) <= SHOWN_NAME_CHARACTERS else name[:SHOWN_NAME_CHARACTERS] + "...")


def packed_bytes(segment: Segment) -> int:
    """Return an upper bound on one entry of the summary in msgpack, whose integers take 1, 3, 5 or 9 bytes."""
    extents = sum(1 if n < 1 << 7 else 3 if n < 1 << 16 else 5 if n < 1 << 32 else 9 for n in segment.shape)
    return 1 + 3 + len(segment.name.encode()) + 3 + extents + 1 + len(segment.dtype) + 1


def checked_list(value: object, min_length: int, max_length: int) -> tuple[object, ...]:
    if not isinstance(value, tuple | list) or not min_length <= len(value) <= max_length:
        raise ProtocolError("A layout's summary has a list of the wrong length, or another value in its place.")
    return tuple(cast("tuple[object, ...]", value))


def checked_count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_EXTENT:  # A bool is an int too, but no count.
        raise ProtocolError("A layout's summary has a size that is not a number within limits.")
    return value
