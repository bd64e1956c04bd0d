"""Signed accusations that a member does not answer, and the credibility of their authors.

Hints are relayed, so only the author's signature shows who made one. Without it a liar could accuse in the names of
others and spend their credibility. An accusation proves false when the accused refutes it. It proves true when its
suspicion runs out and the accused stayed silent.
"""

from __future__ import annotations

from collections import OrderedDict

import msgpack

from gossip.ids import PeerId
from gossip.wire.messages import Hint
from gossip.wire.records import Sign, Verify, trusting

__all__ = ["Accusers", "accusation", "is_signed"]

DOMAIN = "gossip accusation 1"
MAX_ACCUSATIONS = 32  # Live accusations of one accuser. In a swarm of 1,000 it probes 12 others during one suspicion.
STRIKES = 3  # Net refuted accusations after which an accuser is ignored. Packet loss causes one now and then.
SILENCE_S = 30.0  # the first time that an accuser is ignored; each further time lasts twice as long
DOUBLINGS = 7  # doublings of SILENCE_S, up to about an hour
FORGIVEN_S = 600.0  # time without a false accusation after which the record of an accuser is cleared
MAX_ACCUSERS = 1_024  # Accusers to remember. The least recently used one is dropped first.
STRANGERS = PeerId(b"")  # all accusers that we never had a link with share one record, since new ids cost nothing


def payload(hint: Hint) -> bytes:
    packed: bytes = msgpack.packb((DOMAIN, hint.peer, hint.incarnation, hint.dead, hint.by), use_bin_type=True)
    return packed


def accusation(peer: PeerId, incarnation: int, dead: bool, by: PeerId, sign: Sign) -> Hint:
    """Return an accusation signed by us."""
    hint = Hint(peer, incarnation, dead, by)
    return Hint(peer, incarnation, dead, by, sign(payload(hint)))


def is_signed(hint: Hint, public_key: bytes, verify: Verify) -> bool:
    """Return True if the holder of ``public_key`` signed this accusation."""
    return verify is trusting or verify(public_key, payload(hint), hint.signature)


class Credibility:
    """The track record of one accuser."""

    __slots__ = ("level", "live", "silent_until", "spoke_s", "strikes")

    def __init__(self) -> None:
        self.live = 0  # accusations that are neither refuted nor confirmed
        self.strikes = 0  # refuted accusations minus confirmed ones
        self.level = 0  # how often this accuser was silenced
        self.silent_until = self.spoke_s = 0.0


class Accusers:
    """The credibility of every accuser, by id."""

    def __init__(self) -> None:
        self._credits: OrderedDict[PeerId, Credibility] = OrderedDict()

    def __len__(self) -> int:
        return len(self._credits)

    def heard(self, by: PeerId, met: bool, now: float) -> bool:
        """Return True if one more accusation by this member counts.

        An accuser whose latest accusations proved false may have fewer live ones, so that it cannot accuse all members
        before the first refutation arrives.
        """
        standing = self._credits.get(by if met else STRANGERS)
        own = self._credits.get(by)
        live = own.live if own is not None else 0
        if standing is None:
            return live < MAX_ACCUSATIONS
        if now >= max(standing.spoke_s, standing.silent_until) + FORGIVEN_S:
            standing.strikes = standing.level = 0
        if now < standing.silent_until:
            return False
        doubted = standing.strikes or standing.level
        return live < (STRIKES - standing.strikes if doubted else MAX_ACCUSATIONS)

    def began(self, by: PeerId) -> None:
        """Count an accusation by this member as live."""
        self._of(by).live += 1

    def ended(self, by: PeerId, met: bool, true: bool | None, now: float) -> None:
        """Close a live accusation: it was confirmed (True), refuted (False) or neither (None)."""
        self._of(by).live -= 1
        if true is not None:
            self.judged(by, met, true, now)
        self._drop()

    def judged(self, by: PeerId, met: bool, true: bool, now: float) -> None:
        """Record that an accusation that was not live, for example one of ourselves, was true or false."""
        credit = self._of(by if met else STRANGERS)
        if true:
            credit.strikes = max(0, credit.strikes - 1)
            return
        if now < credit.silent_until:
            return  # the accusation is older than the silence that its author already serves
        credit.spoke_s = now
        credit.strikes += 1
        if credit.strikes >= STRIKES:
            credit.silent_until = now + SILENCE_S * 2 ** min(credit.level, DOUBLINGS)
            credit.level += 1
            credit.strikes = 0

    def silent(self, by: PeerId, met: bool, now: float) -> bool:
        """Return True if this accuser is ignored at the moment."""
        credit = self._credits.get(by if met else STRANGERS)
        return credit is not None and now < credit.silent_until

    def _of(self, by: PeerId) -> Credibility:
        credit = self._credits.get(by)
        if credit is None:
            credit = self._credits[by] = Credibility()
        self._credits.move_to_end(by)
        return credit

    def _drop(self) -> None:
        """Drop the least recently used accusers without live accusations. A suspect has at most four live ones."""
        while len(self._credits) > MAX_ACCUSERS:
            by = next((one for one, credit in self._credits.items() if not credit.live), None)
            if by is None:
                return
            del self._credits[by]
