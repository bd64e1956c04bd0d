"""Who misbehaves, and how: counted for each member and kind, and told to a person once it is more than faults explain.

Nothing is decided here. What protects a node from a member (a filter, a bench, an allowance) acts by itself and at
once; this says whose doing it was, so that somebody may take its secret away.
"""

from __future__ import annotations

from collections.abc import Iterator

from gossip.effects import Notice
from gossip.ids import PeerId, short

__all__ = ["KINDS", "NEVER", "Conduct"]

NEVER = 2.0**50  # samples, steps or rounds: 36 years of one each microsecond

KEPT = 1_024  # members and kinds counted at once: 200 KiB. A flood of identities pushes out the oldest, never the told
TOLD = 256  # sentences in a node's life: who has more to say about others has a swarm of strangers, and says so too

KINDS: dict[str, tuple[float, float, str]] = {
    # kind: (how many above those forgiven are told, seconds in which one is forgiven, what they are)
    "fault": (3.0, 60.0, "bytes or messages that no honest node sends"),
    "flood": (3.0, 60.0, "messages beyond every allowance"),
    "unread": (3.0, 60.0, "more questions than it reads answers"),  # a stopped one asks nothing, and is dialled in vain
    "wasted": (4.0, 900.0, "exchanges that it let come to nothing"),  # each finished one takes one back
    "refused": (3.0, 900.0, "vectors that did not pass the checks"),  # each is sat out for longer than the last
    "clipped": (16.0, 60.0, "vectors far from everybody's"),  # each that passes whole takes one back
    "pestering": (200.0, 0.05, "offers all the time while it was to wait"),  # with nobody else an honest one makes 16/s
    "claims": (3.0, 60.0, "numbers that cannot be"),
    "accusations": (8.0, 60.0, "accusations that were refuted"),
    "strangers": (16.0, 60.0, "connections that never said who they are"),
}
"""What a member can do that others pay for, and from how many on it is told. Honest nodes that are killed, stopped and
cut off every few seconds reach none of these; an attacker that stays below them costs no more than such a node. Wasted
exchanges are forgiven slowly, since whoever wastes one sits out for 10 s and then for twice as long each time."""


class Conduct:
    """``who`` is a member, or the address of somebody who never said who it is."""

    def __init__(self) -> None:
        self.levels: dict[tuple[PeerId | str, str], tuple[float, float]] = {}  # above those forgiven, since when
        self.counts: dict[tuple[PeerId | str, str], int] = {}  # of those that were told: all of them, since the first
        self.news: list[Notice] = []  # for whoever tells people

    def note(self, who: PeerId | str, kind: str, now: float, times: float = 1.0) -> None:
        """It did this."""
        key = (who, kind)
        threshold, forgiven_s, _ = KINDS[kind]
        level, since = self.levels.pop(key, (0.0, now))  # the one of longest ago goes first
        forgiven = (now - since) // forgiven_s  # whole ones: three in three seconds are three
        level, since = (level - forgiven, since + forgiven * forgiven_s) if forgiven < level else (0.0, now)
        level += times
        self.levels[key] = (level, since)
        if len(self.levels) > KEPT:
            del self.levels[next(iter(self.levels))]
        if key in self.counts:
            self.counts[key] += 1
        elif level >= threshold and len(self.counts) < TOLD:
            self.counts[key] = round(level)
            self.news.append(Notice("suspicious", sentence(who, kind)))

    def excuse(self, who: PeerId | str, kind: str) -> None:
        """It did the opposite."""
        key = (who, kind)
        entry = self.levels.get(key)
        if entry is None:
            return
        if entry[0] <= 1:
            del self.levels[key]
        else:
            self.levels[key] = (entry[0] - 1, entry[1])

    def take(self) -> list[Notice]:
        """What is to be told since last asked."""
        news, self.news = self.news, []
        return news

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Those told: (id or address, kind, how often)."""
        for (who, kind), count in self.counts.items():
            yield who if isinstance(who, str) else who.hex(), kind, count


def sentence(who: PeerId | str, kind: str) -> str:
    subject = f"Somebody at {who}" if isinstance(who, str) else f"Member {short(who)}"
    return f"{subject} misbehaves: {KINDS[kind][2]}."
