"""The filters, of what is accepted from others: what each is called, where it lies, and what it goes with.

A new filter is a row here and its class, which :mod:`gossip.filters.registry` finds by that row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["AUTO_FILTER", "FILTERS", "FilterRule", "filters_that"]

AUTO_FILTER = ("clip", "none")  # of filter = "auto": the first that goes with how vectors combine


@dataclass(frozen=True, slots=True)
class FilterRule:
    """``home``: module and class below ``gossip.filters``; ``does``: what, as the reference says it after the name."""

    home: str
    does: str = ""
    pairs: bool = False  # it judges what one partner sends: of a pair, or pushed
    groups: bool = False  # it goes with a group's mean
    cuts: bool = False  # it may take a part of a difference, and each side of a pair another part
    follows: bool = False  # by how far local steps alone move the model, unless a radius is given
    keys: tuple[str, ...] = ()  # that are for this one alone

    def fits(self, group: bool, conserves: bool) -> bool:
        """Whether it goes with a group's mean, or with one partner's vector; what is cut off of one that ``conserves``
        would be mass without weights."""
        return self.groups if group else self.pairs and not (self.cuts and conserves)


FILTERS: dict[str, FilterRule] = {
    "none": FilterRule("rule:Filter", pairs=True, groups=True),
    "clip": FilterRule(
        "clip:Clip", "cuts long differences off", pairs=True, cuts=True, follows=True,
        keys=("clip_radius", "clip_factor"),
    ),
    "balance": FilterRule(
        "balance:Balance", "refuses them", pairs=True, keys=("balance_gamma", "balance_kappa", "balance_rounds")
    ),
    "trimmed": FilterRule("trimmed:Trimmed", "leaves out the ends of a group's values", groups=True, keys=("trim",)),
}  # fmt: skip


def filters_that(fit: Callable[[FilterRule], bool]) -> str:
    """The names of some, as a sentence proposes them."""
    return " or ".join(repr(name) for name, rule in FILTERS.items() if fit(rule))
