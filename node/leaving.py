"""Whether this process was asked to leave: an exception alone is lost where the signal falls into an import, of which
some catch everything."""

from __future__ import annotations

__all__ = ["ask", "asked"]

_asked = False


def ask() -> None:
    """SIGTERM came."""
    global _asked
    _asked = True


def asked() -> bool:
    return _asked
