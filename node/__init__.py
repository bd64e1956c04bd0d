"""One peer on real sockets, beside a training loop."""

from gossip.config import Config
from node.node import Member, Metrics, Node

__all__ = ["Config", "Member", "Metrics", "Node"]
