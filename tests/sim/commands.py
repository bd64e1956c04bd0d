"""A small scenario for the `gossip` command, and what it prints and shows."""

import contextlib
import os
import pty
import threading

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
    shown = bytearray()

    def read():
        with contextlib.suppress(OSError):  # The other side is closed, and all of it was read.
            while data := os.read(ours, 1 << 16):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = warm.run(*words, stdin=theirs, stderr=theirs, env=variables)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done, shown.decode()
