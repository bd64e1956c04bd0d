"""Type checks of decoded values against annotations, so that no later code meets a value of another type."""

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

Check = Callable[[Any], bool]


@cache
def hints_of(kind: type[Any]) -> tuple[Any, ...]:
    """Return the annotations of a dataclass's fields, in their order."""
    return tuple(get_type_hints(kind)[name] for name in kind.__dataclass_fields__)


def fits(value: Any, hint: Any) -> bool:
    """Return True if ``value`` is of the annotated type, as are the values that it contains.

    An int is accepted for a float. Annotations of functions and type variables are not supported.
    """
    return check_of(hint)(value)


@cache
def check_of(hint: Any) -> Check:
    """Return a function that tells whether a value fits ``hint``. The cache parses each annotation only once."""
    if hint is Any:
        return lambda value: True
    if isinstance(hint, NewType):
        return check_of(hint.__supertype__)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        kinds = (int, float) if hint is float else hint
        return lambda value: isinstance(value, kinds)
    # The ellipsis of tuple[X, ...] is no annotation: all items must fit the one before it.
    checks = [check_of(each) for each in inner if each is not Ellipsis]
    if origin in (Union, UnionType):
        return lambda value: any(check(value) for check in checks)
    if issubclass(origin, Mapping):
        check_key, check_value = checks
        return lambda value: (
            isinstance(value, origin) and all(check_key(key) and check_value(value[key]) for key in value)
        )
    if origin is tuple and inner[-1] is not Ellipsis:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(checks)
            and all(check(item) for check, item in zip(checks, value, strict=True))
        )
    (check_item,) = checks  # A list, or a tuple of any length.
    return lambda value: isinstance(value, origin) and all(map(check_item, value))
