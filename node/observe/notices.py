"""Notices for a program that embeds a Node, by way of ``logging.getLogger("gossip")``."""

import contextlib
import logging

LOGGER = logging.getLogger("gossip")

# WARNING: the user should look at it. INFO: the normal course. DEBUG: exchanges, perhaps a hundred a second, which are
# shown nowhere else. The notice that a warning no longer holds has the level of the warning, so that a user who sees
# only warnings gets it.
WARNINGS = (
    "alone", "apart", "asleep", "buffer", "callback", "data", "device", "directions", "divided", "fault", "kept",
    "load", "log", "loss", "lossy", "mended", "merged", "moments", "moving", "optimizer", "overloaded", "overwritten",
    "put back", "ranges", "rate", "refused", "replaced", "restarted", "samples", "seed", "spoiled", "stalled", "state",
    "storage", "stored", "suspicious", "teacher", "timeline", "together", "trust", "twin", "unchanged", "undone",
    "unreachable", "unshared", "unstepped", "untaken", "waited", "waiting",
)  # fmt: skip
COURSE = (
    "finished", "inventory", "joined", "listening", "mapped", "member", "merging", "page", "settled", "started",
    "transfer",
)  # fmt: skip
EXCHANGES = "exchange.begun", "exchange.done", "exchange.failed"
LEVELS = (
    dict.fromkeys(WARNINGS, logging.WARNING)
    | dict.fromkeys(COURSE, logging.INFO)
    | dict.fromkeys(EXCHANGES, logging.DEBUG)
)


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
