"""Anti-entropy by push-pull: two members compare digests, and send the records of the buckets that differ.

    asker:   Digest ---------->            ------> Records of the buckets that ``want`` names
    other:             <------ Records, want

The first byte of an id puts its member into one of 256 *buckets*. A *digest* has a hash of each bucket's members.
Push-pull repairs what gossip missed and brings the whole table to a newcomer (Demers et al., "Epidemic algorithms for
replicated database maintenance", PODC 1987).
"""

import random
from collections.abc import Iterable

from gossip.config import Config
from gossip.effects import Effect, Send
from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.membership.entry import VERIFIED_BURST, Entry
from gossip.membership.states import REPEAT_S
from gossip.membership.table import Table
from gossip.wire.messages import MAX_BUCKETS, MAX_RECORDS, MAX_RECORDS_BYTES, Digest, Hint, Records, Update
from gossip.wire.records import MAX_EXTRA_BYTES

# Upper bounds of packed sizes. That of a record has the largest numbers and three homes, but no host name or extra
# values.
RECORD_BYTES, HINT_BYTES = 285, 115


class PushPull:
    """The push-pull of one membership, which merges the records. Call :meth:`tick` at ``due_at``."""

    def __init__(self, my_id: PeerId, table: Table, config: Config, rng: random.Random, now: float) -> None:
        self._my_id, self._table, self._config, self._rng = my_id, table, config, rng
        self.due_at = now + rng.random() * config.internal.push_pull_period_s

    def tick(self, now: float, effects: list[Effect]) -> None:
        """Send a Digest to a random member, once a period."""
        self.due_at = now + self._config.internal.push_pull_period_s
        for entry in self._table.sample(1, self._rng):
            self.send_digest(entry, now, effects)

    def send_digest(self, entry: Entry, now: float, effects: list[Effect], ask_for_all: bool = False) -> None:
        entry.digest_sent_at, entry.asked_for_all, entry.answer_due = now, ask_for_all, True
        # The answer to our own Digest is not a flood. A newcomer asks for everything and may receive a whole table.
        whole_table, answer = 2 * self._config.internal.max_members, VERIFIED_BURST + len(self._table.entries)
        entry.allow_records(whole_table if ask_for_all else answer, now)
        digest = Digest(b"" if ask_for_all else self._table.digest())
        effects.append(Send(entry.record.id, digest))

    def on_digest(self, sender: PeerId, entry: Entry | None, digest: Digest, now: float, effects: list[Effect]) -> None:
        """Handle a Digest: send the buckets that differ, and name them as wanted in return."""
        if len(digest.hashes) not in (0, 8 * MAX_BUCKETS):
            raise ProtocolError(f"A digest has {len(digest.hashes)} bytes instead of {8 * MAX_BUCKETS} or none.")
        if entry is None and not digest.hashes:  # A reader, which is no member. The driver limits how often it asks.
            self._send_buckets(sender, range(MAX_BUCKETS), b"", effects)
        if entry is None or now < entry.digest_received_at + REPEAT_S:
            return
        entry.digest_received_at = now
        has_crossed = digest.hashes and now < entry.digest_sent_at + REPEAT_S
        if has_crossed and (entry.asked_for_all or self._my_id < sender):
            return  # Both sides asked at the same time, and the other side answers: one answer updates both tables.
        buckets = self._table.differing_buckets(digest.hashes)
        if buckets:
            entry.allow_records(VERIFIED_BURST + len(self._table.entries), now)
            self._send_buckets(sender, buckets, buckets if digest.hashes else b"", effects)

    def send_wanted(self, sender: PeerId, entry: Entry | None, records: Records, effects: list[Effect]) -> None:
        """Send the buckets that the answer to our Digest wants, once for each Digest."""
        if records.want and entry is not None and entry.answer_due:
            entry.answer_due = False
            self._send_buckets(sender, sorted(set(records.want)), b"", effects)

    def is_whole_table(self, entry: Entry | None, now: float) -> bool:
        """Return True if this member's records answer our request for its whole table, which others know."""
        period_s = self._config.internal.push_pull_period_s
        return entry is not None and entry.asked_for_all and now < entry.digest_sent_at + period_s

    def _send_buckets(self, peer: PeerId, buckets: Iterable[int], want: bytes, effects: list[Effect]) -> None:
        updates: list[Update] = []
        free_bytes = MAX_RECORDS_BYTES
        for update in self._table.bucket_updates(buckets):
            size = max_bytes(update)
            if len(updates) == MAX_RECORDS or size > free_bytes:
                effects.append(Send(peer, Records(tuple(updates), b"")))
                updates, free_bytes = [], MAX_RECORDS_BYTES
            updates.append(update)
            free_bytes -= size
        if updates or want:
            effects.append(Send(peer, Records(tuple(updates), want)))


def max_bytes(update: Update) -> int:
    """Return an upper bound of the packed size. Members choose host names and extra values, so these are counted."""
    if isinstance(update, Hint):
        return HINT_BYTES
    host = len(update.address.host) if update.address is not None else 0
    return RECORD_BYTES + host + (MAX_EXTRA_BYTES if update.extra else 0)
