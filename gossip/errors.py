"""Whose fault it is: a local fault reaches the user with what to do about it, a remote fault ends a link."""

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
    """Everything this library raises on purpose. ``str(error)`` is one sentence for a person."""


class LocalError(GossipError):
    """Ours, or the user's: raised in the caller's thread, and says what to do."""


class ConfigError(LocalError, ValueError):
    """A setting, or a combination of settings, that cannot work; names what would."""


class LayoutError(LocalError, ValueError):
    """The model cannot be exchanged as it is, or it changed shape while the node was running."""


class IdentityError(LocalError):
    """The key, the swarm secret or the invite on this machine cannot be used."""


class CheckpointError(LocalError):
    """A checkpoint could not be written (the previous one is intact) or read."""


class DataError(LocalError):
    """A dataset is missing or cannot be divided."""


class FaultError(LocalError):
    """A fault of this library ended the network side of a node, and nothing is to be tried again."""


class RemoteError(GossipError):
    """The other side's: ends the link it came over. ``code`` is what crosses the wire, never the exception's text."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class ProtocolError(RemoteError):
    """Bytes or a message that no correct peer sends."""

    def __init__(self, sentence: str) -> None:
        super().__init__("protocol", sentence)


class RefusedError(RemoteError):
    """The other side closed the link and said why: another swarm, another model, another version, no room."""
