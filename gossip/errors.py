"""Exceptions by origin: a local fault tells the user what to do, a remote fault ends a link."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FaultError",
    "GossipError",
    "IdentityError",
    "LayoutError",
    "LocalError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
]


class GossipError(Exception):
    """The base of all exceptions of this library. ``str(error)`` is one sentence for the user."""


class LocalError(GossipError):
    """A fault of this node or its user: raised in the caller's thread, and says what to do."""


class ConfigError(LocalError, ValueError):
    """An impossible setting or combination of settings; names what would work."""


class LayoutError(LocalError, ValueError):
    """The model cannot be exchanged as it is, or changed shape while the node was running."""


class IdentityError(LocalError):
    """The key, the swarm secret or the invite on this machine cannot be used."""


class CheckpointError(LocalError):
    """A checkpoint could not be written (the previous one is intact) or read."""


class DataError(LocalError):
    """A dataset is missing or cannot be divided."""


class FaultError(LocalError):
    """A fault of this library that ended the network side of a node, without another attempt."""


class RemoteError(GossipError):
    """A fault of the other side: ends its link. Only ``code`` crosses the wire, never the exception's text."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class ProtocolError(RemoteError):
    """Bytes or a message that no correct peer sends."""

    def __init__(self, sentence: str) -> None:
        super().__init__("protocol", sentence)


class RefusedError(RemoteError):
    """The other side closed the link and gave a reason: another swarm, another model, another version, no room."""
