"""Statistics of exchanges for users: the bytes that moved, the duration, and the distance between the weights."""

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

__all__ = ["OF_OFFERS", "ExchangeLog", "ExchangeStats"]

OF_OFFERS = frozenset({"unanswered", "unreached"})
MIXES = 8  # The number of recent partners that are shown: within seconds they give a graph of all that mix.


@dataclass(slots=True, eq=False)
class ExchangeStats:
    """The statistics of one exchange, complete when it has ended. Bytes are those of encoded weights."""

    session: int
    partners: tuple[str, ...]  # 32 hexadecimal digits each.
    codec: str
    exchange: Session | None  # The peer's session.
    done: bool = False  # It did not fail.
    seconds: float = 0.0  # Seconds since the request for a snapshot.
    bytes_sent: int = 0
    bytes_received: int = 0
    distance: float | None = None  # Between the weights, scaled to all elements; in a group, from the mean.


class ExchangeLog:
    """The source of events about exchanges, their offers and changed members."""

    def __init__(self, peer: Peer, config: Config, announce: Callable[[NodeEvent], None]) -> None:
        self.peer, self.config, self.announce = peer, config, announce
        self.offered: dict[int, tuple[PeerId, float]] = {}  # The partner and the time of each pending offer.
        self.failures: dict[str, int] = {}  # By reason, the failures that were announced.
        # Partner, codec and time of the last mixes, newest last.
        self.mixed = deque[tuple[str, str, float]](maxlen=MIXES)

    def member_changed(self, peer: PeerId, before: MemberState | None, after: MemberState) -> None:
        was = None if before is None else before.value
        self.announce(MemberEvent("member", time.time(), peer.hex(), was, after.value))

    def begun(self, account: ExchangeStats) -> None:
        self.offered.pop(account.session, None)
        self.announce(ExchangeEvent("exchange.begun", time.time(), account.session, account.partners, account.codec))

    def over(self, account: ExchangeStats) -> None:
        """Announce the end of an exchange. Without a counted failure, its weights were replaced meanwhile."""
        kind, reason = "exchange.done", ""
        if not account.done:
            kind, reason = "exchange.failed", self.reason(True) or "replaced"
        self.announce(ExchangeEvent(
            kind, time.time(), account.session, account.partners, account.codec, account.seconds, account.bytes_sent,
            account.bytes_received, account.distance, reason,
        ))  # fmt: skip
        if account.done:
            for partner in account.partners:
                self.mixed.append((partner, account.codec, time.perf_counter()))  # A generator would cost a call.

    def mixes(self) -> tuple[tuple[str, str, float], ...]:
        """Return recent mixes: partner, codec, seconds ago. Thread-safe."""
        now = time.perf_counter()
        return tuple((partner, codec, round(now - at, 2)) for partner, codec, at in tuple(self.mixed))

    def offer_over(self, session: int, partner: PeerId | None = None) -> None:
        """Announce failures of an offer that has ended or moved to another partner. A declined offer is no failure."""
        now = trio.current_time()
        to, at = self.offered.pop(session, (partner, now))
        partners = () if to is None else (to.hex(),)
        while (reason := self.reason(False)) is not None:
            self.announce(ExchangeEvent("exchange.failed", time.time(), session, partners, "", now - at, reason=reason))
            # In pairs, any other counted failure belongs to a session whose end is performed next.
            if not self.config.grouped:
                return

    def reason(self, begun: bool) -> str | None:
        """Return the reason of a failure that the peer has counted since the last call, or None.

        One decision may end several sessions. Offers fail with reasons of their own, which tells them from begun
        exchanges.
        """
        counted = [
            reason
            for reason, count in self.peer.exchanges.failures_by_reason.items()
            if count > self.failures.get(reason, 0)
        ]
        fitting = [reason for reason in counted if (reason in OF_OFFERS) is not begun]
        found = fitting or ([] if begun else counted)
        if not found:
            return None
        self.failures[found[0]] = self.failures.get(found[0], 0) + 1
        return found[0]
