"""The misbehaviour log: misbehaviour is counted by member and kind, and reported once faults cannot explain it.

Nothing is decided here. A node's protections (filters, back-off, rate limiters) act at once by themselves. The log
names the culprit, so that the user can revoke its secret.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from gossip.effects import Notice
from gossip.ids import PeerId, short

IMPOSSIBLE_COUNT = 2.0**50  # Samples, steps or rounds: one each microsecond for 36 years.
# Members and kinds to count, 200 KiB. A flood of identities evicts the oldest, but never a reported one.
MAX_LEVELS = 1_024
# Reports in a node's life. More would mean that the swarm consists of strangers, which the reports show already.
MAX_REPORTED = 256
AWAKE_S = 10.0  # Seconds after a stop of this process in which others' exchanges come to nothing by our own fault.


class Misbehaviour(NamedTuple):
    """One kind of misbehaviour. Of its count, one is forgiven every ``forgiven_s`` seconds."""

    threshold: float  # The count, without those forgiven, from which on it is reported.
    forgiven_s: float
    description: str


KINDS: dict[str, Misbehaviour] = {
    "fault": Misbehaviour(3.0, 60.0, "bytes or messages that no honest node sends"),
    "flood": Misbehaviour(3.0, 60.0, "messages beyond every allowance"),
    "unread": Misbehaviour(3.0, 60.0, "more questions than it reads answers"),  # A stopped peer asks nothing.
    "wasted": Misbehaviour(4.0, 900.0, "exchanges that it let come to nothing"),  # Each finished one takes one back.
    "refused": Misbehaviour(3.0, 900.0, "vectors that hold no numbers"),  # The back-off grows with each.
    # Without other partners an honest peer makes 16 offers a second.
    "pestering": Misbehaviour(200.0, 0.05, "offers all the time while it was to wait"),
    "claims": Misbehaviour(3.0, 60.0, "numbers that cannot be"),
    "accusations": Misbehaviour(8.0, 60.0, "accusations that were refuted"),
    "strangers": Misbehaviour(16.0, 60.0, "connections that never said who they are"),
}
"""The kinds of misbehaviour that cost others, and the counts from which they are reported.

Honest nodes that are killed, stopped and cut off every few seconds reach none of these counts. An attacker below them
costs no more than such a node. Wasted exchanges are forgiven slowly, since their back-off starts at 10 s and doubles
each time. A vector that is far away is no misbehaviour: honest nodes with data of their own, or that have diverged,
send such vectors too. The filter shortens or refuses them, and the node that sends them tells its own user
(:mod:`gossip.filters.setbacks`).
"""


class MisbehaviourLog:
    """The misbehaviour log. ``who`` is a member, or the address of a peer that never proved an id.

    Its *level* in one kind is the count without those forgiven.
    """

    def __init__(self) -> None:
        # By member and kind: the level, and the time up to which counts are forgiven.
        self.levels: dict[tuple[PeerId | str, str], tuple[float, float]] = {}
        self.counts: dict[tuple[PeerId | str, str], int] = {}  # Total counts of reported misbehaviour.
        self.woke_at = -math.inf  # Time at which this process last resumed after it had been stopped.
        self.news: list[Notice] = []  # Notices that :meth:`take` has not returned yet.

    def note(self, who: PeerId | str, kind: str, now: float, times: float = 1.0) -> None:
        """Count this misbehaviour, and report it once it reaches its threshold."""
        if kind == "wasted" and now - self.woke_at < AWAKE_S:
            return
        key = (who, kind)
        threshold, forgiven_s, _ = KINDS[kind]
        level, since = self.levels.pop(key, (0.0, now))  # Reinserted, since the oldest is evicted first.
        forgiven = (now - since) // forgiven_s  # Whole units only: three in three seconds count as three.
        if forgiven < level:
            level, since = level - forgiven, since + forgiven * forgiven_s
        else:
            level, since = 0.0, now
        level += times
        self.levels[key] = (level, since)
        if len(self.levels) > MAX_LEVELS:
            del self.levels[next(iter(self.levels))]
        if key in self.counts:
            self.counts[key] += 1
        elif level >= threshold and len(self.counts) < MAX_REPORTED:
            self.counts[key] = round(level)
            self.news.append(notice(who, kind))

    def take_back(self, who: PeerId | str, kind: str) -> None:
        """Take back one count after the opposite behaviour."""
        key = (who, kind)
        if key not in self.levels:
            return
        level, since = self.levels[key]
        if level <= 1:
            del self.levels[key]
        else:
            self.levels[key] = (level - 1, since)

    def take(self) -> list[Notice]:
        """Return the new reports, once."""
        news, self.news = self.news, []
        return news

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Yield the reported misbehaviour: (id or address, kind, count)."""
        for (who, kind), count in self.counts.items():
            yield who if isinstance(who, str) else who.hex(), kind, count


def notice(who: PeerId | str, kind: str) -> Notice:
    """Return the notice for the user. An honest member of a busy machine wastes exchanges, so these prove nothing."""
    subject = f"a peer at {who}" if isinstance(who, str) else f"member {short(who)}"
    if kind == "wasted":
        causes = "it or this node is overloaded, the link is bad, or it means harm"
        return Notice("overloaded", f"Exchanges with {subject} come to nothing, again and again: {causes}.")
    return Notice("suspicious", f"{subject[0].upper()}{subject[1:]} misbehaves: {KINDS[kind].description}.")
