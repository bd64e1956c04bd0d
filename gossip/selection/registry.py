"""The rules for whom to average with next, by name.

Uniform: rule.py. By place among the members: topologies.py. By measured nearness: nearest.py.
"""

from __future__ import annotations

from gossip.config import Config
from gossip.errors import ConfigError
from gossip.selection.graphs import Graph
from gossip.selection.nearest import Nearest
from gossip.selection.rule import Selector, Uniform
from gossip.selection.topologies import Exponential, Grid, OnGraph, Ring, Torus

__all__ = ["SELECTIONS", "selector", "selector_of"]

SELECTIONS = ("uniform", "ring", "torus", "graph", "exponential", "grid", "nearest")


def selector(
    name: str,
    graph: Graph | None = None,
    *,
    at_once: bool = False,
    group_size: int = 4,
    vector_mb: float = 0.0,
    shortcut: float = 0.1,
) -> Selector:
    """The selector of this name, one of SELECTIONS. ``graph`` is for graph alone, ``group_size`` for grid, and
    ``vector_mb`` (MB that cross the wire each way) and ``shortcut`` for nearest.

    Raises :class:`~gossip.errors.ConfigError` for a name that is none, and for a graph missing or to no use.
    """
    if name == "graph":
        if graph is None:
            raise ConfigError("selection = 'graph' needs a graph: name its file, with one link a line, as in 0 1.")
        return OnGraph(graph, at_once)
    if graph is not None:
        raise ConfigError(f"selection = {name!r} uses no graph: leave the graph out, or set selection = 'graph'.")
    if at_once and name in ("uniform", "nearest"):
        raise ConfigError(
            f"selection = {name!r} has everybody for a neighbour, too many to mix with at once: mix with one of them, "
            f"or set selection = 'ring', 'torus' or 'graph'."
        )
    if name == "grid":
        return Grid(at_once, group_size)
    if name == "nearest":
        return Nearest(vector_mb, shortcut)
    plain = {kind.name: kind for kind in (Uniform, Ring, Torus, Exponential)}
    if name not in plain:
        raise ConfigError(f"selection = {name!r} is unknown: take one of {', '.join(SELECTIONS)}.")
    return plain[name](at_once)


def selector_of(config: Config, elements: int, graph: Graph | None = None) -> Selector:
    """The selector that ``config`` asks for, for models of ``elements``. ``graph`` is what the file holds that
    ``config.graph`` names: whoever has files reads it, once for all its peers. Raises as :func:`selector` does."""
    return selector(
        config.selection, graph, at_once=config.partners == 0, group_size=config.group_size,
        vector_mb=4e-6 * elements, shortcut=config.shortcuts,
    )  # fmt: skip
