"""Partners that failed an exchange sit out for a while. A local matter: it says nothing to others about whether they
are alive."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["BENCHED", "Bench"]

DOUBLINGS = 4  # 10 s, 20 s ... 160 s: one failure costs others half a second of a slot, a repaired link is noticed
SILENCE = 0.25  # of the time: who does not answer has wasted no stream, and may have been busy with something else
PARDON_S = 1.0  # where nobody else is left, who failed is tried again after this
BENCHED = 256  # partners remembered, as many as there may be links


@dataclass(slots=True)
class Benched:
    since: float
    until: float
    failures: int  # in a row
    shunned: bool  # for what it did: it is not heard either


class Bench:
    """Sitting out lasts twice as long for each failure in a row. *Silence*, an offer that nobody answers, ends with the
    first sign of life and is until then a reason not to ask. A stream that stopped, wrong bytes, a COMMIT that never
    came keep a slot until they are found out: whoever did that is not heard either, and a new link undoes nothing of
    it, or an attacker would be free again for one connection."""

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self.benched = Recent[PeerId, Benched](BENCHED)  # the one that failed longest ago first

    def failed(self, peer: PeerId, now: float, silent: bool = False) -> None:
        before = self.benched.get(peer)
        failures = 0 if before is None else before.failures
        seconds = self.first_s * 2 ** min(failures, DOUBLINGS) * (SILENCE if silent else 1.0)
        one = self.benched[peer] = Benched(now, now + seconds, failures + 1, not silent)
        if before is not None and before.shunned and before.until > now:
            one.until, one.shunned = max(one.until, before.until), True

    def succeeded(self, peer: PeerId) -> None:
        self.benched.pop(peer, None)

    def answers(self, peer: PeerId) -> None:
        """It shows a sign of life."""
        one = self.benched.get(peer)
        if one is not None and not one.shunned:
            del self.benched[peer]

    def sits_out(self, peer: PeerId, now: float) -> bool:
        """Whether it is not asked at the moment."""
        one = self.benched.get(peer)
        return one is not None and now < one.until

    def shuns(self, peer: PeerId, now: float) -> bool:
        """Whether it is not heard either."""
        one = self.benched.get(peer)
        return one is not None and one.shunned and now < one.until

    def pardonable(self, now: float) -> list[PeerId]:
        """Who might be tried again although it sits out, the one that failed longest ago first."""
        return [peer for peer, one in self.benched.items() if now - one.since >= PARDON_S]
