"""A flag of this process: it was asked to stop.

An exception alone can be lost: some imports catch all exceptions, also that of a signal.
"""

from __future__ import annotations

__all__ = ["is_stop_requested", "request_stop"]

_asked = False


def request_stop() -> None:
    """Note that SIGTERM has arrived."""
    global _asked
    _asked = True


def is_stop_requested() -> bool:
    return _asked
