"""Type checks of decoded values against annotations, so that no later code meets a value of another type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

__all__ = ["fits", "hints_of"]

Test = Callable[[Any], bool]


@cache
def hints_of(kind: type[Any]) -> tuple[Any, ...]:
    """Return the annotations of a dataclass's fields, in their order."""
    return tuple(get_type_hints(kind)[name] for name in kind.__dataclass_fields__)


def fits(value: Any, hint: Any) -> bool:
    """Return True if ``value`` is of the annotated type, as are the values that it contains.

    An int is accepted for a float. Annotations of functions and type variables are not supported.
    """
    return test_of(hint)(value)


@cache
def test_of(hint: Any) -> Test:
    """Return :func:`fits` for one annotation, which is parsed only once."""
    if hint is Any:
        return lambda value: True
    if isinstance(hint, NewType):
        return test_of(hint.__supertype__)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        kinds = (int, float) if hint is float else hint
        return lambda value: isinstance(value, kinds)
    tests = [test_of(one) for one in inner if one is not Ellipsis]
    if origin in (Union, UnionType):
        return lambda value: any(test(value) for test in tests)
    if issubclass(origin, Mapping):
        of_key, of_value = tests
        return lambda value: isinstance(value, origin) and all(of_key(key) and of_value(value[key]) for key in value)
    if origin is tuple and inner[-1] is not Ellipsis:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(one) for test, one in zip(tests, value, strict=True))
        )
    (of_each,) = tests
    return lambda value: isinstance(value, origin) and all(map(of_each, value))
