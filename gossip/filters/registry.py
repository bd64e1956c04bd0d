"""The registry of filters: ``FILTERS`` names each one's module and class."""

from importlib import import_module

from gossip.config import Config
from gossip.config.filters import FILTERS
from gossip.filters.rule import Filter


def filter_of(config: Config) -> Filter:
    """Return one peer's filter, as ``config`` asks for it."""
    module, _, class_name = FILTERS[config.filter_name].home.partition(":")
    filter_class: type[Filter] = getattr(import_module(f"gossip.filters.{module}"), class_name)
    return filter_class(config)
