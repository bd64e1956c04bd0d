"""Combinations of settings that cannot work: refused when a Config is made, with the reason and an alternative."""

from collections.abc import Iterator

from gossip.codecs import needs_spread
from gossip.config.derived import Derived
from gossip.config.filters import AUTO_FILTER, FILTERS, names_of_filters
from gossip.config.keys import MOST_PARTNERS
from gossip.config.selections import SELECTIONS
from gossip.errors import ConfigError


def check_together(config: Derived) -> None:
    """Raise :class:`ConfigError` for the first combination that cannot work."""
    checks = (
        *([interval_conflict] if config.auto_interval else []), check_momentum, check_correction,
        check_pushes, check_groups, check_staleness, check_selection, check_part, check_filter,
    )  # fmt: skip
    for check in checks:
        for reason in check(config):
            raise ConfigError(reason)


def check_momentum(config: Derived) -> Iterator[str]:
    """Yield why nodes cannot measure their outer momentum with the other settings."""
    if not config.measures_momentum:
        return
    auto = 'outer_momentum = "auto"'
    if not config.paired or config.partners != 1 or config.part != "all":
        yield f"{auto} is for pairs that mix whole vectors with one partner at a time: give a number, or leave it out."
    if config.outer_rate is not None:
        yield f"{auto} with outer_rate cannot work: the rate follows from the momentum. Leave outer_rate out."


def check_correction(config: Derived) -> Iterator[str]:
    """Yield why a correction does not fit the other settings."""
    if not config.kappa:
        return
    if not config.paired or config.partners != 1:
        yield (
            f"correction = {config.kappa:g} is for pairs, whose two sides learn exact opposites: leave correction "
            f"out, or use mixing = 'pair' with partners = 1."
        )
    if config.part != "all":
        yield (
            f"correction = {config.kappa:g} with part = {config.part!r} cannot work yet: use part = 'all', or "
            f"correction = 0."
        )
    if config.interval_steps is None:
        yield (
            f"correction = {config.kappa:g} counts intervals of steps: set mix_every_steps, for example to 8, or leave "
            f"correction out."
        )


def check_pushes(config: Derived) -> Iterator[str]:
    """Yield why pushes do not fit the other settings."""
    if not config.pushes:
        return
    if not config.plain:
        yield (
            f"mixing = {config.mixing!r} with an outer momentum cannot work: momentum needs the mean of a pair, and a "
            "push has no other half. Leave outer_momentum and outer_rate out, or use mixing = 'pair'."
        )
    if config.part != "all":
        yield (
            f"mixing = {config.mixing!r} with part = {config.part!r} cannot work: the mass of a push (a number that "
            f"travels with the vector) belongs to all of its elements. Use mixing = 'pair', or part = 'all'."
        )
    if needs_spread(config.codec_name):
        yield (
            f"mixing = {config.mixing!r} with codec = {config.codec!r} cannot work: the codec needs the distance "
            f"between both vectors, and a push gets no reply that states it. Use int8 or int4, or mixing = 'pair'."
        )
    if config.partners == 0:
        yield "partners = 0 is for mixing = 'pair': set partners to the number of receivers of a push, for example 1."


def check_groups(config: Derived) -> Iterator[str]:
    """Yield why group means do not fit the other settings."""
    if not config.grouped:
        return
    if not SELECTIONS[config.selection].groups:
        yield (
            f"mixing = {config.mixing!r} with selection = {config.selection!r} cannot work: a group is drawn from "
            "all members or from a grid. Use selection = 'grid' (exact means in few rounds) or 'uniform'."
        )
    if config.partners != 1:
        yield (
            f"partners = {config.partners} is not for groups: set group_size to the number of members that average "
            f"together, and leave partners out."
        )
    if config.part != "all":
        yield (
            f"mixing = {config.mixing!r} with part = {config.part!r} cannot work: a group divides the whole vector "
            "among its members. Use mixing = 'pair', or part = 'all'."
        )
    if config.codec_name == "auto":
        yield "codec = 'auto' chooses for one link and a group has many: name a codec, for example bf16 or int8."
    if needs_spread(config.codec_name):
        yield (
            f"mixing = {config.mixing!r} with codec = {config.codec!r} cannot work: the codec learns the distance "
            f"between two partners, and a group has more. Use int8 or int4, or mixing = 'pair'."
        )


def check_staleness(config: Derived) -> Iterator[str]:
    """Yield why a bound on staleness does not fit the other settings."""
    if config.max_version_gap is not None and config.interval_steps is None:
        yield (
            "max_version_gap counts intervals of steps: set mix_every_steps, for example to 8, or leave "
            "max_version_gap out."
        )


def interval_conflict(config: Derived) -> Iterator[str]:
    """Yield why a node with these settings cannot choose its own interval."""
    auto = 'mix_every_steps = "auto"'
    if not config.paired or config.partners != 1:
        yield f"{auto} is for pairs with one partner at a time: name a number of steps, or use mixing = 'pair'."
    if config.part != "all":
        yield (
            f"{auto} with part = {config.part!r} cannot work: it weighs the bytes of whole vectors. Name a number of "
            f"steps."
        )
    if config.max_version_gap is not None:
        yield f"{auto} with max_version_gap cannot work: a gap counts intervals of one length. Name a number of steps."


def check_selection(config: Derived) -> Iterator[str]:
    """Yield why the selection of partners does not fit the other settings."""
    if SELECTIONS[config.selection].file and not config.graph:
        yield (
            "selection = 'graph' needs the file of its edges, two members on each line: set graph to its path, for "
            "example 'edges.txt'."
        )
    if config.graph and not SELECTIONS[config.selection].file:
        yield f"graph = {config.graph!r} is for selection = 'graph', and selection is {config.selection!r}."
    if config.selection == "grid" and config.group_size == 0:
        yield "group_size = 0 (all members) has no grid: use selection = 'uniform', or a group_size from 2 to 16."
    if config.partners == 0 and not SELECTIONS[config.selection].neighbours:
        yield (
            f"partners = 0 mixes with all neighbours at once, and selection = {config.selection!r} has no neighbours: "
            "use ring, torus or graph."
        )
    if config.partners == 0 and not config.plain:
        yield (
            "partners = 0 with an outer momentum cannot work: several mixes at once would count the same local "
            "progress several times. Use partners = 1."
        )
    if config.partners > 1 and config.paired:
        yield (
            f"partners = {config.partners} is for pushes: a pair has one partner at a time. Use partners = 1, "
            "partners = 0 (all neighbours of a graph) or mixing = 'row-stochastic'."
        )


def check_part(config: Derived) -> Iterator[str]:
    """Yield why a part of the vector does not fit the codec."""
    if needs_spread(config.codec_name) and config.part.startswith("mask"):
        yield (
            f"codec = {config.codec!r} with part = {config.part!r} cannot work: the codec learns the spread of the "
            f"same elements over many mixes, and a mask has other elements each time. Use int8 or int4, part = "
            f"'fragments 8' or 'all'."
        )


def check_filter(config: Derived) -> Iterator[str]:
    """Yield why the filter does not fit the other settings."""
    rule, limit = FILTERS[config.filter_name], config.filter_limit
    if limit is not None and not rule.limit:
        limited = names_of_filters(lambda rule: rule.limit)
        yield f"filter_limit is for filter = {limited}, and filter is {config.filter!r}."
    if limit is not None and config.filter_name == "trimmed" and limit not in range(1, MOST_PARTNERS // 2 + 1):
        yield f"filter_limit = {limit:g} with filter = 'trimmed' counts members: use 1 to {MOST_PARTNERS // 2}."
    if rule.fits(config.grouped, config.conserves):
        return
    if config.grouped:
        instead = names_of_filters(lambda rule: rule.groups and not rule.pairs)
        yield f"filter = {config.filter!r} judges a pair: use filter = {instead} for groups, or mixing = 'pair'."
    elif not rule.pairs:
        yield f"filter = {config.filter!r} is for groups: use mixing = 'group', or filter = {AUTO_FILTER[0]!r}."
    else:
        instead = names_of_filters(lambda rule: rule.pairs and not rule.cuts and not rule.groups)
        yield (
            f"filter = {config.filter!r} with mixing = {config.mixing!r} cannot work: weights that the filter cuts off "
            f"would leave their mass behind, and all averages would be wrong. Use filter = {instead}, or mixing = "
            f"'row-stochastic'."
        )
