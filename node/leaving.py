"""A flag that tells whether this process was asked to stop.

An exception alone can be lost: some imports catch all exceptions, also that of a signal.
"""

from __future__ import annotations

__all__ = ["ask", "asked"]

_asked = False


def ask() -> None:
    """Note that SIGTERM has arrived."""
    global _asked
    _asked = True


def asked() -> bool:
    return _asked
