"""The sessions of each way of mixing, found by name: ``MIXINGS`` says where each lies."""

from __future__ import annotations

from importlib import import_module

from gossip.config import Config
from gossip.config.mixings import MIXINGS
from gossip.exchange.session import Session

__all__ = ["kind_of"]


def kind_of(config: Config) -> type[Session]:
    """What the exchanges of this configuration are."""
    module, _, name = MIXINGS[config.mixing].home.partition(":")
    kind: type[Session] = getattr(import_module(f"gossip.exchange.{module}"), name)
    return kind
