"""Two tables made one: a Digest of ours, the Records in which a member differs, and those of ours that it wants.

It repairs what gossip missed, and brings the whole table to one who has just come (anti-entropy: Demers et al.,
"Epidemic algorithms for replicated database maintenance", PODC 1987).
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from gossip.config import Config
from gossip.effects import Effect, Send
from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.messages import MAX_BUCKETS, MAX_RECORDS, Digest, Records
from gossip.table import Entry, Table
from gossip.view import TELL_EVERY_S

__all__ = ["PushPull"]


class PushPull:
    """Of one membership. ``due_s`` is when :meth:`tick` asks somebody; the membership absorbs what comes back."""

    def __init__(self, me: PeerId, table: Table, config: Config, rng: random.Random, now: float) -> None:
        self._me, self._table, self._config, self._rng = me, table, config, rng
        self.due_s = now + rng.random() * config.push_pull_period_s

    def tick(self, now: float, out: list[Effect]) -> None:
        self.due_s = now + self._config.push_pull_period_s
        for entry in self._table.sample(1, self._rng):
            self.ask(entry, now, out)

    def ask(self, entry: Entry, now: float, out: list[Effect], everything: bool = False) -> None:
        entry.asked_s, entry.asked_all, entry.answer_due = now, everything, True
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
            return  # each asked the other, and the answer to one runs both ways
        buckets = self._table.differing(digest.hashes)
        if buckets:
            self._send(sender, buckets, buckets if digest.hashes else b"", out)

    def quiet(self, entry: Entry | None, now: float) -> bool:
        """Whether its Records need be told to nobody: we asked for everything, which the others know already."""
        return entry is not None and entry.asked_all and now < entry.asked_s + self._config.push_pull_period_s

    def answer(self, sender: PeerId, entry: Entry | None, records: Records, out: list[Effect]) -> None:
        """Send the buckets that it wants, once for each Digest of ours."""
        if records.want and entry is not None and entry.answer_due:
            entry.answer_due = False
            self._send(sender, sorted(set(records.want)), b"", out)

    def _send(self, peer: PeerId, buckets: Iterable[int], want: bytes, out: list[Effect]) -> None:
        updates = list(self._table.updates_of(buckets))
        while len(updates) > MAX_RECORDS:
            out.append(Send(peer, Records(tuple(updates[:MAX_RECORDS]), b"")))
            del updates[:MAX_RECORDS]
        if updates or want:
            out.append(Send(peer, Records(tuple(updates), want)))
