"""Tables of a scenario: mappings to frozen dataclasses and back, with errors that name the key."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gossip.config import FILE_KEYS, LARGEST, PRESETS, Config, shown
from gossip.config.internal import Internal
from gossip.config.setting import settings_of
from gossip.errors import ConfigError, did_you_mean

T = TypeVar("T")

MAX_LISTED_KEYS = 8  # The most known keys that a sentence lists.
NONE = "none"  # TOML has no word for an optional key that is left out on purpose.
# By the type of a key: the types of a value in TOML, and the words for it in errors.
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    bool: ((bool,), "true or false"),
}


class KeyFault(ConfigError):
    """An error about one key; each table above it adds its own name in front (:meth:`under`).

    The key is "" where only the table above knows it.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)
        self.key, self.message = key, message

    def __str__(self) -> str:
        return f"{self.key} {self.message}"

    def under(self, table: str) -> KeyFault:
        """Return the same error as seen from the table above."""
        whole = f"{table}.{self.key}" if self.key and not self.key.startswith("[") else table + self.key
        return type(self)(whole, self.message)


class UnknownKey(KeyFault):
    """An error about a key that its table does not have."""


class KeyTable:
    """The base class of tables, which refuses an unknown keyword as it refuses an unknown key of a file.

    ``FILE_KEYS`` are the keys of a file that stand for others.
    """

    __slots__ = ()
    FILE_KEYS: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *_: Any, **values: Any) -> Self:
        refuse_unknown(values, hints(cls))
        return object.__new__(cls)


def require(is_right: bool, key: str, value: object, wanted: str) -> None:
    """Raise a :class:`KeyFault` for a value that cannot work; ``wanted`` completes "it must be ..."."""
    if not is_right:
        message = "is missing" if value is None else f"= {shown(value)} cannot work"
        raise KeyFault(key, f"{message}: it must be {wanted}.")


# -- tables to dataclasses ---------------------------------------------------------------------------------------------
def settle(instance: Any) -> None:
    """Bring each field of a dataclass's instance to the type of its annotation; called in ``__post_init__``.

    Types are int, float, str, bool, Literal, tuples of them, ``X | None`` (the text "none" is None), and gossip.Config.
    Other types are dataclasses that call this, and classes with a classmethod ``parse(value)``.
    """
    for name, hint in hints(type(instance)).items():
        try:
            object.__setattr__(instance, name, parse_value(hint, getattr(instance, name)))
        except KeyFault as fault:
            raise fault.under(name) from None


def record(kind: type[T], value: object) -> T:
    """Create a dataclass from a table of its keys; return an instance unchanged."""
    if isinstance(value, kind):
        return value
    require(isinstance(value, Mapping), "", value, f"a table of {', '.join(hints(kind))}")
    table = cast(Mapping[str, Any], value)
    refuse_unknown(table, keys_of(kind))
    for field in dataclasses.fields(cast(Any, kind)):
        has_no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if has_no_default and field.name not in table:
            hint = hints(kind)[field.name]
            raise KeyFault(field.name, f"is missing: it must be {KINDS[hint][1] if hint in KINDS else 'given'}.")
    return kind(**table)


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise an :class:`UnknownKey` for the first key that is not a known one."""
    known = list(known)
    for name in table:
        if name not in known:
            choices = f": there are {', '.join(known)}" if len(known) <= MAX_LISTED_KEYS else ""
            raise UnknownKey(str(name), f"is not a key here{did_you_mean(name, known) or choices}.")


def parse_value(hint: Any, value: Any) -> Any:
    """Return a value in the type of an annotation, as :func:`settle` does; a KeyFault then has an empty key."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        other_hint = next(option for option in get_args(hint) if option is not types.NoneType)
        return None if value is None or value == NONE else parse_value(other_hint, value)
    if origin is Literal:
        require(value in get_args(hint), "", value, "one of " + ", ".join(get_args(hint)))
        return value
    if origin is tuple:
        return parse_sequence(get_args(hint), value)
    if hint in KINDS:
        return parse_scalar(hint, value)
    if isinstance(value, hint):
        return value
    if hint is Config:
        return parse_config(value)
    return hint.parse(value) if hasattr(hint, "parse") else record(hint, value)


def parse_scalar(kind: type, value: object) -> object:
    allowed, words = KINDS[kind]
    require(isinstance(value, allowed) and (kind is bool or not isinstance(value, bool)), "", value, words)
    require(not isinstance(value, int) or abs(value) <= LARGEST, "", value, "a number below 2**53")
    return float(cast(float, value)) if kind is float else value


def parse_sequence(options: tuple[Any, ...], value: object) -> tuple[Any, ...]:
    example = "[{ ... }]" if dataclasses.is_dataclass(options[0]) else "[1, 2]"
    require(isinstance(value, list | tuple), "", value, f"a list, as {example}")
    items = tuple(cast(Iterable[Any], value))
    if options[-1] is Ellipsis:
        options = (options[0],) * len(items)
    require(len(items) == len(options), "", value, f"a list of {len(options)}")
    parsed = []
    for place, (option, item) in enumerate(zip(options, items, strict=True)):
        try:
            parsed.append(parse_value(option, item))
        except KeyFault as fault:
            raise fault.under(f"[{place}]") from None
    return tuple(parsed)


def parse_config(value: object) -> Config:
    """Return the settings of a ``[gossip]`` section, which has the keys of a node's ``--config``.

    An error of :class:`Config` is a sentence. Here it becomes a KeyFault of the first key that the sentence mentions,
    or else of the first key whose value it mentions.
    """
    require(isinstance(value, Mapping), "", value, "a table of gossip's settings")
    known = hints(Config)
    optional = {name for name, hint in known.items() if type(None) in get_args(hint)}
    given = cast(Mapping[str, Any], value).items()  # For a key that is never left out, "none" is an ordinary value.
    table = {name: None if setting == NONE and name in optional else setting for name, setting in given}
    internal = [name for name, setting in given if isinstance(setting, Internal)]  # Only Python can give these.
    refuse_unknown(table, [*keys_of(Config), *internal])
    try:
        return Config.from_mapping(table)
    except ConfigError as error:
        name, _, message = str(error).partition(" ")
        if name in table:
            raise KeyFault(name, message) from error
        mentioned = [name for name in table if re.search(rf"\b{name}\b", str(error))]
        mentioned = mentioned or [name for name, setting in table.items() if repr(setting) in str(error)]
        if not mentioned:
            raise KeyFault("", f"cannot work: {lower_first(str(error))}") from error
        name = mentioned[0]
        fault = "is missing" if table[name] is None else f"= {shown(table[name])} cannot work"
        raise KeyFault(name, f"{fault}: {lower_first(str(error))}") from error


def lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields; cached, since it takes a millisecond."""
    if kind not in HINTS:
        resolved = get_type_hints(kind)
        names = settings_of(Config) if kind is Config else [field.name for field in dataclasses.fields(kind)]
        HINTS[kind] = {name: resolved[name] for name in names}
    return HINTS[kind]


HINTS: dict[Any, dict[str, Any]] = {}


def keys_of(kind: Any) -> list[str]:
    """Return the keys of a table in a file."""
    return [*(FILE_KEYS if kind is Config else getattr(kind, "FILE_KEYS", ())), *hints(kind)]


def paths(kind: type, above: str = "") -> Iterator[str]:
    """Yield every dotted key of a dataclass and of the dataclasses within it; ``above`` goes in front of each."""
    yield from (above + name for name in keys_of(kind))
    for name, hint in hints(kind).items():
        tables = [option for option in (hint, *get_args(hint)) if dataclasses.is_dataclass(option)]
        if tables and get_origin(hint) is not tuple:
            yield from paths(cast(type, tables[0]), f"{above}{name}.")


# -- dataclasses to tables ---------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """Return a value in a form that TOML can hold: the result of its method ``plain``, or a dataclass's fields.

    A field that is None is left out, or is the text "none" if its default is another value.
    """
    if hasattr(value, "plain") and not isinstance(value, Config):
        return value.plain()
    if isinstance(value, Config):
        table = nearest(fields_of(value), {name: fields_of(getattr(Config, name)()) for name in PRESETS})
        return table if value.internal == Internal() else table | {"internal": value.internal}
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def fields_of(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields in plain form, without its internal settings."""
    table = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Internal):
            continue
        if item is not None:
            table[field.name] = plain(item)
        elif field.default is not None:
            table[field.name] = NONE
    return table


def nearest(table: dict[str, Any], bases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table as a preset and the differences from it, if that is shorter than the table.

    ``bases`` has the keys of each preset. A preset with a key that the table lacks is not considered.
    """
    shortest = dict(table)
    for name, base in bases.items():
        differing = {key: value for key, value in table.items() if key not in base or base[key] != value}
        if set(base) <= set(table) and base and len(differing) + 1 < len(shortest):
            shortest = {"preset": name} | differing
    return shortest


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested mappings with other values under dotted keys; None removes a key."""
    copy = deep_copy(table)
    for dotted, value in changes.items():
        *above, last = dotted.split(".")
        if not all((*above, last)):
            raise KeyFault(dotted, "is not a key: write table.key, as gossip.mix_every_steps.")
        inner = copy
        for depth, name in enumerate(above):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                path = ".".join(above[: depth + 1])
                raise KeyFault(dotted, f"cannot be set: {path} = {shown(inner)} is no table of keys.")
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return copy


def deep_copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: deep_copy(value) if isinstance(value, Mapping) else value for name, value in table.items()}


# -- tables to text ----------------------------------------------------------------------------------------------------
def toml_text(table: Mapping[str, Any]) -> str:
    """Return a mapping as TOML, which the standard library reads but does not write.

    Plain values come first, then a section for each table, with inner tables on one line. Keys are bare words, as all
    keys of a scenario are.
    """
    lines = [f"{name} = {toml_value(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    for name, section in table.items():
        if isinstance(section, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return '"' + "".join(ESCAPES.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)  # inf and nan are TOML's words, too.


ESCAPES = {'"': '\\"', "\\": "\\\\"}
