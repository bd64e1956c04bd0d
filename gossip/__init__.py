"""Decisions and arithmetic of decentralised training: no socket, file, clock, thread or global random generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossip.config import Config

__all__ = ["Config"]


def __getattr__(name: str) -> object:
    """``gossip.Config``, imported when it is asked for (PEP 562): ``gossip --help`` needs no numpy."""
    if name == "Config":
        from gossip.config import Config

        return Config
    raise AttributeError(f"module 'gossip' has no attribute {name!r}")
