"""The table of selection rules: their names, classes, and properties.

A new rule is a row here and its class, which :mod:`gossip.selection.registry` finds by that row.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """The properties of one selection rule.

    ``home`` is its module and class in ``gossip.selection``. ``where`` follows "with a neighbour" in a report; it is
    empty if a partner may be anywhere.
    """

    home: str
    where: str = ""
    neighbours: bool = False  # It names a few neighbours, and a mix may be with all of them at once.
    groups: bool = False  # It can draw groups.
    free: bool = False  # Any other member may replace a busy partner.
    file: bool = False  # It needs a file of edges, and has no place for newcomers.


SELECTIONS: dict[str, SelectionRule] = {
    "uniform": SelectionRule("rule:Uniform", groups=True, free=True),
    "ring": SelectionRule("topologies:Ring", "on a ring", neighbours=True),
    "torus": SelectionRule("topologies:Torus", "on a torus", neighbours=True),
    "graph": SelectionRule("topologies:OnGraph", "on a graph", neighbours=True, file=True),
    "exponential": SelectionRule("topologies:Exponential", "on the exponential graph"),
    "grid": SelectionRule("topologies:Grid", "on a grid", groups=True),
    "nearest": SelectionRule("nearest:Nearest", "among those nearest, or at times anywhere", free=True),
}
