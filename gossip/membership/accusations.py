"""Accusations that a member does not answer: signed by the accuser, who loses its say when they prove false.

A hint travels through many hands, so that only its author's signature says whose it is: without one a liar would accuse
in the names of others, and spend their credit. What an accusation is worth shows soon: the accused refutes it, or
nobody hears from it until its suspicion has run out.
"""

from __future__ import annotations

from collections import OrderedDict

import msgpack

from gossip.ids import PeerId
from gossip.wire.messages import Hint
from gossip.wire.records import Sign, Verify, trusting

__all__ = ["Accusers", "accusation", "is_signed"]

DOMAIN = "gossip accusation 1"
MAX_ACCUSATIONS = 32  # live ones of one accuser: it probes 12 members in the suspicion time of 1,000
STRIKES = 3  # accusations refuted in a row, and the accuser is not listened to: loss refutes one now and then
SILENCE_S = 30.0  # for so long at first, and for twice as long each time
DOUBLINGS = 7  # up to an hour
FORGIVEN_S = 600.0  # after so long without a false one
MAX_ACCUSERS = 1_024  # whose record is kept; the longest unheard-of goes first
STRANGERS = PeerId(b"")  # all whom we have never met share one credit, since new names cost nothing


def payload(hint: Hint) -> bytes:
    packed: bytes = msgpack.packb((DOMAIN, hint.peer, hint.incarnation, hint.dead, hint.by), use_bin_type=True)
    return packed


def accusation(peer: PeerId, incarnation: int, dead: bool, by: PeerId, sign: Sign) -> Hint:
    """An accusation of our own."""
    hint = Hint(peer, incarnation, dead, by)
    return Hint(peer, incarnation, dead, by, sign(payload(hint)))


def is_signed(hint: Hint, public_key: bytes, verify: Verify) -> bool:
    """Whether the accuser, whose key this is, said so."""
    return verify is trusting or verify(public_key, payload(hint), hint.signature)


class Credibility:
    """Of one accuser."""

    __slots__ = ("level", "live", "silent_until", "spoke_s", "strikes")

    def __init__(self) -> None:
        self.live = 0  # accusations that are neither refuted nor borne out
        self.strikes = 0  # refuted, less those borne out
        self.level = 0  # how often it lost its say
        self.silent_until = self.spoke_s = 0.0


class Accusers:
    """The standing of those who accuse others, by id."""

    def __init__(self) -> None:
        self._credits: OrderedDict[PeerId, Credibility] = OrderedDict()

    def __len__(self) -> int:
        return len(self._credits)

    def heard(self, by: PeerId, met: bool, now: float) -> bool:
        """Whether one more accusation of this member counts. Somebody whose latest proved false has fewer at a time,
        so that it cannot accuse everybody before the first answers."""
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
        """An accusation of this member counts from now on."""
        self._of(by).live += 1

    def ended(self, by: PeerId, met: bool, true: bool | None, now: float) -> None:
        """One of its accusations was borne out, refuted, or (None) neither."""
        self._of(by).live -= 1
        if true is not None:
            self.judged(by, met, true, now)
        self._drop()

    def judged(self, by: PeerId, met: bool, true: bool, now: float) -> None:
        """An accusation that was not counted as live, of ourselves as it may be, was true or false."""
        credit = self._of(by if met else STRANGERS)
        if true:
            credit.strikes = max(0, credit.strikes - 1)
            return
        if now < credit.silent_until:
            return  # it was made before, and has cost its author the say already
        credit.spoke_s = now
        credit.strikes += 1
        if credit.strikes >= STRIKES:
            credit.silent_until = now + SILENCE_S * 2 ** min(credit.level, DOUBLINGS)
            credit.level += 1
            credit.strikes = 0

    def silent(self, by: PeerId, met: bool, now: float) -> bool:
        """Whether it has lost its say at the moment."""
        credit = self._credits.get(by if met else STRANGERS)
        return credit is not None and now < credit.silent_until

    def _of(self, by: PeerId) -> Credibility:
        credit = self._credits.get(by)
        if credit is None:
            credit = self._credits[by] = Credibility()
        self._credits.move_to_end(by)
        return credit

    def _drop(self) -> None:
        """Forget those of no consequence first; of live accusations there are four for each suspect at most."""
        while len(self._credits) > MAX_ACCUSERS:
            by = next((one for one, credit in self._credits.items() if not credit.live), None)
            if by is None:
                return
            del self._credits[by]
