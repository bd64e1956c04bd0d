"""Decentralised training without a coordinator.

``gossip.Node`` takes part in a swarm next to a training loop; ``gossip.simulate`` simulates a swarm in virtual time.

The peer below holds only decisions and arithmetic: no socket, file, clock, thread or global random generator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossip.config import Config
    from gossip.errors import GossipError as Error
    from node import Node
    from node.reader import Reader
    from sim import Scenario, simulate

__all__ = ["Config", "Error", "Node", "Reader", "Scenario", "simulate"]

PUBLIC_NAMES = {  # Where each one is defined: its module and its name there.
    "Config": ("gossip.config", "Config"),
    "Error": ("gossip.errors", "GossipError"),
    "Node": ("node", "Node"),
    "Reader": ("node.reader", "Reader"),
    "Scenario": ("sim", "Scenario"),
    "simulate": ("sim", "simulate"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562): ``gossip --help`` needs no numpy, and a node no simulator."""
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module 'gossip' has no attribute {name!r}")
    module, attribute = PUBLIC_NAMES[name]
    package, _, inner = module.partition(".")
    found = top = import_module(package)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if not inner or error.name != module:
            raise
    if not hasattr(found, attribute):  # A script's own folder comes first on sys.path, and may hold a node.py.
        where = getattr(top, "__file__", None) or ", ".join(getattr(top, "__path__", ()))
        raise ImportError(f"{where} hides the package {package!r} of gossip-trainer: rename that file or folder.")
    return getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
