"""The rules for whom to average with: what each is called, where it lies, and what it goes with.

A new rule is a row here and its class, which :mod:`gossip.selection.registry` finds by that row.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SELECTIONS", "SelectionRule"]


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """``home``: module and class below ``gossip.selection``; ``where``: as a report says it, "" for anywhere."""

    home: str
    where: str = ""
    neighbours: bool = False  # it names a few, and a mix may be with all of them at once
    groups: bool = False  # groups may be drawn by it
    free: bool = False  # anybody else may stand in for a partner that is busy
    file: bool = False  # it needs a file of edges, and has no place for newcomers


SELECTIONS: dict[str, SelectionRule] = {
    "uniform": SelectionRule("rule:Uniform", groups=True, free=True),
    "ring": SelectionRule("topologies:Ring", "on a ring", neighbours=True),
    "torus": SelectionRule("topologies:Torus", "on a torus", neighbours=True),
    "graph": SelectionRule("topologies:OnGraph", "on a graph", neighbours=True, file=True),
    "exponential": SelectionRule("topologies:Exponential", "on the exponential graph"),
    "grid": SelectionRule("topologies:Grid", "on a grid", groups=True),
    "nearest": SelectionRule("nearest:Nearest", "among those nearest, or at times anywhere", free=True),
}
