"""Piggybacked dissemination: each update is sent a number of times, the least sent first, then the newest.

An update asks for gossip frames of its own until it was sent half of its times. By then few have missed it (one in 400
among 300 members). The other half is piggybacked on pings, acks and frames that are sent anyway.
"""

from __future__ import annotations

import math
from functools import lru_cache

from gossip.ids import MemberRecord, PeerId
from gossip.wire.messages import Update

__all__ = ["Rumours", "retransmits", "told_before"]

LEVELS = 24  # more than the 20 retransmissions of the largest table
# A mere update is sent as often as in the smallest swarm. A missed progress update is replaced by the owner's next one.
# Each member that knows the accusers finds out by itself that a suspect is dead.
MERE_TELLINGS = 4
MAX_RUMOURS = 1024  # push-pull carries the rest: 32 a frame and 6 frames a second send 1,024 updates in 5 s


@lru_cache(1024)
def retransmits(members: int) -> int:
    """Return how often a member sends an update: ``4 ceil(log10(N + 1))`` (SWIM, section 4.1; memberlist's factor)."""
    return 4 * math.ceil(math.log10(members + 1))


class Rumours:
    """The updates to send: at most one record and one hint for each member. A newer one replaces an older one.

    Mere progress and the DEAD hint of an expired suspect do not ask for a frame of their own.
    """

    def __init__(self, period_s: float, now: float) -> None:
        self.due_s = math.inf  # when the next gossip frame is sent; infinite while no update asks for one
        self._period_s = period_s
        self._gossiped_s = now - period_s
        # The updates by times sent, the newest last.
        self._levels: list[dict[bytes, Update]] = [{} for _ in range(LEVELS)]
        self._told: dict[bytes, int] = {}  # times sent, by key
        self._mere: set[bytes] = set()  # keys of updates that ask for no frame: half sent, or mere progress

    def __len__(self) -> int:
        return len(self._told)

    @property
    def pressing(self) -> bool:
        """Return True if any update asks for a frame."""
        return len(self._told) > len(self._mere)

    def put(self, update: Update, now: float, mere: int | None = None) -> None:
        """Start sending ``update`` and stop sending the one that it replaces.

        The first frame after a silence goes out at once.

        Args:
            update: The record or hint.
            now: The current time.
            mere: If set, the update asks for no frame and counts as sent this many times. It still asks for one if it
                replaces an update that does.
        """
        # A record and a hint never replace each other: progress of a suspect would silence its accusers.
        key = update.id if isinstance(update, MemberRecord) else hint_key(update.peer)
        before, told = self._told.get(key), mere or 0
        if before is not None:
            del self._levels[before][key]
            told = min(told, before)
        self._levels[told][key] = update
        self._told[key] = told
        if mere is None:
            self._mere.discard(key)
        elif before is None:
            self._mere.add(key)
        if self.due_s == math.inf and key not in self._mere:
            self.due_s = max(now, self._gossiped_s + self._period_s)
        if len(self._told) > MAX_RUMOURS:
            most_told = next(level for level in reversed(self._levels) if level)
            self._discard(next(iter(most_told)))

    def gossiped(self, now: float) -> None:
        """Note that a gossip frame was sent. Schedule the next one a period later, if an update asks for one."""
        self._gossiped_s = now
        self.due_s = now + self._period_s if self.pressing else math.inf

    def pause(self) -> None:
        """Stop the timer: there is no member to gossip to."""
        self.due_s = math.inf

    def resume(self, now: float) -> None:
        """Restart the timer: there is a member to gossip to."""
        if self.pressing and self.due_s == math.inf:
            self.due_s = max(now, self._gossiped_s + self._period_s)

    def silence(self, peer: PeerId) -> None:
        """Stop sending the hint about this member: it was refuted."""
        self._discard(hint_key(peer))

    def silence_all(self) -> None:
        """Stop sending everything: all members know it."""
        for level in self._levels:
            level.clear()
        self._told.clear()
        self._mere.clear()
        self.due_s = math.inf

    def take(self, count: int, copies: int, members: int) -> tuple[Update, ...]:
        """Return at most ``count`` updates for a frame to ``copies`` peers, and count each as sent that often."""
        if not self._told:
            return ()
        levels, limit = self._levels, min(retransmits(members), LEVELS)
        taken: list[Update] = []
        moved: list[tuple[int, dict[bytes, Update]]] = []  # the updates by times sent, the newest last
        for told, waiting in enumerate(levels):
            if not waiting:
                continue
            room = count - len(taken)
            if len(waiting) <= room:  # most levels are small and move as a whole
                some, levels[told] = waiting, {}
            else:
                some = dict([waiting.popitem() for _ in range(room)][::-1])
            taken += reversed(some.values())
            moved.append((told + copies, some))
            if len(taken) == count:
                break
        half = limit // 2
        for told, some in moved:
            if told >= half:
                self._mere.update(some)
            if told < limit:
                if levels[told]:
                    levels[told] |= some
                else:
                    levels[told] = some
                self._told |= dict.fromkeys(some, told)
            else:
                for key in some:
                    del self._told[key]
                self._mere.difference_update(some)
        return tuple(taken)

    def _discard(self, key: bytes) -> None:
        told = self._told.pop(key, None)
        if told is not None:
            del self._levels[told][key]
            self._mere.discard(key)


def told_before(members: int) -> int:
    """Return the number of times that a mere update counts as sent at first: it is sent last and expires first."""
    return min(retransmits(members), LEVELS) - MERE_TELLINGS


def hint_key(peer: PeerId) -> bytes:
    return peer + b"!"
