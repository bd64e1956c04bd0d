"""Removed keys and values, and their replacements (docs/decisions/0044)."""

from __future__ import annotations

from gossip.errors import ConfigError

__all__ = ["KEYS", "check_removed"]

KEYS = {
    "fastest_member": "leave it out: progress is averaged, and an exchange bounds what a member's number changes",
    "average_optimizer": "leave it out: newcomers take over the optimizer's state, and exchanges mix the weights alone",
}
VALUES = {  # The setting and the first word of its value.
    ("codec", "moniqua8"): "use int8, which comes within a point of it for the same bytes",
    ("codec", "moniqua2"): "use moniqua4, or int4 where a node mixes a part of the vector",
    ("part", "top"): "use 'fragments 8', which loses less for fewer bytes, or 'mask 0.05'",
}


def check_removed(name: str, value: str) -> None:
    """Raise :class:`ConfigError` if this value of the setting was removed."""
    if (instead := VALUES.get((name, value.partition(" ")[0]))) is not None:
        raise ConfigError(f"{name} = {value!r} was removed: {instead}.")
