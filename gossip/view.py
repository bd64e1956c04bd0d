"""The facts about a peer that its driver reads between two calls. Reading one changes nothing."""

from collections.abc import Iterator
from typing import Any

from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.membership.members import Members
from gossip.state_transfer.donating import Donor
from gossip.state_transfer.joining import Newcomer, Phase
from gossip.state_transfer.moments import MomentMixing
from gossip.wire.messages import Fetch, Invite, Message, Offer


class PeerView:
    """The facts that follow from several parts of a peer, and the state of its run.

    Facts of a single part are read from that part, such as ``peer.membership.me`` or ``peer.exchanges.done_count``.
    """

    def __init__(
        self, local: Local, members: Members, exchanges: Exchanges[Any], joining: Newcomer, donating: Donor,
        moments: MomentMixing,
    ) -> None:  # fmt: skip
        self._local, self._members, self._exchanges = local, members, exchanges
        self._joining, self._donating, self._moments = joining, donating, moments

    # -- the run -------------------------------------------------------------------------------------------------
    @property
    def ready(self) -> bool:
        """True if this peer holds the weights of a run, and may train and mix."""
        return self._local.ready

    @property
    def sound(self) -> bool:
        """True if no weight is known to be NaN or infinite."""
        return self._local.sound

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return self._local.finished

    @property
    def run_id(self) -> bytes:
        """The id of the run."""
        return self._local.run_id

    @property
    def elements(self) -> int:
        """The number of weights that exchanges carry."""
        return self._local.elements

    @property
    def is_joining(self) -> bool:
        """True if we are fetching the weights of a run."""
        return self._joining.phase is not Phase.IDLE

    @property
    def is_donating(self) -> bool:
        """True if a newcomer is fetching weights from us."""
        return bool(self._donating.table)

    @property
    def alive_count(self) -> int:
        """The number of ALIVE contacted members, this one included."""
        return len(self._members.contacted()) + 1

    # -- the training loop ---------------------------------------------------------------------------------------
    @property
    def boundary_at(self) -> float:
        """The time of the training loop's last known step boundary."""
        return self._local.boundary_at

    @property
    def is_held(self) -> bool:
        """True if the training loop must wait at its boundary: a mix began ``max_version_gap`` intervals ago."""
        return self._exchanges.is_held(self._local.steps)

    @property
    def is_handing_over(self) -> bool:
        """True while a peer that leaves has last mixes to do, or in progress, and there may be a partner for them."""
        local = self._local
        has_more = local.last_mixes > 0 and local.ready and not (local.paused or self.is_joining)
        return has_more or bool(self._exchanges.table)

    # -- sessions ------------------------------------------------------------------------------------------------
    def has_exchange(self, session: int) -> bool:
        """Return True if an exchange has this session number."""
        return session in self._exchanges.table

    def has_donation(self, session: int) -> bool:
        """Return True if a newcomer fetches a piece, or a member moments, under this session number."""
        return session in self._donating.table or session in self._moments.served

    def needs_snapshot(self, session: int) -> bool:
        """Return True if the snapshot of this session is still needed."""
        return session in self._exchanges.table or self.has_donation(session)

    def is_with(self, session: int, partner: PeerId) -> bool:
        """Return True if this partner takes part in this exchange or piece."""
        exchange = self._exchanges.table.get(session)
        if exchange is not None:
            return partner in exchange.counterparts
        piece = self._donating.table.get(session)
        return partner == (self._moments.member_of(session) if piece is None else piece.newcomer)

    def pairs_with(self, partner: PeerId) -> list[int]:
        """Return the exchanges that depend on the link to this partner. A group depends on no single link."""
        return [
            session for session, exchange in self._exchanges.table.items()
            if partner in exchange.counterparts and not exchange.IS_GROUP
        ]  # fmt: skip

    def session_peers(self) -> Iterator[PeerId]:
        """Yield all peers with a session in progress, some more than once."""
        for exchange in self._exchanges.table.values():
            yield from exchange.counterparts
        for served_piece in self._donating.table.values():
            yield served_piece.newcomer
        for fetched_piece in self._joining.pieces.values():
            yield fetched_piece.donor
        for _, part in self._moments.parts():
            yield part.member

    def should_send(self, to: PeerId, message: Message) -> bool:
        """Return True if a message that waited for a link should still be sent.

        A message must not begin a session that has ended or moved to another peer: the answer would tie up the link for
        nothing.
        """
        if not isinstance(message, Offer | Invite | Fetch):
            return True
        piece = self._joining.pieces.get(message.session)
        donor = self._joining.surveys.get(message.session) if piece is None else piece.donor
        return donor == to or self.is_with(message.session, to)
