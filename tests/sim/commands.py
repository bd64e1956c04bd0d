"""A small scenario for the `gossip` command, and what it prints."""

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
