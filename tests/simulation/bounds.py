"""The bounds on the size of each table of a peer, and on the time that its entries stay."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gossip.config import Config
from gossip.exchange.session import State
from gossip.ids import MemberRecord
from gossip.recent import Recent
from tests.simulation.host import ELEMENTS

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

# Keys are paths of attributes from a Peer on. Other tables may hold two entries for each id ever heard of, and 64.
BOUNDS = {
    "exchanges.outcomes": 4_096,  # MAX_OUTCOMES; members ask about them for doubt_s
    "exchanges.durations.durations_s": 256,  # DURATION_PARTNERS
    "exchanges.durations.durations_s[]": 8,  # DURATIONS_PER_PARTNER
    "exchanges.refusals.counts": 256,  # MAX_REFUSALS
    "exchanges.last_squares": 8,
    "exchanges.setbacks.exchanges": 1_024,  # MAX_EXCHANGES
    "exchanges.filter.mean_squares": 16,
    "donating.table": 2,  # MAX_SERVED, each a snapshot
    "moments.fetched": 1,
    "moments.served": 2,  # MAX_SERVED
    "moments.declined": 256,  # MAX_DECLINED
    "joining.pieces": 4,
    "joining.surveys": 8,  # the second survey asks four donors and four other members
    "joining.avoided_runs": 64,
    "reach.asked": 3,
    "reach.homes": 3,
    "membership._rumours._sends": 1_024,
    "membership._rumours._levels": 24,
    "membership._table._hashes": 256,
    "membership._table._buckets": 256,
    "membership._detector._timers": 512,  # probes of ours and for others; stale ones go as they reach the front
    "membership._introductions._host_tokens": 1_024,
}
TABLES = frozenset({dict, list, set, deque, OrderedDict, Recent})
PLAIN = frozenset({int, float, str, bytes, bool, tuple, type(None), Config})


def tables(thing: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """Yield the path and the size of every table reachable from ``thing`` through the project's own objects."""
    seen = set() if seen is None else seen
    seen.add(id(thing))
    for name in names_of(thing):
        value = getattr(thing, name, None)
        kind = type(value)
        if kind in TABLES:
            yield path + name, len(value)
            inside = value.values() if isinstance(value, dict) else value
            longest = max([len(one) for one in inside if type(one) in TABLES], default=0)
            if longest:
                yield f"{path}{name}[]", longest
        elif kind not in PLAIN and is_ours(kind) and id(value) not in seen:
            yield from tables(value, f"{path}{name}.", seen)


def names_of(thing: Any) -> Iterable[str]:
    fields = getattr(thing, "__dict__", None)
    return slots_of(type(thing)) if fields is None else fields


@lru_cache(None)
def slots_of(kind: type) -> tuple[str, ...]:
    return tuple(name for one in kind.__mro__ for name in getattr(one, "__slots__", ()))


@lru_cache(None)
def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("gossip.") and not issubclass(kind, Config | MemberRecord | Enum)


def longest_s(config: Config) -> float:
    """Return the longest time that an exchange may stay in the table.

    It consists of asking, streaming, waiting for the other side's commit, and doubt; a group waits for two answers.
    Deadlines adapt to past durations (median and six deviations), which here is twice the longest stream at most.
    """
    stream_s = 8 * ELEMENTS / (config.slowest_rate_mb_s * 1e6) + 1.0 + 30.0
    asking_s = 4 * max(1, config.partners) * config.reply_timeout_s + config.boundary_patience_s
    return asking_s + 2 * stream_s + config.stall_s + config.internal.doubt_s + 2.0


def check_bounds(world: World, host: Host) -> None:
    """Check the tables of one peer, and the exchanges in it."""
    peer = host.peer
    known = len(world.hosts) + sum(getattr(one, "sybils", 0) + 8 for one in world.hosts if one.liar)
    entries = 64 + 2 * known
    bounds = BOUNDS | {"membership._states._suspicions": 64 + 2 * entries}  # MIN_STALE, and two for each entry
    for path, size in tables(peer):
        bound = bounds.get(path, entries)
        if size > bound:
            world.fail("every table is bounded", f"{host!r}: {path} holds {size}, and may {bound}")
    check_exchanges(world, host)


def check_exchanges(world: World, host: Host) -> None:
    peer, now = host.peer, world.now
    exchanges = peer.exchanges
    reserved = sum(one.state in (State.ASKED, State.RESERVED) for one in exchanges.table.values())
    most = 1 + peer.partners.max_incoming() if host.overlapped else 1
    if reserved > 1 or (exchanges.can_overlap and exchanges.used_slots > most):
        text = f"{host!r}: {exchanges.used_slots} under way, {reserved} reserved"
        world.fail("so many exchanges at a time, and one next", text)
    for number, one in peer.exchanges.table.items():
        ahead = one.state in (State.ASKED, State.RESERVED)  # it waits for the end of another exchange
        begins = -number in host.since and not ahead and number not in host.since
        if begins and exchanges.used_slots > 1 and not host.overlapped:
            world.fail("so many exchanges at a time, and one next", f"{host!r}: {number:x} begins beside another")
        begun = host.since.setdefault(-number if ahead else number, now)
        waits = one.is_initiator and one.state is State.PREPARING  # it waits for the host's next boundary
        if one.timer_at == math.inf and not waits:
            world.fail("every exchange has a deadline", f"{host!r}: {number:x} in {one.state} has none")
        asleep = waits and (not host.stepping or number not in host.wishes)
        if host.stopped or asleep or now - host.awake_at < 1.0:
            host.since[-number if ahead else number] = now
        elif now - begun > longest_s(world.config):
            world.fail("no exchange is stuck", f"{host!r}: {number:x} is in {one.state} since {begun:.2f} s")
    if len(host.since) > 4 * len(peer.exchanges.table) + 16:
        host.since = {number: at for number, at in host.since.items() if abs(number) in peer.exchanges.table}
