"""The table of mixings: their names, session classes, and properties.

A new mixing is a row here and its class, which :mod:`gossip.exchange.session` finds by that row.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixingRule:
    """The properties of one mixing. Parts, outer momentum and codecs with bounds only fit the mean of two.

    Push-sum gives each vector a *mass*, its weight in the swarm's mean. A push gives a share of it away.

    Attributes:
        home: Module and class in ``gossip.exchange``.
        means: Its description in the reference.
        does: The verb in a report's sentence about a node.
        trusts: What one member that lies decides; "" if the filters hold it off.
    """

    home: str
    means: str
    does: str = "averages"
    group: bool = False  # The mean of more than two members at once.
    one_way: bool = False  # Nothing comes back.
    conserves: bool = False  # A node loses the mass that it gives away.
    trusts: str = ""


MIXINGS: dict[str, MixingRule] = {
    "pair": MixingRule("pair:Pair", "means of two"),
    "group": MixingRule("groups.group:Group", "means of a group", group=True, trusts="its part of each mean"),
    "push-sum": MixingRule(
        "push:Push",
        "masses pushed one way",
        "pushes",
        one_way=True,
        conserves=True,
        trusts="the weights of all by that of its vectors",
    ),
    "row-stochastic": MixingRule("push:Push", "copies pushed one way", "pushes", one_way=True),
}
