"""What is still to be told: each update goes out a number of times, the least told and then the newest first.

News asks for frames of its own until it was told half as often as it is to be; by then few have not heard of it (one in
400 of 300 members), and the other half goes out on pings, acks and frames that go anyway.
"""

from __future__ import annotations

import math
from functools import lru_cache

from gossip.ids import MemberRecord, PeerId
from gossip.wire.messages import Update

__all__ = ["Rumours", "retransmits", "told_before"]

LEVELS = 24  # over the 20 retransmissions of the largest table
# As often as in the smallest swarm. What some miss of progress, the next one of its owner replaces; and that a suspect
# is dead each finds out by itself, as long as it knows who accuses it.
MERE_TELLINGS = 4
MAX_RUMOURS = 1024  # beyond this the push-pull carries the rest: 32 a frame and 6 frames a second are told in 5 s


@lru_cache(1024)
def retransmits(members: int) -> int:
    """How often each member passes an update on: ``4 ceil(log10(N + 1))`` (SWIM, section 4.1; memberlist's factor)."""
    return 4 * math.ceil(math.log10(members + 1))


class Rumours:
    """One record and one hint for each member at most, a newer one in the place of an older.

    Mere progress, and the burial of a suspect, wait for frames that go out anyway: for them alone none is sent.
    """

    def __init__(self, period_s: float, now: float) -> None:
        self.due_s = math.inf  # when the next frame of gossip goes out; never while there is nothing to say
        self._period_s = period_s
        self._gossiped_s = now - period_s
        self._levels: list[dict[bytes, Update]] = [{} for _ in range(LEVELS)]  # times told -> what, newest last
        self._told: dict[bytes, int] = {}  # key -> times told
        self._mere: set[bytes] = set()  # those of them that ask for no frame: told half, or never to have one

    def __len__(self) -> int:
        return len(self._told)

    @property
    def pressing(self) -> bool:
        """Whether there is anything to tell that asks for a frame."""
        return len(self._told) > len(self._mere)

    def put(self, update: Update, now: float, mere: int | None = None) -> None:
        """Start telling this, at once if we have been silent, and stop telling what it replaces.

        ``mere``: it asks for no frame; begin as if it had been told so often already. In the place of news that still
        was to be told it is news itself.
        """
        # A hint does not replace a record nor the other way: progress of a suspect would silence its accusers.
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
        """A frame of gossip went out: the next one a period later, if there is anything left that asks for one."""
        self._gossiped_s = now
        self.due_s = now + self._period_s if self.pressing else math.inf

    def nobody(self) -> None:
        """There is nobody to tell. Whoever comes is news, and starts this again."""
        self.due_s = math.inf

    def somebody(self, now: float) -> None:
        """There is somebody to tell."""
        if self.pressing and self.due_s == math.inf:
            self.due_s = max(now, self._gossiped_s + self._period_s)

    def silence(self, peer: PeerId) -> None:
        """Stop telling a hint about this member: it was refuted."""
        self._discard(hint_key(peer))

    def silence_all(self) -> None:
        """Everybody knows it all."""
        for level in self._levels:
            level.clear()
        self._told.clear()
        self._mere.clear()
        self.due_s = math.inf

    def take(self, count: int, copies: int, members: int) -> tuple[Update, ...]:
        """At most ``count`` updates for a frame that goes to ``copies`` peers, counted as told that often."""
        if not self._told:
            return ()
        levels, limit = self._levels, min(retransmits(members), LEVELS)
        taken: list[Update] = []
        moved: list[tuple[int, dict[bytes, Update]]] = []  # times told -> what, newest last
        for told, waiting in enumerate(levels):
            if not waiting:
                continue
            room = count - len(taken)
            if len(waiting) <= room:  # most are few, and move as they are
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
    """As how often told a mere update begins: it goes out behind all else, and leaves first."""
    return min(retransmits(members), LEVELS) - MERE_TELLINGS


def hint_key(peer: PeerId) -> bytes:
    return peer + b"!"
