"""Our own record: the only one that we sign and whose incarnation we raise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypedDict

from gossip.config import Config
from gossip.effects import MemberState
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.dissemination import Rumours, told_before
from gossip.membership.table import Table
from gossip.wire.records import Sign, mere_progress, signed, within

__all__ = ["Myself", "Own"]

PROGRESS = frozenset({"steps", "samples", "progress", "loss", "version", "extra"})
# Minimum time between two records with figures, for each member: 10 a second in the whole swarm.
PROGRESS_S_PER_MEMBER = 0.1
# Interval of mere progress, times N^2: all members together sign 50 / N records a second.
REFRESH_S = 0.02
REFRESH_MOST_S = 1_800.0  # maximum age of the loss, samples and steps, which people read
MAX_LIVES = 8  # members may hold records of several earlier lives, but not of many
REFUTE_EVERY_S = 0.2  # accusations of us cost the swarm at most five updates a second


class Own(TypedDict, total=False):
    """The fields that a peer can change in its own record.

    ``steps`` and ``samples`` count this life alone; those of the record count all lives.
    """

    address: Address | None
    homes: tuple[PeerId, ...]
    ready: bool
    run_id: bytes
    steps: int
    samples: int
    progress: int
    loss: float | None
    version: float
    finished: bool
    extra: tuple[Any, ...]  # figures for the owners of other nodes: not urgent, yet signed soon


class Myself:
    """Our own record. ``record`` is the last signed one; at ``due_s`` :meth:`tick` has something to sign."""

    def __init__(
        self, record: MemberRecord, table: Table, rumours: Rumours, sign: Sign, config: Config, now: float
    ) -> None:
        self.record = record
        self._table, self._rumours, self._sign, self._config = table, rumours, sign, config
        self._earlier = {"steps": record.steps, "samples": record.samples}  # counts of earlier lives
        self._pending: dict[str, Any] = {}  # changes that are not signed yet
        self._progress_s = now  # earliest time to sign progress with figures
        self._refresh_s = now  # earliest time to sign progress without figures
        self._refuted_s = -math.inf
        self._lives = 1
        self._accused = False  # accused and not refuted yet
        self.due_s = math.inf
        rumours.put(record, now)

    @property
    def samples(self) -> int:
        """Return the samples trained in all lives, signed or not."""
        return int(self._pending.get("samples", self.record.samples))

    def tick(self, now: float) -> None:
        if self._accused and now >= self._refuted_s + REFUTE_EVERY_S:
            self.refute(now)
        elif self._pending and now >= self._pending_s:
            self.announce(now)

    def update(self, changes: Own, now: float) -> None:
        """Change fields. Anything but progress is signed at once.

        Progress is signed every ``0.02 s * N^2``. Figures for other owners are signed every ``max(progress_period_s,
        0.1 s * N)``, together with the progress.
        """
        fields: dict[str, Any] = {name: within(name, value) for name, value in changes.items()}
        if "samples" in fields:
            self._table.arrears.train(fields["samples"], now)
        for name, earlier in self._earlier.items():
            if name in fields:
                fields[name] = within(name, fields[name] + earlier)
        if "run_id" in fields and fields["run_id"] != self.record.run_id:
            fields["extra"] = ()  # the figures belong to other weights
        for name, value in fields.items():
            if value != self._pending.get(name, getattr(self.record, name)):
                self._pending[name] = value
        if self._pending and (now >= self._pending_s or not self._pending.keys() <= PROGRESS):
            self.announce(now)
        else:
            self._settle()

    def announce(self, now: float, **changes: Any) -> None:
        """Sign a new record with the pending changes and these, and gossip it."""
        changes = {"sequence": self.record.sequence + 1} | self._pending | changes
        changes = {name: within(name, value) for name, value in changes.items()}
        self._pending, before = {}, self.record
        self.record = signed(dataclasses.replace(self.record, **changes), self._sign)
        state = MemberState.LEFT if self.record.left else MemberState.ALIVE
        self._table.place(self._table.mine, self.record, state, now)
        self._progress_s, self._refresh_s = now + self._pause_s(), now + self._period_s()
        mere = mere_progress(self.record, before)
        told = told_before(self._table.size) if mere else None
        self._rumours.put(self.record, now, told)
        self._settle()

    def met(self, now: float, share: float) -> None:
        """Start with a random phase, since all members know our record already.

        ``share`` is the phase, 0 to 1. Members that start together would otherwise sign their progress together for
        ever.
        """
        self._progress_s, self._refresh_s = now + share * self._pause_s(), now + share * self._period_s()
        self._settle()

    @property
    def _pending_s(self) -> float:
        """Return the time at which pending progress is due."""
        return self._progress_s if "extra" in self._pending else self._refresh_s

    def _period_s(self) -> float:
        """Return the time between two records of mere progress. It depends on the id, to keep members out of phase."""
        size = self._table.size
        period_s = min(REFRESH_S * size * size, REFRESH_MOST_S) * (0.75 + self.record.id[0] / 512)
        return max(self._pause_s(), period_s)

    def _pause_s(self) -> float:
        return max(self._config.internal.progress_period_s, PROGRESS_S_PER_MEMBER * self._table.size)

    def accused(self, now: float) -> bool:
        """Note an accusation of our present incarnation. Return True if it is refuted now rather than later."""
        self._accused = True
        if now < self._refuted_s + REFUTE_EVERY_S:
            self._settle()
            return False
        self.refute(now)
        return True

    def refute(self, now: float) -> None:
        self._accused = False
        self._refuted_s = now
        self.announce(now, incarnation=self.record.incarnation + 1, sequence=0)

    def continue_from(self, record: MemberRecord, now: float) -> bool:
        """Continue from a record of an earlier life of ours, which is newer or counts more steps.

        The new record has a higher incarnation and adds the counts of the old one.

        Returns:
            True once there were too many such records: another process uses our key now.
        """
        self._lives += 1
        incarnation = max(record.incarnation, self.record.incarnation) + 1
        # Two processes that add each other's counts to their own would double them without end.
        if self._lives >= MAX_LIVES:
            self.announce(now, incarnation=incarnation, sequence=0)
            return self._lives == MAX_LIVES
        counts = dict[str, int]()
        for name, earlier in self._earlier.items():
            more = max(0, getattr(record, name) - earlier)
            self._earlier[name] += more
            counts[name] = self._pending.get(name, getattr(self.record, name)) + more
        self.announce(now, incarnation=incarnation, sequence=0, **counts)
        return False

    def _settle(self) -> None:
        self.due_s = self._pending_s if self._pending else math.inf
        if self._accused:
            self.due_s = min(self.due_s, self._refuted_s + REFUTE_EVERY_S)
