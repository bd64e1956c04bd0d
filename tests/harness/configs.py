"""A Config with other settings and other internal numbers, told apart by their names."""

import dataclasses
from typing import Any

from gossip.config import Config
from gossip.config.internal import Internal

INTERNAL = {field.name for field in dataclasses.fields(Internal)}


def tuned(base: Config | None = None, **changes: Any) -> Config:
    """Return ``base`` (the defaults if left out) with changes to its settings and to its ``internal``."""
    base = base or Config()
    internal = {name: changes.pop(name) for name in INTERNAL & changes.keys()}
    return dataclasses.replace(base, internal=dataclasses.replace(base.internal, **internal), **changes)
