"""Exceptions by origin: a LocalError tells the user what to do, a RemoteError ends a link."""

import difflib
import math
from collections.abc import Iterable
from numbers import Integral

__all__ = [
    "LONGEST_WORD", "CheckpointError", "ConfigError", "DataError", "FaultError", "GossipError", "IdentityError",
    "LayoutError", "LocalError", "ProtocolError", "RefusedError", "RemoteError", "checked_whole", "did_you_mean",
]  # fmt: skip

LONGEST_WORD = 64  # characters: comparing takes time in proportion to the product of both lengths


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: the most similar known one, or an empty text."""
    similar = difflib.get_close_matches(str(word)[:LONGEST_WORD], known, n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


class GossipError(Exception):
    """The base of all exceptions of this library. ``str(error)`` is one sentence for the user."""


class LocalError(GossipError):
    """An error on this machine: of the user, of the environment or of this library.

    It is raised in the caller's thread, and its sentence says what to do.
    """


class ConfigError(LocalError, ValueError):
    """An impossible setting or combination of settings. The sentence names one that works."""


class LayoutError(LocalError, ValueError):
    """The model has tensors that cannot be exchanged, or changed shape while the node was running."""


class IdentityError(LocalError):
    """The key, the swarm secret or the invite on this machine cannot be used."""


class CheckpointError(LocalError):
    """A checkpoint could not be written (the previous one is intact) or read."""


class DataError(LocalError):
    """A dataset is missing or cannot be divided."""


class FaultError(LocalError):
    """A bug of this library ended the network side of a node, which does not start again."""


class RemoteError(GossipError):
    """An error that the other side of a link caused. It ends that link.

    Only ``code`` crosses the wire, never the exception's text.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class ProtocolError(RemoteError):
    """Bytes or a message that no correct peer sends."""

    def __init__(self, sentence: str) -> None:
        super().__init__("protocol", sentence)


class RefusedError(RemoteError):
    """The other side refused this node and gave a reason: another swarm, model or version, or no room."""


def checked_whole(
    name: str, value: object, advice: str, least: float = 1, most: float = math.inf,
    kind: type[LocalError] = ConfigError,
) -> int:  # fmt: skip
    """Return a whole number in this range, as 5 or 1e6. Raise an error, which ends in the advice, for another value."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise kind(f"{name} is {value!r}: {advice}")
    return int(value)
