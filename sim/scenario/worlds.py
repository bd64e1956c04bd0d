"""Measured networks and churn as named presets: worlds.toml holds the figures and their sources."""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.scenario.tables import require


@functools.cache
def worlds() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("worlds.toml").read_text(encoding="utf-8"))


def names(kind: str) -> list[str]:
    """Return the presets of one kind: "quantiles_ms", "matrix", "network" or "churn"."""
    return list(worlds()[kind])


def world(kind: str, name: object, key: str) -> Mapping[str, Any]:
    """Return the figures of one preset. For an unknown name the error blames ``key`` and lists the known names."""
    require(isinstance(name, str) and name in worlds()[kind], key, name, "one of " + ", ".join(names(kind)))
    return worlds()[kind][str(name)]
