"""Notices for a program that embeds a Node, by way of ``logging.getLogger("gossip")``."""

from __future__ import annotations

import contextlib
import logging

LOGGER = logging.getLogger("gossip")

# WARNING: the user should look at it. INFO: the normal course. DEBUG: exchanges, perhaps a hundred a second, which are
# shown nowhere else. The notice that a warning no longer holds has the level of the warning, so that a user who sees
# only warnings gets it.
LEVELS = {
    "inventory": logging.INFO, "optimizer": logging.WARNING, "teacher": logging.WARNING, "undone": logging.WARNING,
    "buffer": logging.WARNING, "directions": logging.WARNING, "unchanged": logging.WARNING,
    "alone": logging.WARNING, "apart": logging.WARNING, "together": logging.WARNING, "stalled": logging.WARNING,
    "moving": logging.WARNING, "overloaded": logging.WARNING, "ranges": logging.WARNING, "rate": logging.WARNING,
    "asleep": logging.WARNING, "device": logging.WARNING, "lossy": logging.WARNING,
    "callback": logging.WARNING, "data": logging.WARNING,
    "divided": logging.WARNING, "fault": logging.WARNING, "kept": logging.WARNING,
    "load": logging.WARNING, "log": logging.WARNING, "loss": logging.WARNING, "mended": logging.WARNING,
    "merged": logging.WARNING, "moments": logging.WARNING, "overwritten": logging.WARNING, "put back": logging.WARNING,
    "mapped": logging.INFO, "refused": logging.WARNING, "replaced": logging.WARNING, "restarted": logging.WARNING,
    "samples": logging.WARNING,
    "seed": logging.WARNING, "spoiled": logging.WARNING, "state": logging.WARNING, "suspicious": logging.WARNING,
    "trust": logging.WARNING,
    "twin": logging.WARNING, "unreachable": logging.WARNING, "unshared": logging.WARNING, "unstepped": logging.WARNING,
    "untaken": logging.WARNING, "waited": logging.WARNING,
    "storage": logging.WARNING, "stored": logging.WARNING, "timeline": logging.WARNING, "waiting": logging.WARNING,
    "finished": logging.INFO, "joined": logging.INFO, "listening": logging.INFO, "member": logging.INFO,
    "merging": logging.INFO, "page": logging.INFO, "settled": logging.INFO, "started": logging.INFO,
    "transfer": logging.INFO,
    "exchange.begun": logging.DEBUG, "exchange.done": logging.DEBUG, "exchange.failed": logging.DEBUG,
}  # fmt: skip


def log(node_id: str, kind: str, sentence: str, last_resort: bool, error: BaseException | None = None) -> None:
    """Log a notice.

    The record has ``node`` (32 hexadecimal digits) and ``kind`` besides its message. Handlers run in the network
    thread, which must survive: exceptions of a handler are ignored, but a slow handler delays this node.

    ``last_resort`` also uses Python's last-resort handler, which shows warnings on stderr if no logging is set up. An
    ``error`` of the user's program is logged with its traceback.
    """
    if not last_resort and not LOGGER.hasHandlers():
        return
    with contextlib.suppress(Exception):
        LOGGER.log(
            LEVELS.get(kind, logging.WARNING), "Node %s: %s", node_id[:8], sentence,
            extra={"node": node_id, "kind": kind}, exc_info=error,
        )  # fmt: skip
