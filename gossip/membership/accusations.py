"""Signed accusations that a member does not answer, and the credibility of their authors.

Hints are relayed, so only the author's signature shows who made one. Without it a liar could accuse in the names of
others and spend their credibility. An accusation proves false when the accused refutes it. It proves true when its
suspicion runs out and the accused stayed silent.
"""

from collections import OrderedDict

import msgpack

from gossip.ids import PeerId
from gossip.wire.messages import Hint
from gossip.wire.records import Sign, Verify, trusting

DOMAIN = "gossip accusation 1"  # Domain separation: no other signature of the same key can pass as an accusation.
MAX_OPEN = 32  # Open accusations of one accuser. In a swarm of 1,000 it probes 12 others during one suspicion.
MAX_STRIKES = 3  # Net refuted accusations after which an accuser is silenced. Packet loss causes one now and then.
SILENCE_S = 30.0  # The first time that an accuser is silenced; each further time lasts twice as long.
MAX_DOUBLINGS = 7  # Doublings of SILENCE_S, up to about an hour.
FORGIVEN_S = 600.0  # Time without a false accusation after which the record of an accuser is cleared.
MAX_ACCUSERS = 1_024  # Accusers to remember. The least recently used one is dropped first, silenced ones last.
STRANGERS = PeerId(b"")  # All accusers that we never had a link with share one record, since new ids cost nothing.


def payload(hint: Hint) -> bytes:
    packed: bytes = msgpack.packb((DOMAIN, hint.peer, hint.incarnation, hint.dead, hint.by), use_bin_type=True)
    return packed


def accusation(peer: PeerId, incarnation: int, dead: bool, accuser: PeerId, sign: Sign) -> Hint:
    """Return an accusation signed by us."""
    hint = Hint(peer, incarnation, dead, accuser)
    return Hint(peer, incarnation, dead, accuser, sign(payload(hint)))


def is_signed(hint: Hint, public_key: bytes, verify: Verify) -> bool:
    """Return True if the holder of ``public_key`` signed this accusation."""
    return verify is trusting or verify(public_key, payload(hint), hint.signature)


class Credibility:
    """The track record of one accuser."""

    __slots__ = ("last_strike_at", "open_count", "silenced_count", "silenced_until", "strikes")

    def __init__(self) -> None:
        self.open_count = 0  # Accusations that are neither refuted nor confirmed yet.
        self.strikes = 0  # Refuted accusations minus confirmed ones.
        self.silenced_count = 0  # How often this accuser was silenced.
        self.silenced_until = self.last_strike_at = 0.0


class Accusers:
    """The credibility of every accuser, by id. ``was_contacted``: the accuser had a link with us."""

    def __init__(self) -> None:
        self._by_accuser: OrderedDict[PeerId, Credibility] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_accuser)

    def may_accuse(self, accuser: PeerId, was_contacted: bool, now: float) -> bool:
        """Return True if one more accusation by this member counts.

        An accuser whose latest accusations proved false may have fewer open ones, so that it cannot accuse all members
        before the first refutation arrives.
        """
        record = self._known(accuser if was_contacted else STRANGERS, now)
        # Strangers share one track record, but each has its own count of open accusations.
        own_record = self._by_accuser.get(accuser)
        open_count = own_record.open_count if own_record is not None else 0
        if record is None:
            return open_count < MAX_OPEN
        if now < record.silenced_until:
            return False
        is_doubted = record.strikes or record.silenced_count
        return open_count < (MAX_STRIKES - record.strikes if is_doubted else MAX_OPEN)

    def is_silenced(self, accuser: PeerId, was_contacted: bool, now: float) -> bool:
        """Return True if accusations by this member are ignored now."""
        record = self._by_accuser.get(accuser if was_contacted else STRANGERS)
        return record is not None and now < record.silenced_until

    def open_accusation(self, accuser: PeerId, now: float) -> None:
        """Count an accusation by this member as open."""
        self._record_of(accuser, now).open_count += 1

    def close_accusation(self, accuser: PeerId, was_contacted: bool, is_true: bool | None, now: float) -> None:
        """Close an open accusation: it was confirmed (True), refuted (False) or neither (None)."""
        self._record_of(accuser, now).open_count -= 1
        if is_true is not None:
            self.record_verdict(accuser, was_contacted, is_true, now)

    def record_verdict(self, accuser: PeerId, was_contacted: bool, is_true: bool, now: float) -> None:
        """Record that an accusation proved true or false. It need not be open: one of ourselves never is."""
        record = self._record_of(accuser if was_contacted else STRANGERS, now)
        if is_true:
            record.strikes = max(0, record.strikes - 1)
            return
        if now < record.silenced_until:
            return  # The accusation is older than the silence that its author already serves.
        record.last_strike_at = now
        record.strikes += 1
        if record.strikes >= MAX_STRIKES:
            record.silenced_until = now + SILENCE_S * 2 ** min(record.silenced_count, MAX_DOUBLINGS)
            record.silenced_count += 1
            record.strikes = 0

    def _known(self, accuser: PeerId, now: float) -> Credibility | None:
        """Return the record of an accuser, cleared if it has long made no false accusation; None if there is none."""
        record = self._by_accuser.get(accuser)
        if record is not None and now >= max(record.last_strike_at, record.silenced_until) + FORGIVEN_S:
            record.strikes = record.silenced_count = 0
        return record

    def _record_of(self, accuser: PeerId, now: float) -> Credibility:
        """Return the record of an accuser, a new one if there is none. It becomes the most recently used."""
        record = self._known(accuser, now)
        if record is None:
            self._make_room(now)
            record = self._by_accuser[accuser] = Credibility()
        self._by_accuser.move_to_end(accuser)
        return record

    def _make_room(self, now: float) -> None:
        """Drop the least recently used record without open accusations, if possible one of no silenced accuser.

        A suspect has at most four open accusations, so that a table of open ones is bounded as well.
        """
        if len(self._by_accuser) < MAX_ACCUSERS:
            return
        closed = {peer: record for peer, record in self._by_accuser.items() if not record.open_count}
        dropped = next(
            (peer for peer, record in closed.items() if now >= record.silenced_until), next(iter(closed), None)
        )
        if dropped is not None:
            del self._by_accuser[dropped]
