"""Removed keys and values, and their replacements (docs/decisions/0044 and 0105)."""

from __future__ import annotations

from gossip.errors import ConfigError

__all__ = ["REMOVED_KEYS", "check_removed"]

LINKS = "leave it out: timeouts follow from stall_s (the longest pause of a live link)"
MEMBERS = "leave it out: membership is as fast as a failure needs, and slow links slow it by themselves"
RETRY = "leave it out: the pause doubles with each failure, whatever it begins with"
# What to do instead, by key; it follows "KEY was removed:".
REMOVED_KEYS = {
    "reply_timeout_s": "set boundary_patience_s (the longest local step) or stall_s (the longest pause of a link)",
    "hello_timeout_s": LINKS,
    "idle_s": "leave it out: a link without traffic for a minute is closed, and opened again when it is needed",
    "chunk_elements": "leave it out: chunks follow stall_s and slowest_rate_mb_s, and shorten where they take long",
    "max_links": "leave it out: 256 links at most are kept, and the one idle longest is closed for another",
    "mixing_share": "name a number of steps as mix_every_steps where its share of a node's time is not as wanted",
    "bench_s": "set stall_s: a partner that failed is not asked for five times as long, 10 s at most, then doubling",
    "doubt_s": "leave it out: an exchange whose end is unknown is asked after for 30 s",
    "shortcuts": "leave it out: a tenth of the mixes of nearest are with anybody",
    "norm_bound": "use filter: this check only finds what is broken",
    "clip_radius": "set filter_limit",
    "trim": "set filter_limit",
    "balance_rounds": "set filter_limit",
    "clip_factor": "set filter_limit (a fixed radius) where the radius that follows the usual distance does not suit",
    "balance_gamma": "leave it out: it is 0.3",
    "balance_kappa": "leave it out: set filter_limit to the mixing rounds of your training",
    "probe_period_s": MEMBERS,
    "probe_timeout_min_s": MEMBERS,
    "probe_timeout_max_s": MEMBERS,
    "indirect_probes": MEMBERS,
    "suspicion_periods": MEMBERS,
    "gossip_period_s": MEMBERS,
    "gossip_fanout": MEMBERS,
    "push_pull_period_s": MEMBERS,
    "heal_period_s": MEMBERS,
    "dead_kept_s": MEMBERS,
    "max_members": "leave it out: 10,000 members are known at most, the largest table that was measured",
    "progress_period_s": MEMBERS,
    "donors": "leave it out: a newcomer fetches from four members at once",
    "seed_backoff_s": RETRY,
    "seed_backoff_max_s": RETRY,
    "fastest_member": "leave it out: progress is averaged, and an exchange bounds what a member's number changes",
    "average_optimizer": "leave it out: newcomers take over the optimizer's state, and exchanges mix the weights alone",
}
# The same by the key and the first word of its value.
REMOVED_VALUES = {
    ("codec", "moniqua8"): "use int8, which comes within a point of it for the same bytes",
    ("codec", "moniqua2"): "use moniqua4, or int4 where a node mixes a part of the vector",
    ("part", "top"): "use 'fragments 8', which loses less for fewer bytes, or 'mask 0.05'",
}


def check_removed(name: str, value: str) -> None:
    """Raise :class:`ConfigError` if this value of the setting was removed."""
    if (instead := REMOVED_VALUES.get((name, value.partition(" ")[0]))) is not None:
        raise ConfigError(f"{name} = {value!r} was removed: {instead}.")
