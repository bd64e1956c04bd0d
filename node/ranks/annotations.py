"""Whether a decoded value is what a type annotation says, so that no later line meets a value of another type."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

__all__ = ["fits", "hints_of"]


@cache
def hints_of(kind: type[Any]) -> tuple[Any, ...]:
    """Return the annotations of a dataclass's fields, in their order."""
    return tuple(get_type_hints(kind)[name] for name in kind.__dataclass_fields__)


def fits(value: Any, hint: Any) -> bool:
    """Return True if ``value`` is of the annotated type, as are the values that it contains.

    An int does for a float. Annotations of functions and type variables are not known here.
    """
    if hint is Any:
        return True
    if isinstance(hint, NewType):
        hint = hint.__supertype__
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is None:
        return isinstance(value, int | float if hint is float else hint)
    if not isinstance(value, origin):
        return False
    if issubclass(origin, Mapping):
        return all(fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return inner[0] is Any or all(fits(one, inner[0]) for one in value)
