"""Anti-entropy by push-pull: exchange digests of two tables, then the records of the buckets that differ.

Push-pull repairs what gossip missed and brings the whole table to a newcomer (Demers et al., "Epidemic algorithms for
replicated database maintenance", PODC 1987).
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from gossip.config import Config
from gossip.effects import Effect, Send
from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.membership.entry import VERIFIED_BURST, Entry
from gossip.membership.states import TELL_EVERY_S
from gossip.membership.table import Table
from gossip.wire.messages import MAX_BUCKETS, MAX_RECORDS, MAX_RECORDS_BYTES, Digest, Hint, Records, Update
from gossip.wire.records import MAX_EXTRA_BYTES

__all__ = ["PushPull"]

RECORD_BYTES = 285  # packed, with the largest numbers and three homes, but without host name and extra values
HINT_BYTES = 115


class PushPull:
    """The push-pull of one membership. At ``due_s``, :meth:`tick` sends a Digest; the membership merges the answer."""

    def __init__(self, me: PeerId, table: Table, config: Config, rng: random.Random, now: float) -> None:
        self._me, self._table, self._config, self._rng = me, table, config, rng
        self.due_s = now + rng.random() * config.internal.push_pull_period_s

    def tick(self, now: float, out: list[Effect]) -> None:
        self.due_s = now + self._config.internal.push_pull_period_s
        for entry in self._table.sample(1, self._rng):
            self.ask(entry, now, out)

    def ask(self, entry: Entry, now: float, out: list[Effect], everything: bool = False) -> None:
        entry.asked_s, entry.asked_all, entry.answer_due = now, everything, True
        # The answer to our own Digest is not a flood. A newcomer asks for everything and may receive a whole table.
        most = 2 * self._config.internal.max_members if everything else VERIFIED_BURST + len(self._table.entries)
        entry.expect(most, now)
        digest = Digest(b"" if everything else self._table.digest())
        out.append(Send(entry.record.id, digest))

    def on_digest(self, sender: PeerId, entry: Entry | None, digest: Digest, now: float, out: list[Effect]) -> None:
        if len(digest.hashes) not in (0, 8 * MAX_BUCKETS):
            raise ProtocolError(f"A digest has {len(digest.hashes)} bytes instead of {8 * MAX_BUCKETS} or none.")
        if entry is None or now < entry.digest_s + TELL_EVERY_S:
            return
        entry.digest_s = now
        crossed = digest.hashes and now < entry.asked_s + TELL_EVERY_S
        if crossed and (entry.asked_all or self._me < sender):
            return  # Both sides asked at the same time. One answer synchronises both directions.
        buckets = self._table.differing(digest.hashes)
        if buckets:
            entry.expect(VERIFIED_BURST + len(self._table.entries), now)
            self._send(sender, buckets, buckets if digest.hashes else b"", out)

    def quiet(self, entry: Entry | None, now: float) -> bool:
        """Return True if this member's records need no gossip: we asked for its whole table, which others know."""
        return entry is not None and entry.asked_all and now < entry.asked_s + self._config.internal.push_pull_period_s

    def answer(self, sender: PeerId, entry: Entry | None, records: Records, out: list[Effect]) -> None:
        """Send the buckets that the other side wants, once for each Digest of ours."""
        if records.want and entry is not None and entry.answer_due:
            entry.answer_due = False
            self._send(sender, sorted(set(records.want)), b"", out)

    def _send(self, peer: PeerId, buckets: Iterable[int], want: bytes, out: list[Effect]) -> None:
        updates: list[Update] = []
        free = MAX_RECORDS_BYTES
        for update in self._table.updates_of(buckets):
            size = most_bytes(update)
            if len(updates) == MAX_RECORDS or size > free:
                out.append(Send(peer, Records(tuple(updates), b"")))
                updates, free = [], MAX_RECORDS_BYTES
            updates.append(update)
            free -= size
        if updates or want:
            out.append(Send(peer, Records(tuple(updates), want)))


def most_bytes(update: Update) -> int:
    """Return an upper bound of the packed size. Members choose host names and extra values, so these are counted."""
    if isinstance(update, Hint):
        return HINT_BYTES
    host = len(update.address.host) if update.address is not None else 0
    return RECORD_BYTES + host + (MAX_EXTRA_BYTES if update.extra else 0)
