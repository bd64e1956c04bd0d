"""The `gossip` command, run as a user runs it."""

from __future__ import annotations

import sys

import pytest

from gossip import __main__ as command

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
    "peak_rss_mb", "loss", "accuracy", "consensus_distance", "exchanges_done", "exchanges_failed", "bytes_sent",
    "digest",
}  # fmt: skip


def gossip(monkeypatch, *args) -> int:
    """Run the command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gossip", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return int(ended.value.code or 0)
