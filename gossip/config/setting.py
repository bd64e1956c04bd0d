"""One setting's type, range and help texts, for the checks and the reference."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from gossip.errors import ConfigError, did_you_mean

LARGEST = 2**53  # The largest integer: exact as a float too.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The range and the help texts of one key.

    Numbers are ``positive``, or between ``least`` and ``most``, both included unless ``below`` excludes ``most``. All
    are finite. Strings are one of ``choices``, or of a ``form`` that only words it: Config checks it, not this module.
    """

    meaning: str
    advice: str  # When to change it.
    unit: str = ""  # Empty for strings and booleans.
    section: str = ""  # The heading that begins here.
    positive: bool = False
    least: float = -math.inf
    most: float = math.inf
    below: bool = False
    least_is: str = ""  # The meaning of the value ``least``.
    most_is: str = ""  # The meaning of the value ``most``.
    zero: str = ""  # 0 is allowed outside the range, with this meaning.
    left_out: str = ""  # The meaning of None.
    choices: tuple[str, ...] = ()
    form: str = ""
    word: str = ""  # A string that is allowed in place of a number.

    @property
    def range(self) -> str:
        """Return the range in words that follow "it must be"."""
        if self.choices or self.form:
            return self.form or ", ".join(self.choices)
        least = f"{self.least:.15g}" + (f" ({self.least_is})" if self.least_is else "")
        most = f"{self.most:.15g}" + (f" ({self.most_is})" if self.most_is else "")
        if self.positive:
            text = "positive" + (f", {most} at most" if self.most < math.inf else "")
        elif self.most == math.inf:
            text = f"{least} or more"
        else:
            text = f"at least {least} and below {most}" if self.below else f"between {least} and {most}"
        text += f", or 0 ({self.zero})" if self.zero else ""
        return text + (f', or "{self.word}"' if self.word else "")

    def allows(self, value: float) -> bool:
        """Return True if this number is in the range; only finite numbers are."""
        if value == 0 and self.zero:
            return True
        is_large_enough = value > 0 if self.positive else value >= self.least
        is_small_enough = value < self.most if self.below else value <= self.most
        return is_large_enough and is_small_enough and math.isfinite(value)


def key(default: Any, meaning: str, advice: str, **properties: Any) -> Any:
    """Return a dataclass field with its :class:`Setting` in the metadata."""
    setting = Setting(meaning=meaning, advice=advice, **properties)
    return dataclasses.field(default=default, metadata={"setting": setting})


def settings_of(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Setting]]:
    """Return every key of a settings class, in order."""
    fields = [field for field in dataclasses.fields(cls) if "setting" in field.metadata]
    return {field.name: (field, field.metadata["setting"]) for field in fields}


def check(name: str, value: Any, annotation: str, setting: Setting) -> None:
    """Raise :class:`ConfigError` if a value has another type than annotated, or is outside the range.

    The annotation is a text such as "float | None", since ``from __future__ import annotations`` leaves it unevaluated.
    TOML's 8 is accepted for 8.0. The message names what would work.
    """
    optional = "None" in annotation
    if (value is None and optional) or (setting.word and value == setting.word):
        return
    check_type(name, value, annotation.replace(" | None", "").replace(" | str", ""), setting.word)
    if setting.choices and value not in setting.choices:
        meant = did_you_mean(value, setting.choices)
        raise ConfigError(f"{name} = {shown(value)} is unknown: take one of {setting.range}{meant}.")
    if isinstance(value, int | float) and not isinstance(value, bool) and not setting.allows(value):
        advice = f"; leave it out for {setting.left_out}" if optional else ""
        finite = "" if math.isfinite(value) else "finite and "
        raise ConfigError(f"{name} = {shown(value)} cannot work: it must be {finite}{setting.range}{advice}.")


def check_type(name: str, value: object, type_name: str, word: str = "") -> None:
    """Raise :class:`ConfigError` if a value has another type; ``word`` is a string that is allowed instead."""
    has_type = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }[type_name]
    if has_type and isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{name} = {shown(value)} cannot work: it must be between -2**53 and 2**53.")
    if not has_type:
        wanted = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}[type_name]
        wanted += f', or "{word}"' if word else ""
        raise ConfigError(f"{name} = {shown(value)} cannot work: it must be {wanted}.")


def shown(value: object) -> str:
    """Return a value for a sentence, truncated; repr() fails for integers of thousands of digits."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value beyond all bounds"
    return text if len(text) <= 60 else text[:57] + "..."
