"""Notices for a program that holds a Node of its own accord: they go through ``logging.getLogger("gossip")``."""

from __future__ import annotations

import contextlib
import logging

__all__ = ["LEVELS", "LOGGER", "log"]

LOGGER = logging.getLogger("gossip")

# What somebody should look at, at WARNING; the course of things at INFO; exchanges, of which there may be a hundred a
# second, at DEBUG, and nowhere else. What takes a warning back has its level, too:
# who sees warnings alone would believe that it still holds.
LEVELS = {
    "alone": logging.WARNING, "together": logging.WARNING, "stalled": logging.WARNING, "moving": logging.WARNING,
    "asleep": logging.WARNING, "lossy": logging.WARNING,
    "callback": logging.WARNING, "divided": logging.WARNING, "fault": logging.WARNING, "kept": logging.WARNING,
    "load": logging.WARNING, "log": logging.WARNING, "loss": logging.WARNING, "mended": logging.WARNING,
    "merged": logging.WARNING, "put back": logging.WARNING, "refused": logging.WARNING, "replaced": logging.WARNING,
    "restarted": logging.WARNING,
    "seed": logging.WARNING, "spoiled": logging.WARNING, "state": logging.WARNING, "suspicious": logging.WARNING,
    "twin": logging.WARNING, "unreachable": logging.WARNING, "untaken": logging.WARNING, "waited": logging.WARNING,
    "waiting": logging.WARNING,
    "finished": logging.INFO, "joined": logging.INFO, "listening": logging.INFO, "member": logging.INFO,
    "memory": logging.INFO, "merging": logging.INFO, "page": logging.INFO, "started": logging.INFO,
    "transfer": logging.INFO,
    "exchange.begun": logging.DEBUG, "exchange.done": logging.DEBUG, "exchange.failed": logging.DEBUG,
}  # fmt: skip


def log(node_id: str, kind: str, sentence: str, last_resort: bool, error: BaseException | None = None) -> None:
    """Give a notice to whoever listens. ``last_resort``: also to Python's own handler, which shows warnings on stderr
    where a program has set up no logging. ``error``: what a program of the user's raised, with its traceback.

    The record has ``node`` (32 hexadecimal digits) and ``kind`` beside its message. Handlers run in the network thread,
    whose life must not hang on them: one that raises is the program's affair, and one that is slow holds up this node.
    """
    if not last_resort and not LOGGER.hasHandlers():
        return
    with contextlib.suppress(Exception):
        LOGGER.log(
            LEVELS.get(kind, logging.WARNING), "Node %s: %s", node_id[:8], sentence,
            extra={"node": node_id, "kind": kind}, exc_info=error,
        )  # fmt: skip
