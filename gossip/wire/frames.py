"""Encoding and decoding of frames, with all limits; no sockets.

A frame is a 12-byte prefix (magic, header length, body length), one msgpack map and a raw body. Only a Chunk has a
body. The receiver checks the body's length against its own layout. So a peer's numbers never decide how much memory it
allocates.

Additions of newer versions are skipped: unknown keys, and unknown messages if the sender's Hello named a newer version.
Additions to a record are kept, since its owner signed them. All of this counts against the limits of a header.

Every field has a reader and a writer, by the form of its :class:`~gossip.wire.messages.Kind`:

- ``read_...`` turns a value from msgpack into one of ours, and raises ValueError if a correct peer does not send it.
- ``write_...`` turns a value of ours into one for msgpack, which the receiver's reader accepts.
"""

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from gossip.errors import ProtocolError
from gossip.ids import MOST_SAMPLES, Address, Claim, MemberRecord, PeerId
from gossip.wire.messages import (
    MESSAGES,
    REQUIRED,
    TAGS,
    VERSION_MAX,
    VERSION_MIN,
    Chunk,
    Hello,
    Hint,
    Kind,
    Message,
    Unknown,
    Update,
)  # fmt: skip
from gossip.wire.records import MAX_EXTRA, clamp_count, clamp_float, is_host_name, is_keepable

MAGIC = b"GSP1"
PREFIX = struct.Struct(">4sII")
PREFIX_BYTES = PREFIX.size
MAX_HEADER_BYTES = 65_536  # A full Records message fits, whatever its records hold.
MAX_BODY_BYTES = 4 << 20  # The largest chunk that a Config allows, in float32.
MAX_INT = 2**63 - 1  # The largest integer without a smaller limit: it fits a signed 64-bit integer.
MAX_HINT_EXTRA = 4  # Values that newer versions may add to a hint.
MAX_DEPTH = 4  # Depth of nested values: a layout's summary needs three.


def encode(message: Message, body_bytes: int = 0) -> bytes:
    """Return the prefix and header of a frame; the caller sends ``body_bytes`` of body after it.

    Numbers and texts outside the bounds of their fields are clamped to values that the receiver accepts. So a field's
    value never ends a link.

    Raises:
        ValueError: The header is over its limit, which no number and no text can cause.
    """
    cls = type(message)
    header: dict[str, Any] = {"t": TAGS[cls]}
    for name, kind, _, write in CODERS[cls]:
        value = getattr(message, name)
        if write is None or (write is write_int and type(value) is int and 0 <= value <= kind.bound):
            header[name] = value  # The usual case. Without the writer it is faster.
        else:
            header[name] = write(value, kind.bound)
    try:
        packer = packers.pop()
    except IndexError:
        packer = msgpack.Packer(use_bin_type=True)
    packed: bytes = packer.pack(header)
    packers.append(packer)
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"a {TAGS[cls]} header of {len(packed)} bytes is over the limit of {MAX_HEADER_BYTES}")
    return PREFIX.pack(MAGIC, len(packed), body_bytes) + packed


def read_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the lengths (header, body) in bytes that a prefix of 12 bytes states.

    Raises:
        ProtocolError: It is no prefix, or a length exceeds its limit.
    """
    if len(prefix) != PREFIX_BYTES:
        raise ProtocolError(f"A frame's prefix has {len(prefix)} bytes instead of {PREFIX_BYTES}.")
    magic, header_bytes, body_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError("The other side does not speak this protocol (wrong magic).")
    if not 1 <= header_bytes <= MAX_HEADER_BYTES:
        raise ProtocolError(f"A frame claims a header of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}.")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"A frame claims a body of {body_bytes} bytes; the limit is {MAX_BODY_BYTES}.")
    return header_bytes, body_bytes


def decode(header: bytes | bytearray | memoryview, body_bytes: int = 0, newer: bool = False) -> Message:
    """Return the message of one header.

    Args:
        header: The msgpack map.
        body_bytes: The length of the body that follows.
        newer: True if the sender also speaks a newer version. An unknown message is then returned as Unknown.

    Raises:
        ProtocolError: A correct peer does not send this.
    """
    try:
        table = msgpack.unpackb(
            header, raw=False, strict_map_key=True, object_pairs_hook=unique_keys,
            max_ext_len=0, max_array_len=4096, max_map_len=256, max_str_len=4096, max_bin_len=8192,
        )  # fmt: skip
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises ValueError, its own types, UnicodeDecodeError and RecursionError
        raise ProtocolError(f"A frame's header is not valid msgpack ({type(error).__name__}).") from None
    if not isinstance(table, dict) or not isinstance(table.get("t"), str):
        raise ProtocolError("A frame's header is not a message.")
    tag = table["t"]
    cls = MESSAGES.get(tag)
    if cls is None:
        if newer:
            return Unknown(tag)
        raise ProtocolError("A frame holds a message of unknown type.")
    if body_bytes and cls is not Chunk:
        raise ProtocolError(f"A {TAGS[cls]} message came with a body; only chunks have one.")
    if cls is Hello and has_no_common_version(table.get("version_min"), table.get("version_max")):
        return Hello(table["version_min"], table["version_max"], "", "", (), None)
    values = []
    for name, kind, read, _ in CODERS[cls]:
        if name not in table:
            if kind.default is REQUIRED:
                raise ProtocolError(f"A {TAGS[cls]} message lacks its field {name}.")
            values.append(kind.default)
            continue
        value = table[name]
        if read is read_int and type(value) is int and 0 <= value <= kind.bound:
            values.append(value)  # Without the reader it is faster: all fields of a chunk are integers.
            continue
        try:
            values.append(read(value, kind.bound))
        except (ValueError, TypeError, KeyError):
            raise ProtocolError(f"A {TAGS[cls]} message has a wrong {name}.") from None
    built: Message = cls(*values)
    return built


def has_no_common_version(oldest: Any, newest: Any) -> bool:
    """Return True if a Hello names a valid range of protocol versions, and we speak none of them.

    Its other fields may then hold anything and are not read. Both sides name the two numbers when they disconnect.
    """
    is_valid = type(oldest) is int and type(newest) is int and 0 <= oldest <= newest <= 255
    return is_valid and (oldest > VERSION_MAX or newest < VERSION_MIN)


def unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the map of a header, whose keys must not repeat."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ProtocolError("A frame's header repeats a key.")
    return table


# -- records -----------------------------------------------------------------------------------------------------
# An update is a record or a hint. Both are lists on the wire, and their lengths tell them apart: a hint with all
# additions of newer versions has fewer values than a record.
RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(MemberRecord) if field.name != "extra")
HINT_FIELDS = tuple(field.name for field in dataclasses.fields(Hint))
LOSS_PLACE = RECORD_FIELDS.index("loss")
ROUNDS_PLACE = RECORD_FIELDS.index("version")  # Mixing rounds behind the member's weights; no protocol version.


def write_record(record: MemberRecord) -> list[Any]:
    """Return the values of a record in the order of its fields, and additions of a newer version at the end."""
    values = [getattr(record, name) for name in RECORD_FIELDS]
    # The reader refuses an int where it expects a float.
    values[LOSS_PLACE] = None if record.loss is None else float(record.loss)
    values[ROUNDS_PLACE] = float(record.version)
    values += record.extra
    return values


def write_update(update: Update) -> list[Any]:
    if isinstance(update, Hint):
        return [getattr(update, name) for name in HINT_FIELDS]
    return write_record(update)


def read_record(value: Any) -> MemberRecord:
    """Return the record of a list of values. Its caller checks the signature (:func:`gossip.wire.records.check`)."""
    field_count = len(RECORD_FIELDS)
    if not isinstance(value, list) or not field_count <= len(value) <= field_count + MAX_EXTRA:
        raise ValueError
    extra = tuple(value[field_count:])
    if extra and not is_keepable(extra):
        raise ValueError
    (peer, key, incarnation, sequence, left, address, homes, ready, run_id, steps, samples, progress, loss,
     version, finished, signature) = value[:field_count]  # fmt: skip
    return MemberRecord(
        id=read_id(peer), public_key=read_bytes(key, max_bytes=32), incarnation=read_int(incarnation, MAX_INT),
        sequence=read_int(sequence, MAX_INT), left=read_bool(left), address=read_address(address),
        homes=tuple(read_id(home) for home in read_list(homes, max_items=3)), ready=read_bool(ready),
        run_id=read_bytes(run_id, max_bytes=16), steps=read_int(steps, MAX_INT), samples=read_int(samples, MAX_INT),
        progress=read_int(progress, MAX_INT),
        loss=None if loss is None else read_float(loss), version=read_float(version), finished=read_bool(finished),
        signature=read_bytes(signature, max_bytes=64), extra=extra,
    )  # fmt: skip


def read_update(value: Any) -> Update:
    field_count = len(HINT_FIELDS)
    is_hint = isinstance(value, list) and field_count <= len(value) <= field_count + MAX_HINT_EXTRA
    if not is_hint:
        return read_record(value)
    peer, incarnation, dead, author, signature = value[:field_count]
    return Hint(
        peer=read_id(peer), incarnation=read_int(incarnation, MAX_INT), dead=read_bool(dead), by=read_id(author),
        signature=read_bytes(signature, max_bytes=64),
    )  # fmt: skip


def read_address(value: Any) -> Address | None:
    if value is None:
        return None
    host, port = read_list(value, max_items=2)
    name = read_text(host, max_characters=255)
    if not is_host_name(name):
        raise ValueError
    return Address(name, read_int(port, 65_535))


# -- readers of plain values --------------------------------------------------------------------------------------
# All readers and writers take the bound of the field's kind, and those without a bound ignore it.
def read_int(value: Any, max_value: int) -> int:
    if type(value) is not int or not 0 <= value <= max_value:
        raise ValueError
    return value


def read_float(value: Any, _: int = 0) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError
    return value


def read_bool(value: Any, _: int = 0) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def read_text(value: Any, max_characters: int) -> str:
    # Control characters could command a terminal.
    if type(value) is not str or len(value) > max_characters or not value.isprintable():
        raise ValueError
    return value


def read_bytes(value: Any, max_bytes: int) -> bytes:
    if type(value) is not bytes or len(value) > max_bytes:
        raise ValueError
    return value


def read_id(value: Any, _: int = 0) -> PeerId:
    if type(value) is not bytes or len(value) != 16:
        raise ValueError
    return PeerId(value)


def read_list(value: Any, max_items: int) -> list[Any]:
    if type(value) is not list or len(value) > max_items:
        raise ValueError
    return value


def read_scalar(value: Any) -> tuple[str, float]:
    name, number = read_list(value, max_items=2)
    return read_text(name, max_characters=64), read_float(number)


CLAIM_FIELDS = tuple(field.name for field in dataclasses.fields(Claim))


def read_claim(value: Any, _: int = 0) -> Claim:
    """Return the progress that one side of an exchange states; :class:`gossip.ids.Claim` describes its numbers."""
    if type(value) is not list or len(value) != len(CLAIM_FIELDS):
        raise ValueError
    return Claim(*[read_int(number, MOST_SAMPLES) for number in value])


def read_any(value: Any, max_items: int) -> Any:
    """Return plain nested values for display or comparison; their users check them again."""
    return tuple(read_nested(item, 1) for item in read_list(value, max_items))


def read_nested(value: Any, depth: int) -> Any:
    """Return nested lists as tuples. Limit the depth: a thousand levels, as msgpack allows, overflow the stack."""
    if type(value) is list:
        if depth == MAX_DEPTH:
            raise ValueError
        return tuple(read_nested(item, depth + 1) for item in value)
    if value is None or type(value) in (bool, str, bytes) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is int and -MAX_INT <= value <= MAX_INT:  # We could send no others: write_any clamps them.
        return value
    raise ValueError


# -- writers of plain values: they clamp our own to what the readers accept ---------------------------------------
def write_int(value: Any, max_value: int) -> int:
    return value if type(value) is int and 0 <= value <= max_value else clamp_count(value, max_value)


def write_float(value: Any, _: int = 0) -> float:
    """Return a finite float. An int is converted, since the reader refuses it."""
    return value if type(value) is float and math.isfinite(value) else clamp_float(value)


def write_text(value: str, max_characters: int) -> str:
    if len(value) <= max_characters and value.isprintable():
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value[:max_characters])


def write_claim(value: Claim, _: int = 0) -> list[int]:
    return [write_int(getattr(value, name), MOST_SAMPLES) for name in CLAIM_FIELDS]


def write_any(value: Any, _: int = 0) -> Any:
    """Return nested values without anything that msgpack or the reader refuses."""
    if isinstance(value, tuple | list):
        return [write_any(item) for item in value]
    if type(value) is int:
        return max(-MAX_INT, min(value, MAX_INT))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if type(value) is str:
        return value.encode(errors="replace").decode()  # A lone surrogate has no UTF-8.
    return value


# -- the forms of fields -----------------------------------------------------------------------------------------
Convert = Callable[[Any, int], Any]
"""Convert a value of a field, given the bound of its kind."""


class Coder(NamedTuple):
    """The reader and writer of one field of a message; ``write`` is None if the value is sent as it is."""

    name: str
    kind: Kind
    read: Convert
    write: Convert | None


READERS: dict[str, Convert] = {
    "int": read_int,
    "float": read_float,
    "bool": read_bool,
    "text": read_text,
    "bytes": read_bytes,
    "id": read_id,
    "ids": lambda value, bound: tuple(read_id(item) for item in read_list(value, bound)),
    "record?": lambda value, _: None if value is None else read_record(value),
    "updates": lambda value, bound: tuple(read_update(item) for item in read_list(value, bound)),
    "names": lambda value, bound: tuple(read_text(item, max_characters=64) for item in read_list(value, bound)),
    "scalars": lambda value, bound: tuple(read_scalar(item) for item in read_list(value, bound)),
    "claim": read_claim,
    "any": read_any,
}
WRITERS: dict[str, Convert] = {  # Values of other forms are sent as they are.
    "int": write_int,
    "float": write_float,
    "bool": lambda value, _: bool(value),
    "text": write_text,
    "record?": lambda value, _: None if value is None else write_record(value),
    "updates": lambda value, _: [write_update(update) for update in value],
    "names": lambda value, _: [write_text(item, max_characters=64) for item in value],
    "scalars": lambda value, _: [(write_text(name, 64), write_float(number)) for name, number in value],
    "claim": write_claim,
    "any": write_any,
}
FIELDS: dict[type, tuple[tuple[str, Kind], ...]] = {
    cls: tuple((field.name, field.metadata["kind"]) for field in dataclasses.fields(cls)) for cls in MESSAGES.values()
}
CODERS: dict[type, tuple[Coder, ...]] = {
    cls: tuple(Coder(name, kind, READERS[kind.form], WRITERS.get(kind.form)) for name, kind in fields)
    for cls, fields in FIELDS.items()
}
# Packers that no thread uses at present: creating one costs as much as using it.
packers: list[Any] = []
