"""Exchanges from the beginning of their streams to their end, for people: what moved, and how far apart it was."""

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

__all__ = ["OF_OFFERS", "Account", "Teller"]

OF_OFFERS = frozenset({"unanswered", "unreached"})
MIXES = 8  # partners of late that are told: a graph of who mixes with whom has them all within seconds


@dataclass(slots=True, eq=False)
class Account:
    """One of them. What it comes to is known when it is over; bytes are those of encoded weights."""

    session: int
    partners: tuple[str, ...]  # 32 hexadecimal digits each
    codec: str
    exchange: Session | None  # as the peer has it
    done: bool = False  # and not failed
    seconds: float = 0.0  # since the wish for a snapshot
    bytes_sent: int = 0
    bytes_received: int = 0
    distance: float | None = None  # between the weights, as if all had been exchanged; of a group from the mean


class Teller:
    """Announces exchanges and the offers of them, and members that changed."""

    def __init__(self, peer: Peer, config: Config, announce: Callable[[NodeEvent], None]) -> None:
        self.peer, self.config, self.announce = peer, config, announce
        self.offered: dict[int, tuple[PeerId, float]] = {}  # to whom, and when: until it is answered or given up
        self.failures: dict[str, int] = {}  # by the reason, those of exchanges that were told
        self.mixed = deque[tuple[str, str, float]](maxlen=MIXES)  # with whom, in which codec, and when, newest last

    def member_changed(self, peer: PeerId, before: MemberState | None, after: MemberState) -> None:
        was = None if before is None else before.value
        self.announce(MemberEvent("member", time.time(), peer.hex(), was, after.value))

    def begun(self, account: Account) -> None:
        self.offered.pop(account.session, None)
        self.announce(ExchangeEvent("exchange.begun", time.time(), account.session, account.partners, account.codec))

    def over(self, account: Account) -> None:
        """Its streams have ended. Where nothing is counted as a failure its weights were replaced meanwhile."""
        kind, reason = "exchange.done", ""
        if not account.done:
            kind, reason = "exchange.failed", self.reason(True) or "replaced"
        self.announce(ExchangeEvent(
            kind, time.time(), account.session, account.partners, account.codec, account.seconds, account.bytes_sent,
            account.bytes_received, account.distance, reason,
        ))  # fmt: skip
        if account.done:
            for partner in account.partners:
                self.mixed.append((partner, account.codec, time.perf_counter()))  # a generator would be a call

    def mixes(self) -> tuple[tuple[str, str, float], ...]:
        """Late ones: with whom, in which codec, how many seconds ago. In any thread."""
        now = time.perf_counter()
        return tuple((partner, codec, round(now - at, 2)) for partner, codec, at in tuple(self.mixed))

    def offer_over(self, session: int, partner: PeerId | None = None) -> None:
        """An offer, made or taken, is over, or another is asked: what was declined is no failure, and is not told."""
        now = trio.current_time()
        to, at = self.offered.pop(session, (partner, now))
        partners = () if to is None else (to.hex(),)
        while (reason := self.reason(False)) is not None:
            self.announce(ExchangeEvent("exchange.failed", time.time(), session, partners, "", now - at, reason=reason))
            if not self.config.grouped:  # what else is counted is of another session, whose end is performed next
                return

    def reason(self, begun: bool) -> str | None:
        """What the peer has counted one more failure by since we last looked: the reason is its own. Of several that
        one decision ended some had begun and some were offers, which fail by reasons of theirs."""
        counted = [reason for reason, count in self.peer.failed_by.items() if count > self.failures.get(reason, 0)]
        fitting = [reason for reason in counted if (reason in OF_OFFERS) is not begun]
        found = fitting or ([] if begun else counted)
        if not found:
            return None
        self.failures[found[0]] = self.failures.get(found[0], 0) + 1
        return found[0]
