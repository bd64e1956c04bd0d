"""Our own record: the only one that we sign and whose incarnation we raise.

Changes are signed at once, except for mere progress, which every training step changes. In a swarm of N members:

    progress (steps, samples ...)   signed every 0.02 s * N^2, by all N members together 50 / N times a second
    progress with *figures*         signed every max(progress_period_s, 0.1 s * N), 10 times a second in the swarm
    an accusation of us             refuted with a higher incarnation, at most every REFUTE_EVERY_S

Figures are numbers of the node's owner for the owners of other nodes. They are in the record's field ``extra``.
"""

import dataclasses
import math
from typing import Any, TypedDict

from gossip.config import Config
from gossip.effects import MemberState
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.dissemination import Rumours, first_passive_sends
from gossip.membership.table import Table
from gossip.wire.records import Sign, clamp_field, is_progress_only, signed

PROGRESS = frozenset({"steps", "samples", "progress", "loss", "version", "extra"})  # The fields of mere progress.
FIGURES_S_PER_MEMBER = 0.1  # Minimum time between two records with figures, for each member of the swarm.
PROGRESS_S = 0.02  # N^2 times this is the time between two records of mere progress.
MAX_PROGRESS_S = 1_800.0  # Maximum of that time, since people read the loss, samples and steps.
# Number of our lives, this one included, whose counts are added up. Members may hold records of several earlier lives.
# Many such records mean that another process uses our key.
MAX_LIVES = 8
REFUTE_EVERY_S = 0.2  # Accusations of us cost the swarm at most five updates a second.


class OwnFields(TypedDict, total=False):
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
    extra: tuple[Any, ...]  # Figures, which are not urgent, yet signed soon.


class OwnRecord:
    """Our own record. ``record`` is the last signed one. Call :meth:`tick` at ``due_at``."""

    def __init__(
        self, record: MemberRecord, table: Table, rumours: Rumours, sign: Sign, config: Config, now: float
    ) -> None:
        self.record = record
        self._table, self._rumours, self._sign, self._config = table, rumours, sign, config
        self._earlier = {"steps": record.steps, "samples": record.samples}  # Counts of earlier lives.
        self._life_count = 1  # Lives whose records we have met, this one included.
        self._pending: dict[str, Any] = {}  # Changes that are not signed yet.
        self._figures_at = now  # Earliest time to sign progress with figures.
        self._progress_at = now  # Earliest time to sign progress without figures.
        self._is_accused = False  # Accused and not refuted yet.
        self._refuted_at = -math.inf
        self.due_at = math.inf
        rumours.put(record, now)

    @property
    def samples(self) -> int:
        """Return the samples trained in all lives, signed or not."""
        return int(self._pending.get("samples", self.record.samples))

    def tick(self, now: float) -> None:
        """Sign a refutation or changes that are due."""
        if self._is_accused and now >= self._refuted_at + REFUTE_EVERY_S:
            self._refute(now)
        elif self._pending and now >= self._pending_at:
            self.publish(now)

    def update(self, changes: OwnFields, now: float) -> None:
        """Change fields, and sign the record now or later."""
        record, pending, earlier = self.record, self._pending, self._earlier
        fields: dict[str, Any] = {}
        for name, value in changes.items():  # This runs at every step boundary.
            field = clamp_field(name, value)
            if name == "samples":
                self._table.arrears.note_samples(field, now)
            if earlier.get(name):
                field = clamp_field(name, field + earlier[name])
            fields[name] = field
        if "run_id" in fields and fields["run_id"] != record.run_id:
            fields["extra"] = ()  # The figures belong to other weights.
        for name, field in fields.items():
            if field != (pending[name] if name in pending else getattr(record, name)):
                pending[name] = field
        if pending and (now >= self._pending_at or not pending.keys() <= PROGRESS):
            self.publish(now)
        else:
            self._update_deadline()

    def publish(self, now: float, **changes: Any) -> None:
        """Sign a new record with the pending changes and these, and gossip it."""
        changes = {"sequence": self.record.sequence + 1} | self._pending | changes
        changes = {name: clamp_field(name, value) for name, value in changes.items()}
        self._pending, earlier_record = {}, self.record
        self.record = signed(dataclasses.replace(self.record, **changes), self._sign)
        state = MemberState.LEFT if self.record.left else MemberState.ALIVE
        self._table.update(self._table.mine, self.record, state, now)
        self.set_phase(now)
        sends = first_passive_sends(self._table.size) if is_progress_only(self.record, earlier_record) else None
        self._rumours.put(self.record, now, sends)

    def set_phase(self, now: float, phase: float = 1.0) -> None:
        """Set the time of the next progress, ``phase`` (0 to 1) of its interval from now.

        Members that start together need random phases. They would otherwise sign their progress together for ever.
        """
        self._figures_at = now + phase * self._figures_interval_s
        self._progress_at = now + phase * self._progress_interval_s
        self._update_deadline()

    @property
    def _pending_at(self) -> float:
        """Return the time at which pending progress is due."""
        return self._figures_at if "extra" in self._pending else self._progress_at

    @property
    def _figures_interval_s(self) -> float:
        return max(self._config.internal.progress_period_s, FIGURES_S_PER_MEMBER * self._table.size)

    @property
    def _progress_interval_s(self) -> float:
        """Return the time between two records of mere progress. It depends on the id, to keep members out of phase."""
        size = self._table.size
        interval_s = min(PROGRESS_S * size * size, MAX_PROGRESS_S) * (0.75 + self.record.id[0] / 512)
        return max(self._figures_interval_s, interval_s)

    # -- accusations and earlier lives ---------------------------------------------------------------------------
    def on_accusation(self, now: float) -> bool:
        """Handle an accusation of our present incarnation. Return True if it is refuted now rather than later."""
        self._is_accused = True
        if now < self._refuted_at + REFUTE_EVERY_S:
            self._update_deadline()
            return False
        self._refute(now)
        return True

    def _refute(self, now: float) -> None:
        self._is_accused = False
        self._refuted_at = now
        self.publish(now, incarnation=self.record.incarnation + 1, sequence=0)

    def continue_from(self, record: MemberRecord, now: float) -> bool:
        """Continue from a record of an earlier life of ours, which is newer or counts more steps.

        The new record has a higher incarnation and adds the counts of the old one.

        Returns:
            True, only once, if there were too many such records: another process uses our key now.
        """
        self._life_count += 1
        incarnation = max(record.incarnation, self.record.incarnation) + 1
        # Two processes that add each other's counts to their own would double them without end.
        if self._life_count >= MAX_LIVES:
            self.publish(now, incarnation=incarnation, sequence=0)
            return self._life_count == MAX_LIVES
        counts = dict[str, int]()
        for name, earlier_count in self._earlier.items():
            uncounted = max(0, getattr(record, name) - earlier_count)
            self._earlier[name] += uncounted
            counts[name] = self._pending.get(name, getattr(self.record, name)) + uncounted
        self.publish(now, incarnation=incarnation, sequence=0, **counts)
        return False

    def _update_deadline(self) -> None:
        self.due_at = self._pending_at if self._pending else math.inf
        if self._is_accused:
            self.due_at = min(self.due_at, self._refuted_at + REFUTE_EVERY_S)
