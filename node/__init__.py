"""One peer on real sockets, running in the background of a training loop."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if os.name == "nt":
    raise ImportError("gossip-trainer needs Linux or macOS: on Windows run it in WSL, as `wsl --install` sets it up.")

if TYPE_CHECKING:
    from gossip.config import Config
    from node.node import Member, Metrics, Node

__all__ = ["Config", "Member", "Metrics", "Node"]


def __getattr__(name: str) -> object:
    """Import torch and trio only when a node is needed (PEP 562): the command line works without them."""
    if name == "Config":
        from gossip.config import Config

        return Config
    if name in __all__:
        from node import node

        return getattr(node, name)
    raise AttributeError(f"module 'node' has no attribute {name!r}")
