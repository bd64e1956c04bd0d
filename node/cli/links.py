"""Link measurements of a running swarm, collected from its nodes and written as a scenario."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.errors import ConfigError, LocalError
from gossip.ids import Address, parse_address
from node.identity.keys import read_secret
from node.observe.status import query

MAX_NODES = 32  # Nodes that are asked: a plan is about links, and more nodes add nothing.
MAX_RTT_S = 60.0  # A longer round trip is not believed.
MAX_RATE_MB_S = 1e5  # A faster rate is not believed.
UNKNOWN_RATE_MB_S = 12.5  # The rate of all links if none was measured: 100 Mbit/s.
TIMEOUT_S = 5.0

Answer = Mapping[str, Any]


def measured_links(addresses: Sequence[str], secret_file: Path | None) -> dict[str, Any]:
    """Return the links among the nodes of a running swarm, as tables of a scenario's file."""
    secret = None if secret_file is None else read_secret(secret_file)
    return scenario_tables(query_nodes([parse_address(address) for address in addresses], secret))


def query_nodes(addresses: Sequence[Address], secret: bytes | None) -> list[Answer]:
    """Return the status of these nodes, and of the members that they name, as far as those can be reached.

    Raises :class:`LocalError` if one of ``addresses`` does not answer.
    """
    answers: dict[str, Answer] = {}
    for address in addresses:
        answer = query(address, secret, TIMEOUT_S)
        answers[answer["id"]] = answer
    for member in [member for answer in list(answers.values()) for member in answer["members"]]:
        is_new = member["id"] not in answers and member["state"] == "alive"
        if len(answers) < MAX_NODES and is_new and member["address"]:
            try:
                answer = query(parse_address(member["address"]), secret, TIMEOUT_S)
            except (ConfigError, LocalError):
                continue  # It is behind a router or gone; the others report what they know of it.
            answers.setdefault(answer["id"], answer)
    return list(answers.values())


def scenario_tables(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a scenario's tables in which each node is a region of its own.

    A round trip is the smaller of what its two ends measured. A rate is the best that an exchange of the node reached.
    It includes waiting, so a small model shows less than a link can carry. Raises :class:`LocalError` if no node has
    measured anything yet.
    """
    places = {answer["id"]: place for place, answer in enumerate(answers)}  # By id: the index in `answers`.
    measured: dict[tuple[int, int], list[float]] = {}  # Round trips in seconds, by the places of the two nodes.
    rates = [0.0] * len(answers)  # MB/s by place; 0 if not measured.
    for answer in answers:
        own_place = places[answer["id"]]
        for member in answer["members"]:
            other_place = places.get(member["id"])
            if other_place is None or other_place == own_place:
                continue
            pair = min(own_place, other_place), max(own_place, other_place)
            rtt_s, mb_s = member["rtt_s"], member["mb_s"]
            if is_within(rtt_s, MAX_RTT_S):
                measured.setdefault(pair, []).append(rtt_s)
            if is_within(mb_s, MAX_RATE_MB_S):
                for place in pair:
                    rates[place] = max(rates[place], mb_s)
    if not measured:
        raise LocalError(
            "These nodes know no round trip to each other yet: name nodes of one swarm, and ask again when they have "
            "run for half a minute."
        )
    rtts = {pair: min(rtts_s) for pair, rtts_s in measured.items()}
    usual_rtt_s = statistics.median(rtts.values())
    all_places = range(len(answers))
    rtt_ms = [
        [0.0 if a == b else round(1e3 * rtts.get((min(a, b), max(a, b)), usual_rtt_s), 3) for b in all_places]
        for a in all_places
    ]
    usual_rate = statistics.median([rate for rate in rates if rate] or [UNKNOWN_RATE_MB_S])
    names = [f"node {answer['id'][:8]}" for answer in answers]
    fleet = [
        {"number": place, "name": name, "region": name, "rate_mbit_s": 8 * (rates[place] or usual_rate)}
        for place, name in enumerate(names)
    ]
    return {
        "name": "measured", "peers": len(answers), "fleet": fleet,
        "network": {"latency": {"kind": "matrix", "regions": names, "rtt_ms": rtt_ms}, "congestion": "bbr"},
    }  # fmt: skip


def is_within(value: Any, top: float) -> bool:
    """Return True if the value is a positive number up to ``top``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= top and math.isfinite(value)
