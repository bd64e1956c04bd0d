"""The table of filters: their names, classes, and the methods that they fit.

A new filter is a row here and its class, which :mod:`gossip.filters.registry` finds by that row.
"""

from collections.abc import Callable
from dataclasses import dataclass

AUTO_FILTER = ("clip", "none")  # For filter = "auto": the first one that fits the mixing.


@dataclass(frozen=True, slots=True)
class FilterRule:
    """The properties of one filter.

    ``home`` is its module and class in ``gossip.filters``. ``does`` is a verb with which the reference says what it
    does with wrong vectors; empty if it does nothing.
    """

    home: str
    does: str = ""
    pairs: bool = False  # It judges one partner's vector, of a pair or a push.
    groups: bool = False  # It fits a group's mean.
    cuts: bool = False  # It may take a part of a difference, and another on the other side of a pair.
    follows_movement: bool = False  # Its radius depends on how far local steps alone move the model, unless given.
    limit: str = ""  # The meaning of filter_limit; empty if the filter has no number of its own.

    def fits(self, group: bool, conserves: bool) -> bool:
        """Return True if it fits a group's mean, or else one partner's vector.

        Cutting off a vector that ``conserves`` mass would leave mass without weights.
        """
        return self.groups if group else self.pairs and not (self.cuts and conserves)


FILTERS: dict[str, FilterRule] = {
    "none": FilterRule("rule:Filter", pairs=True, groups=True),
    "clip": FilterRule(
        "clip:Clip", "cuts long differences off", pairs=True, cuts=True, follows_movement=True,
        limit="the longest difference taken whole",
    ),
    "balance": FilterRule(
        "balance:Balance", "refuses them", pairs=True, limit="T, the mixing rounds of the whole training"
    ),
    "trimmed": FilterRule(
        "trimmed:Trimmed", "leaves out the ends of a group's values", groups=True,
        limit="how many values of each element are left out at either end",
    ),
}  # fmt: skip


def names_of_filters(fits: Callable[[FilterRule], object]) -> str:
    """Return the names of the filters that fit, for a sentence."""
    return " or ".join(repr(name) for name, rule in FILTERS.items() if fits(rule))
