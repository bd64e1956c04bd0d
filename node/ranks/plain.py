"""A codec of plain data, for the commands between the ranks of one node: a pickle could run code."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, get_origin

import msgpack
import numpy as np
import torch

from gossip.errors import ConfigError, LocalError
from node.ranks.annotations import fits, hints_of

T = TypeVar("T")

# Codes of msgpack's extension types, for values that msgpack itself would lose or turn into others. A RECORD is a
# dataclass.
TUPLE, INTEGER, TYPE, RECORD, ERROR = range(5)
KINDS: dict[str, type[Any]] = {}  # Records that may be sent, by name.

MAX_BYTES = 32 << 20  # Limit of a value: placeholders of some 200,000 optimizer tensors, or six full member tables.
MAX_CONTAINERS = 1 << 20  # Limit of lists and mappings in a value: each takes 60 bytes or more for one byte sent.
MAX_DEPTH = 24  # Limit of nested extension types: each takes 40 KB of the C stack, of which a thread has 8 MB.
# Each level of nesting copies its bytes. The copies may be COPIES times as large as the value, plus SMALL_BYTES.
COPIES, SMALL_BYTES = 8, 1 << 20
MAX_CHARACTERS = 2000  # Limit of characters in a sentence.


def register(*kinds: type[Any]) -> None:
    """Register dataclasses as types that may be sent."""
    KINDS.update({kind.__name__: kind for kind in kinds})


def unreadable_error(received: str) -> LocalError:
    """Return the error for bytes or values that no rank of this version sends."""
    return LocalError(
        f"What came from another rank of this node's group is no message of this version ({received}): install the "
        "same version of this package on all ranks, and keep others from the ports of torch.distributed."
    )


def one_line(text: str) -> str:
    """Return ``text`` as one line that a terminal can show: control characters become ``?``, and long text is cut."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_CHARACTERS])


# -- to bytes ----------------------------------------------------------------------------------------------------------
def pack_value(value: Any) -> bytes:
    """Return the bytes of ``value``. Tuples stay tuples; mappings and subclasses of other types become plain ones.

    Raises:
        ConfigError: A value is not plain data, for example a function, or the whole is larger or nested deeper than
            :func:`unpack_value` accepts.
    """
    data = pack(value, 0)
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"Rank 0 of this node's group has {len(data) >> 20} MB to send the others besides tensors, and may send "
            f"{MAX_BYTES >> 20} MB: keep long lists in the optimizer's state as tensors."
        )
    return data


def pack(value: Any, depth: int) -> bytes:
    """Return the bytes of a value inside ``depth`` extension types."""
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"Rank 0 of this node's group holds tuples nested deeper than {MAX_DEPTH} levels, which do not reach the "
            "other ranks: take them out of the optimizer's groups and state."
        )
    data: bytes = msgpack.packb(value, default=partial(extension_of, depth + 1), strict_types=True)
    return data


def extension_of(depth: int, value: Any) -> Any:
    """Return an extension type for msgpack, or the plain value of a subclass's instance."""
    kind = type(value)
    if isinstance(value, tuple):
        return msgpack.ExtType(TUPLE, pack(list(value), depth))
    if KINDS.get(kind.__name__) is kind:
        row = [kind.__name__, *(getattr(value, field.name) for field in fields(kind))]
        return msgpack.ExtType(RECORD, pack(row, depth))
    if isinstance(value, torch.dtype):
        return msgpack.ExtType(TYPE, str(value).removeprefix("torch.").encode())
    if isinstance(value, LocalError):
        return msgpack.ExtType(ERROR, pack([kind.__name__, one_line(str(value))], depth))
    if isinstance(value, np.generic):
        return value.item()
    if kind is int:  # An integer of more than 64 bits.
        return msgpack.ExtType(INTEGER, str(value).encode())
    if isinstance(value, Mapping):
        return dict(value)
    bases: tuple[type[Any], ...] = (int, float, str, bytes, list)
    for base in bases:  # An instance of a subclass becomes a plain one.
        if isinstance(value, base):
            return base(value)
    raise ConfigError(
        f"Rank 0 of this node's group holds a {kind.__name__} where only numbers, texts, tensors, and lists and "
        "mappings of them reach the other ranks: take it out of the optimizer's groups and state."
    )


# -- from bytes --------------------------------------------------------------------------------------------------------
def unpack_value(data: bytes, hint: Any = Any) -> Any:
    """Return the value that :func:`pack_value` was given. Only constructors of registered types run.

    For any bytes this takes less than a GB and a few levels of the stack.

    Args:
        data: At most ``MAX_BYTES`` bytes.
        hint: The annotation that the value must fit.

    Raises:
        LocalError: The bytes are not an encoding of such a value; its text says why.
    """
    if len(data) > MAX_BYTES:
        raise unreadable_error(f"{len(data)} bytes at once")
    try:
        value = Decoding(len(data)).value(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise unreadable_error(one_line(f"{type(error).__name__}: {error}")) from error
    return checked(value, hint)


def checked(value: T, hint: Any) -> T:
    """Return ``value`` if it fits the annotation; raise LocalError otherwise."""
    if not fits(value, hint):
        raise unreadable_error(f"a {type(value).__name__} that is no {hint if get_origin(hint) else hint.__name__}")
    return value


class Decoding:
    """The decoding of one value, with its remaining budgets of bytes and containers."""

    def __init__(self, size: int) -> None:
        self.bytes_left, self.containers_left, self.depth = COPIES * size + SMALL_BYTES, MAX_CONTAINERS, 0

    def value(self, data: bytes) -> Any:
        """Decode one value; the codec of an extension type calls this again for the value inside."""
        self.bytes_left -= len(data)
        if self.depth > MAX_DEPTH or self.bytes_left < 0:
            raise unreadable_error("values nested too deep")
        return msgpack.unpackb(
            data, ext_hook=self.extension, list_hook=self.count, object_hook=self.count, strict_map_key=False
        )

    def count(self, container: T) -> T:
        """Count a decoded list or mapping against the budget, and return it."""
        self.containers_left -= 1
        if self.containers_left < 0:
            raise unreadable_error(f"more than {MAX_CONTAINERS} lists and mappings")
        return container

    def extension(self, code: int, data: bytes) -> Any:
        """Reverse :func:`extension_of`."""
        if code == INTEGER:
            return int(data)
        if code == TYPE:
            dtype = vars(torch).get(data.decode())  # getattr would import torch's lazy modules.
            if not isinstance(dtype, torch.dtype):
                raise unreadable_error("no type of tensors")
            return dtype
        self.depth += 1
        values = checked(self.value(data), list[Any])
        self.depth -= 1
        if code == TUPLE:
            return tuple(values)
        if code == RECORD:
            kind: Any = kind_of(values)
            contents, hints = values[1:], hints_of(kind)
            if len(contents) != len(hints):
                raise unreadable_error(f"a {kind.__name__} of {len(contents)} fields")
            return kind(*map(checked, contents, hints))
        if code == ERROR and len(values) == 2 and fits(values, list[str]):
            name, sentence = values
            return next((kind for kind in local_errors() if kind.__name__ == name), LocalError)(one_line(sentence))
        raise unreadable_error(f"an extension type {code}")


def kind_of(values: list[Any]) -> type[Any]:
    """Return the registered type whose name is the first of these values."""
    kind = KINDS.get(values[0]) if values and isinstance(values[0], str) else None
    if kind is None:
        raise LocalError("Rank 0 of this node's group runs another version of this package: install the same on all.")
    return kind


def local_errors(kind: type[LocalError] = LocalError) -> Iterator[type[LocalError]]:
    """Yield all subclasses of this error, at any depth."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from local_errors(subclass)
