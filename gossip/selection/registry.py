"""The registry of selection rules: ``SELECTIONS`` names each one's module and class."""

from importlib import import_module

from gossip.config import Config
from gossip.config.selections import SELECTIONS
from gossip.errors import ConfigError
from gossip.selection.graphs import Graph
from gossip.selection.rule import Options, Selector

DEFAULTS = Options()


def selector(name: str, options: Options = DEFAULTS) -> Selector:
    """Return the selector of this name.

    Raises:
        ConfigError: The name is unknown, or the options do not fit it.
    """
    rule = SELECTIONS.get(name)
    if rule is None:
        raise ConfigError(f"selection = {name!r} is unknown: take one of {', '.join(SELECTIONS)}.")
    if options.graph is not None and not rule.file:
        raise ConfigError(f"selection = {name!r} uses no graph: leave the graph out, or set selection = 'graph'.")
    module, _, class_name = rule.home.partition(":")
    selector_class: type[Selector] = getattr(import_module(f"gossip.selection.{module}"), class_name)
    return selector_class.from_options(options)


def selector_of(config: Config, graph: Graph | None = None) -> Selector:
    """Return the selector that ``config`` asks for.

    ``graph`` is the contents of the file ``config.graph``. The caller reads it, once for all its peers.

    Raises:
        ConfigError: As :func:`selector`.
    """
    at_once, shortcut = config.partners == 0, config.internal.shortcuts
    return selector(config.selection, Options(at_once, config.group_size, shortcut, graph))
