"""Piggybacked dissemination: each update is sent a number of times, the least sent first, then the newest.

An update is a member's record or a hint, which is an accusation of a member. It asks for gossip frames of its own until
it was sent half of its times. By then few have missed it (one in 400 among 300 members). It is then *passive*: the
other half is piggybacked on Pings, Acks and frames that are sent anyway. Mere progress, and the DEAD hint of a suspect
whose time has run out, are passive from the start.
"""

import math
import random
from functools import lru_cache

from gossip.effects import Effect, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.membership.table import Table
from gossip.wire.messages import MAX_UPDATES, Gossip, Update

MAX_SENDS = 24  # More than the 20 retransmissions of the largest table.
# An update that is passive from the start is sent as often as in the smallest swarm. A missed progress update is
# replaced by the owner's next one. Each member that knows the accusations finds out by itself that a suspect is dead.
PASSIVE_SENDS = 4
MIN_LINKS = 24  # Links that suffice for gossip: among 1,000 members, records were as fresh as with random targets.
MAX_RUMOURS = 1024  # Push-pull carries the rest: 32 a frame and 6 frames a second send 1,024 updates in 5 s.


@lru_cache(1024)
def retransmits(members: int) -> int:
    """Return how often a member sends an update: ``4 ceil(log10(N + 1))`` (SWIM, section 4.1; memberlist's factor)."""
    return 4 * math.ceil(math.log10(members + 1))


def first_passive_sends(members: int) -> int:
    """Return the sends with which a passive update begins: PASSIVE_SENDS are left, and it is sent last."""
    return min(retransmits(members), MAX_SENDS) - PASSIVE_SENDS


class Rumours:
    """The updates to send: at most one record and one hint for each member. A newer one replaces an older one."""

    def __init__(self, period_s: float, now: float) -> None:
        self.due_at = math.inf  # Time of the next gossip frame; infinite while no update asks for one.
        self._period_s = period_s
        self._frame_at = now - period_s  # Time of the last gossip frame.
        # ``_levels[n]`` holds the updates that were sent n times so far, by key. The newest comes last.
        self._levels: list[dict[bytes, Update]] = [{} for _ in range(MAX_SENDS)]
        self._sends: dict[bytes, int] = {}  # The number of sends of each update, by key.
        self._passive: set[bytes] = set()  # Keys of updates that ask for no frame.

    def __len__(self) -> int:
        return len(self._sends)

    @property
    def needs_frame(self) -> bool:
        """Return True if any update asks for a frame."""
        return len(self._sends) > len(self._passive)

    def put(self, update: Update, now: float, passive_sends: int | None = None) -> None:
        """Start sending ``update`` and stop sending the one that it replaces.

        The first frame after a silence goes out at once.

        Args:
            update: The record or hint.
            now: The current time.
            passive_sends: If set, the update is passive and counts as sent this many times. It still asks for a frame
                if it replaces an update that does.
        """
        # A record and a hint never replace each other: progress of a suspect would silence its accusers.
        key = update.id if isinstance(update, MemberRecord) else hint_key(update.peer)
        replaced_level, sends = self._sends.get(key), passive_sends or 0
        if replaced_level is not None:
            del self._levels[replaced_level][key]
            sends = min(sends, replaced_level)
        self._levels[sends][key] = update
        self._sends[key] = sends
        if passive_sends is None:
            self._passive.discard(key)
        elif replaced_level is None:
            self._passive.add(key)
        if self.due_at == math.inf and key not in self._passive:
            self.due_at = max(now, self._frame_at + self._period_s)
        if len(self._sends) > MAX_RUMOURS:
            most_sent = next(level for level in reversed(self._levels) if level)
            self._drop(next(iter(most_sent)))

    def take(self, count: int, copies: int, members: int) -> tuple[Update, ...]:
        """Return at most ``count`` updates for a frame to ``copies`` peers, and count each as sent that often."""
        if not self._sends:
            return ()
        levels, limit = self._levels, min(retransmits(members), MAX_SENDS)
        taken: list[Update] = []
        moved: list[tuple[int, dict[bytes, Update]]] = []  # Batches of taken updates, with their new number of sends.
        for sends, level in enumerate(levels):
            if not level:
                continue
            room = count - len(taken)
            if len(level) <= room:  # Most levels are small and move as a whole.
                batch, levels[sends] = level, {}
            else:
                newest_first = [level.popitem() for _ in range(room)]
                batch = dict(newest_first[::-1])
            taken += reversed(batch.values())
            moved.append((sends + copies, batch))
            if len(taken) == count:
                break
        for sends, batch in moved:
            if sends >= limit // 2:
                self._passive.update(batch)
            if sends < limit:
                if levels[sends]:
                    levels[sends] |= batch
                else:
                    levels[sends] = batch  # Reusing the dict is faster than copying it.
                self._sends |= dict.fromkeys(batch, sends)
            else:  # These were sent often enough.
                for key in batch:
                    del self._sends[key]
                self._passive.difference_update(batch)
        return tuple(taken)

    def drop_hint(self, peer: PeerId) -> None:
        """Stop sending the hint about this member, which was refuted."""
        self._drop(hint_key(peer))

    def clear(self) -> None:
        """Stop sending everything, since all members know it."""
        for level in self._levels:
            level.clear()
        self._sends.clear()
        self._passive.clear()
        self.due_at = math.inf

    # -- frames --------------------------------------------------------------------------------------------------
    def send_frame(self, targets: list[PeerId], members: int, now: float, effects: list[Effect]) -> None:
        """Send the frame that is due, and schedule the next one a period later, if an update asks for one."""
        if not targets:
            self.due_at = math.inf
            return
        if self.needs_frame:  # Otherwise Pings have carried all that asked for a frame.
            gossip = Gossip(self.take(MAX_UPDATES, len(targets), members))
            effects.extend(Send(peer, gossip) for peer in targets)
        self._frame_at = now
        self.due_at = now + self._period_s if self.needs_frame else math.inf

    def resume(self, now: float) -> None:
        """Restart the timer, since there is a member to gossip to."""
        if self.needs_frame and self.due_at == math.inf:
            self.due_at = max(now, self._frame_at + self._period_s)

    def _drop(self, key: bytes) -> None:
        sends = self._sends.pop(key, None)
        if sends is not None:
            del self._levels[sends][key]
            self._passive.discard(key)


def gossip_targets(table: Table, fanout: int, rng: random.Random) -> list[PeerId]:
    """Return the targets of one gossip frame: one random member, the others random linked ones if there are enough.

    Exchanges link random partners, and such a random graph spreads a rumour as well as random targets do. Random
    targets alone must be dialled first: six dials a second for each of 1,000 members.
    """
    has_links = len(table.links) >= MIN_LINKS
    # A suspect must hear of its suspicion.
    sample = table.sample(1 if has_links else fanout, rng, with_suspects=True)
    targets = [entry.record.id for entry in sample]
    for peer in rng.sample(list(table.links), fanout - 1) if has_links else ():
        if table.entries[peer].state in (MemberState.ALIVE, MemberState.SUSPECT) and peer not in targets:
            targets.append(peer)
    return targets


def hint_key(peer: PeerId) -> bytes:
    return peer + b"!"
