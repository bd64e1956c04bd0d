"""A small scenario for the `gossip` command, and what it prints and shows."""

import os
import pty

from tests.harness import warm

TINY = """
name = "tiny"
peers = 4
duration_s = 4

[task]
model = "linear"

[gossip]
mix_every_steps = 4
"""
AVERAGING = ["--set", "task.dataset=averaging"]  # a second faster: nothing is loaded
KEYS = {
    "name", "seed", "peers", "virtual_s", "wall_s", "cpu_s", "events", "node_updates", "updates_per_cpu_s",
    "peak_rss_mb", "loss", "accuracy", "metric", "consensus_distance", "exchanges_done", "exchanges_failed",
    "bytes_sent", "digest",
}  # fmt: skip


def in_a_terminal(*words):
    """Run Python with a terminal for its input and its errors; return the process, and what the terminal showed."""
    ours, theirs = pty.openpty()
    variables = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = warm.run(*words, stdin=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return done, shown
