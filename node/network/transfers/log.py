"""Statistics of exchanges for users, and the events that announce exchanges, failed offers and changed members."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from gossip.config import Config
from gossip.effects import MemberState
from gossip.exchange.session import Session
from gossip.ids import PeerId
from gossip.peer import Peer
from node.observe.events import ExchangeEvent, MemberEvent, NodeEvent

__all__ = ["OFFER_FAILURES", "ExchangeLog", "ExchangeStats"]

OFFER_FAILURES = frozenset({"unanswered", "unreached"})  # The reasons for which an offer fails before streams begin.
SHOWN_MIXES = 8  # Recent mixes that a status page shows. Those of all members together show who mixes with whom.


@dataclass(slots=True, eq=False)
class ExchangeStats:
    """The statistics of one exchange, complete when it has ended. Bytes count encoded weights alone."""

    session: int
    partners: tuple[str, ...]  # 32 hexadecimal digits each.
    codec: str
    exchange: Session | None  # The peer's session.
    has_succeeded: bool = False
    seconds: float = 0.0  # From the request for a snapshot to the mix.
    bytes_sent: int = 0
    bytes_received: int = 0
    # Between our weights and the partner's, scaled to all elements; in a group from the mean. None if not measured.
    distance: float | None = None


class ExchangeLog:
    """The source of events about exchanges, their offers and changed members."""

    def __init__(self, peer: Peer, config: Config, announce: Callable[[NodeEvent], None]) -> None:
        self.peer, self.config, self.announce = peer, config, announce
        self.pending_offers: dict[int, tuple[PeerId, float]] = {}  # The partner and the time of each pending offer.
        self.announced_failures: dict[str, int] = {}  # By reason, the failures that were announced.
        # Partner, codec and time (by time.perf_counter) of the last mixes, newest last.
        self.last_mixes = deque[tuple[str, str, float]](maxlen=SHOWN_MIXES)

    def on_member_changed(self, peer: PeerId, before: MemberState | None, after: MemberState) -> None:
        value_before = None if before is None else before.value
        self.announce(MemberEvent("member", time.time(), peer.hex(), value_before, after.value))

    def on_begun(self, stats: ExchangeStats) -> None:
        self.pending_offers.pop(stats.session, None)
        self.announce(ExchangeEvent("exchange.begun", time.time(), stats.session, stats.partners, stats.codec))

    def on_ended(self, stats: ExchangeStats) -> None:
        """Announce the end of an exchange. If it failed and the peer has counted no failure, weights were replaced."""
        kind, reason = "exchange.done", ""
        if not stats.has_succeeded:
            kind, reason = "exchange.failed", self.next_failure(True) or "replaced"
        self.announce(ExchangeEvent(
            kind, time.time(), stats.session, stats.partners, stats.codec, stats.seconds, stats.bytes_sent,
            stats.bytes_received, stats.distance, reason,
        ))  # fmt: skip
        if stats.has_succeeded:
            for partner in stats.partners:
                self.last_mixes.append((partner, stats.codec, time.perf_counter()))

    def mixes(self) -> tuple[tuple[str, str, float], ...]:
        """Return recent mixes: partner, codec, seconds ago. Thread-safe."""
        now = time.perf_counter()
        return tuple((partner, codec, round(now - mixed_at, 2)) for partner, codec, mixed_at in tuple(self.last_mixes))

    def on_offer_ended(self, session: int, partner: PeerId | None = None) -> None:
        """Announce the failure of an offer that has ended, or has moved to another partner.

        A declined offer is no failure. In a group several invitations may have failed at once.
        """
        now = trio.current_time()
        invited, offered_at = self.pending_offers.pop(session, (partner, now))
        partners = () if invited is None else (invited.hex(),)
        while (reason := self.next_failure(False)) is not None:
            seconds = now - offered_at
            self.announce(ExchangeEvent("exchange.failed", time.time(), session, partners, "", seconds, reason=reason))
            if not self.config.grouped:  # A further failure of pairs belongs to another session, whose end comes next.
                return

    def next_failure(self, has_begun: bool) -> str | None:
        """Return the reason of a failure that the peer has counted and that is not announced yet, or None.

        One decision of the peer may end several sessions. The reason tells the failure of an offer from that of an
        exchange whose streams have begun (``has_begun``).
        """
        counted = [
            reason
            for reason, count in self.peer.exchanges.failures_by_reason.items()
            if count > self.announced_failures.get(reason, 0)
        ]
        fitting = [reason for reason in counted if (reason in OFFER_FAILURES) is not has_begun]
        if not fitting and not has_begun:  # An offer may also fail for a reason of exchanges.
            fitting = counted
        if not fitting:
            return None
        self.announced_failures[fitting[0]] = self.announced_failures.get(fitting[0], 0) + 1
        return fitting[0]
