"""The attacks on exchanges of :mod:`stalls`, on swarms that mix otherwise than by random pairs."""

from __future__ import annotations

import dataclasses
from typing import Any

import stalls
from attack import ATTACKS

__all__ = ["WAYS", "stalls"]

WAYS: dict[str, dict[str, Any]] = {
    "lockstep": {"max_version_gap": 0.0},
    "neighbours": {"partners": 0, "selection": "ring"},
    "push-sum": {"mixing": "push-sum"},
    "row-stochastic": {"mixing": "row-stochastic", "partners": 2},
}
STALLS = "offer-stall", "accept-stall", "answer-stall", "commit-stall", "aborts"

for way, config in WAYS.items():
    for name in STALLS:
        attack = ATTACKS[name]
        ATTACKS[f"{way}-{name}"] = dataclasses.replace(
            attack, name=f"{way}-{name}", what=f"{way}: {attack.what}", config=tuple(config.items())
        )
