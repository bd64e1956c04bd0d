"""Link measurements of a running swarm, collected from its nodes and written as a scenario."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gossip.errors import ConfigError, LocalError
from gossip.ids import Address, parse_address
from node.observe.status import query

__all__ = ["query_nodes", "scenario_tables"]

MAX_NODES = 32  # Nodes that are asked: a plan is about links, and more nodes add nothing.
MAX_RTT_S = 60.0  # A longer round trip is taken for false.
MAX_RATE_MB_S = 1e5  # A faster rate is taken for false.
TIMEOUT_S = 5.0

Answer = Mapping[str, Any]


def query_nodes(addresses: Sequence[Address], secret: bytes | None) -> list[Answer]:
    """Return the status of these nodes, and of the members that they name, as far as those can be reached.

    Raises :class:`LocalError` if one of ``addresses`` does not answer.
    """
    answers: dict[str, Answer] = {}
    for address in addresses:
        one = query(address, secret, TIMEOUT_S)
        answers[one["id"]] = one
    for member in [member for one in list(answers.values()) for member in one["members"]]:
        is_new = member["id"] not in answers and member["state"] == "alive"
        if len(answers) < MAX_NODES and is_new and member["address"]:
            try:
                one = query(parse_address(member["address"]), secret, TIMEOUT_S)
            except (ConfigError, LocalError):
                continue  # It is behind a router or gone; the others report what they know of it.
            answers.setdefault(one["id"], one)
    return list(answers.values())


def scenario_tables(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a scenario's tables in which each node is a region of its own.

    A round trip is the smaller of what its two ends measured. A rate is the best that an exchange of the node reached.
    It includes waiting, so a small model shows less than a link can carry. Raises :class:`LocalError` if no node has
    measured anything yet.
    """
    places = {one["id"]: place for place, one in enumerate(answers)}
    seen: dict[tuple[int, int], list[float]] = {}
    rates = [0.0] * len(answers)
    for one in answers:
        here = places[one["id"]]
        for member in one["members"]:
            there = places.get(member["id"])
            if there is None or there == here:
                continue
            rtt_s, mb_s = member["rtt_s"], member["mb_s"]
            if is_within(rtt_s, MAX_RTT_S):
                seen.setdefault((min(here, there), max(here, there)), []).append(rtt_s)
            if is_within(mb_s, MAX_RATE_MB_S):
                rates[here], rates[there] = max(rates[here], mb_s), max(rates[there], mb_s)
    if not seen:
        raise LocalError(
            "These nodes know no round trip to each other yet: name nodes of one swarm, and ask again when they have "
            "run for half a minute."
        )
    known = {pair: min(found) for pair, found in seen.items()}
    usual = statistics.median(known.values())
    count = range(len(answers))
    rtt_ms = [
        [0.0 if a == b else round(1e3 * known.get((min(a, b), max(a, b)), usual), 3) for b in count] for a in count
    ]
    usual_rate = statistics.median([rate for rate in rates if rate] or [12.5])
    names = [f"node {one['id'][:8]}" for one in answers]
    fleet = [
        {"number": place, "name": name, "region": name, "rate_mbit_s": 8 * (rates[place] or usual_rate)}
        for place, name in enumerate(names)
    ]
    return {
        "name": "measured", "peers": len(answers), "fleet": fleet,
        "network": {"latency": {"kind": "matrix", "regions": names, "rtt_ms": rtt_ms}, "congestion": "bbr"},
    }  # fmt: skip


def is_within(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most and math.isfinite(value)
