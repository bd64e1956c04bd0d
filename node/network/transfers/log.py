"""The events that announce exchanges, failed offers and changed members to users."""

import time
from collections import deque
from collections.abc import Callable

from gossip.config import Config
from gossip.effects import MemberState
from gossip.exchange.transitions import State
from gossip.ids import PeerId
from gossip.peer import Peer
from node.network.transfers.transfer import LinkTransfer
from node.observe.events import ExchangeEvent, MemberEvent, NodeEvent

OFFER_FAILURES = frozenset({"unanswered", "unreached"})  # The reasons for which an offer fails before streams begin.
SHOWN_MIXES = 8  # Recent mixes that a status page shows. Those of all members together show who mixes with whom.


class ExchangeLog:
    """The source of events about exchanges, their offers and changed members."""

    def __init__(self, peer: Peer, config: Config, announce: Callable[[NodeEvent], None]) -> None:
        self.peer, self.config, self.announce = peer, config, announce
        self.announced_failures: dict[str, int] = {}  # By reason, the failures that were announced.
        # Partner, codec and time (by time.perf_counter) of the last mixes, newest last.
        self.last_mixes = deque[tuple[str, str, float]](maxlen=SHOWN_MIXES)

    def on_member_changed(self, peer: PeerId, before: MemberState | None, after: MemberState) -> None:
        value_before = None if before is None else before.value
        self.announce(MemberEvent("member", time.time(), peer.hex(), value_before, after.value))

    def on_begun(self, transfer: LinkTransfer, partners: tuple[PeerId, ...], codec: str) -> None:
        """Announce an exchange on which all sides have agreed, and whose streams begin."""
        transfer.exchange = self.peer.exchanges.table.get(transfer.session)
        transfer.partners, transfer.codec, transfer.offer = tuple(map(bytes.hex, partners)), codec, None
        self.announce(ExchangeEvent("exchange.begun", time.time(), transfer.session, transfer.partners, codec))

    def on_ended(self, transfer: LinkTransfer, now: float) -> None:
        """Announce the end of an exchange, while its streams and averages still exist.

        If it failed and the peer has counted no failure, weights were replaced.
        """
        kind, reason, seconds = "exchange.done", "", transfer.seconds
        if transfer.exchange is None or transfer.exchange.state is not State.DONE:
            kind, reason = "exchange.failed", self.next_failure(True) or "replaced"
        if not seconds and transfer.requested_at is not None:
            seconds = now - transfer.requested_at
        self.announce(ExchangeEvent(
            kind, time.time(), transfer.session, transfer.partners, transfer.codec, seconds, *transfer.moved_bytes(),
            transfer.distance(self.peer.view.elements), reason,
        ))  # fmt: skip
        if not reason:
            for partner in transfer.partners:
                self.last_mixes.append((partner, transfer.codec, time.perf_counter()))

    def mixes(self) -> tuple[tuple[str, str, float], ...]:
        """Return recent mixes: partner, codec, seconds ago. Thread-safe."""
        now = time.perf_counter()
        return tuple((partner, codec, round(now - mixed_at, 2)) for partner, codec, mixed_at in tuple(self.last_mixes))

    def on_offer_ended(self, session: int, transfer: LinkTransfer | None, now: float) -> None:
        """Announce the failure of an offer that has ended, or has moved to another partner.

        A declined offer is no failure. In a group several invitations may have failed at once.
        """
        link = None if transfer is None else transfer.link
        invited, offered_at = None if link is None else link.peer, now
        if transfer is not None and transfer.offer is not None:
            (invited, offered_at), transfer.offer = transfer.offer, None
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
