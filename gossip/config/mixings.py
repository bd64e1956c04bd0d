"""How vectors combine: what each way is called, where its sessions lie, and what it goes with.

A new way is a row here and its class, which :mod:`gossip.exchange.session` finds by that row.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIXINGS", "MixingRule"]


@dataclass(frozen=True, slots=True)
class MixingRule:
    """``home``: module and class below ``gossip.exchange``; ``means``: what, as the reference says it after the name;
    ``does``: what a node does, as a report says it. Parts, outer momentum and codecs that need bounds go with the mean
    of two alone."""

    home: str
    means: str
    does: str = "averages"
    group: bool = False  # the mean of more than two at once
    one_way: bool = False  # nothing comes back
    conserves: bool = False  # what one gives away is taken from oneself


MIXINGS: dict[str, MixingRule] = {
    "pair": MixingRule("pair:Pair", "means of two"),
    "group": MixingRule("groups.group:Group", "means of a group", group=True),
    "push-sum": MixingRule("push:Push", "masses pushed one way", "pushes", one_way=True, conserves=True),
    "row-stochastic": MixingRule("push:Push", "copies pushed one way", "pushes", one_way=True),
}
