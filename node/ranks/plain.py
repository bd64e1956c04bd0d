"""Plain data as bytes and back, for what the ranks of one node say to each other: a pickle could run code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from gossip.errors import ConfigError, LocalError

__all__ = ["packed", "spoken", "unpacked"]

TUPLE, INTEGER, TYPE, RECORD, MAPPING, ERROR = range(6)  # codes of msgpack's extension types
KINDS: dict[str, type[Any]] = {}  # records and mappings that may be said, by name


def spoken(*kinds: type[Any]) -> None:
    """Let dataclasses, and mappings that are made of a dict, be said."""
    KINDS.update({kind.__name__: kind for kind in kinds})


def packed(value: Any) -> bytes:
    """Return the bytes of ``value``; tuples stay tuples, and other mappings and subclasses become the plain type.

    Raises:
        ConfigError: A value is of a type that is not plain, as a function or an object of the program.
    """
    data: bytes = msgpack.packb(value, default=extended, strict_types=True)
    return data


def unpacked(data: bytes) -> Any:
    """Return what :func:`packed` was given. Runs nothing but the constructors of the kinds that are ``spoken``."""
    return msgpack.unpackb(data, ext_hook=restored, strict_map_key=False)


def extended(value: Any) -> Any:
    """Give msgpack an extension type, or the plain value in place of one of a subclass."""
    kind = type(value)
    if isinstance(value, tuple):
        return msgpack.ExtType(TUPLE, packed(list(value)))
    if KINDS.get(kind.__name__) is kind:
        if is_dataclass(kind):
            return msgpack.ExtType(RECORD, packed([kind.__name__, *(getattr(value, one.name) for one in fields(kind))]))
        return msgpack.ExtType(MAPPING, packed([kind.__name__, dict(value)]))
    if isinstance(value, torch.dtype):
        return msgpack.ExtType(TYPE, str(value).removeprefix("torch.").encode())
    if isinstance(value, LocalError):
        return msgpack.ExtType(ERROR, packed([kind.__name__, str(value)]))
    if isinstance(value, np.generic):
        return value.item()
    if kind is int:  # beyond 64 bits
        return msgpack.ExtType(INTEGER, str(value).encode())
    if isinstance(value, Mapping):
        return dict(value)
    bases: tuple[type[Any], ...] = (int, float, str, bytes, list)
    for base in bases:
        if isinstance(value, base):
            return base(value)
    raise ConfigError(
        f"Rank 0 of this node's group holds a {kind.__name__} where only numbers, texts, tensors, and lists and "
        "mappings of them reach the other ranks: take it out of the optimizer's groups and state."
    )


def restored(code: int, data: bytes) -> Any:
    """Undo :func:`extended`."""
    if code == INTEGER:
        return int(data)
    if code == TYPE:
        return getattr(torch, data.decode())
    values = unpacked(data)
    if code == TUPLE:
        return tuple(values)
    name, *given = values
    if code == ERROR:
        return next((kind for kind in local_errors() if kind.__name__ == name), LocalError)(*given)
    if name in KINDS:
        return KINDS[name](*given)
    raise LocalError("Rank 0 of this node's group runs another version of this package: install the same on all.")


def local_errors(kind: type[LocalError] = LocalError) -> Iterator[type[LocalError]]:
    for one in kind.__subclasses__():
        yield one
        yield from local_errors(one)
