"""Our own record: the only one that we sign, and whose incarnation we raise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypedDict

from gossip.config import Config
from gossip.effects import MemberState
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.dissemination import Rumours, told_of_progress
from gossip.membership.samples.meter import Meter
from gossip.membership.table import Table
from gossip.wire.records import Sign, mere_progress, signed, within

__all__ = ["Myself", "Own"]

PROGRESS = frozenset({"steps", "samples", "loss", "version", "extra"})
PROGRESS_S_PER_MEMBER = 0.1  # at the least between two: 10 a second in the whole swarm, where all change their pace
REFRESH_S = 0.02  # times N^2: with nothing but progress 50 / N a second in the whole swarm, which costs each as little
REFRESH_MOST_S = 1_800.0  # loss, version and steps, which people read, are not older
OFF = 1 / 50  # of our samples: so much others may reckon too many or too few
OFF_BATCHES = 2  # and so many of our batches, or the first minute would be a storm
MAX_LIVES = 8  # different members may hold records of different age of an earlier life, but not many
REFUTE_EVERY_S = 0.2  # so that accusing us costs the swarm five updates a second at most


class Own(TypedDict, total=False):
    """What a peer can change about itself. ``steps`` and ``samples`` count this life alone; with another ``genesis``
    the record's samples begin at 0 again."""

    address: Address | None
    homes: tuple[PeerId, ...]
    ready: bool
    genesis: bytes
    base_samples: int
    steps: int
    samples: int
    loss: float | None
    version: float
    finished: bool
    extra: tuple[Any, ...]  # figures for others' owners: no news, and soon signed all the same


class Myself:
    """``record`` is as last signed; ``due_s`` is when :meth:`tick` has something to sign."""

    def __init__(
        self, record: MemberRecord, table: Table, rumours: Rumours, sign: Sign, config: Config, now: float
    ) -> None:
        self.record = record
        self._table, self._rumours, self._sign, self._config = table, rumours, sign, config
        self._earlier_steps = record.steps  # of earlier lives
        self._life_samples = self._life_steps = 0  # of this life, as last told
        self._batch = 0.0  # samples of a step, as the last report says
        self._meter, self._began_s = Meter(now), now
        self._off = False  # others reckon with too many of our samples, or too few
        self._run_began_at = -record.samples  # of these, how many are behind other weights than the run's
        self._pending: dict[str, Any] = {}  # not signed yet
        self._progress_s = now  # progress alone is not signed before this
        self._refresh_s = now  # and is, whatever others reckon, after this
        self._reckon_s = math.inf  # when it is to be signed, if nothing is reported before
        self._refuted_s = -math.inf
        self._lives = 1
        self._accused = False  # and not refuted yet
        self.due_s = math.inf
        rumours.put(record, now)

    @property
    def samples(self) -> int:
        """Trained in this life for the run that we are of, signed or not."""
        return int(self._pending.get("samples", self.record.samples))

    def tick(self, now: float) -> None:
        if self._accused and now >= self._refuted_s + REFUTE_EVERY_S:
            self.refute(now)
        elif now >= self._reckon_s:
            self.announce(now)

    def update(self, changes: Own, now: float) -> None:
        """Anything but progress is signed at once. Progress is when what others reckon from our record is 2 % off, at
        most every ``max(progress_period_s, 0.1 s * N)``, as figures are, and else every ``0.02 s * N^2``."""
        fields: dict[str, Any] = {name: within(name, value) for name, value in changes.items()}
        if "steps" in fields:
            fields["steps"] = within("steps", fields["steps"] + self._earlier_steps)
        reported = "samples" in fields and self._report(fields["samples"], changes.get("steps", 0), now)
        if "genesis" in fields and fields["genesis"] != self.record.genesis:
            self._run_began_at = self._life_samples
            fields |= {"samples": 0, "extra": ()}  # figures of other weights
        elif "samples" in fields:
            fields["samples"] = within("samples", fields["samples"] - self._run_began_at)
        for name, value in fields.items():
            if value != self._pending.get(name, getattr(self.record, name)):
                self._pending[name] = value
        if reported:
            self._off = self._is_off(now)
        due_s = self._progress_s if self._presses else self._refresh_s
        if self._pending and (now >= due_s or not self._pending.keys() <= PROGRESS):
            self.announce(now)
        else:
            self._settle()

    def announce(self, now: float, **changes: Any) -> None:
        """Sign a new record with what is pending and these changes, and tell it."""
        rate = self._meter.rate(now)
        counted_s = self._meter.last_s if rate else now  # where nothing is made they are as good now
        figures = {"rate": rate, "clock_s": counted_s - self._began_s}
        changes = {"sequence": self.record.sequence + 1} | figures | self._pending | changes
        changes = {name: within(name, value) for name, value in changes.items()}
        self._pending, self._off, before = {}, False, self.record
        self.record = signed(dataclasses.replace(self.record, **changes), self._sign)
        state = MemberState.LEFT if self.record.left else MemberState.ALIVE
        self._table.place(self._table.mine, self.record, state, now)
        self._progress_s, self._refresh_s = now + self._pause_s(), now + self._period_s()
        mere = mere_progress(self.record, before)
        told = told_of_progress(self.record, before, self._table.size) if mere else None
        self._rumours.put(self.record, now, told)
        self._settle()

    def met(self, now: float, share: float) -> None:
        """Everybody knows our record; the next is signed after this share of the time between two, or all who begin
        together would tell of their progress at once and for ever after."""
        self._progress_s, self._refresh_s = now + share * self._pause_s(), now + share * self._period_s()
        self._settle()

    def _report(self, samples: int, steps: int, now: float) -> bool:
        """So many were made in this life by now; returns whether these are more than before."""
        more = samples - self._life_samples
        if more > 0:
            self._meter.report(samples, now)
            self._table.tally.trained(more, now)
            self._batch = more / max(1, steps - self._life_steps)
        self._life_samples, self._life_steps = samples, steps
        return more > 0

    def _is_off(self, now: float) -> bool:
        """Whether others, who have our record, reckon with more than 2 % too many of our samples or too few."""
        record = self.record
        reckoned = record.samples + record.rate * (now - self._began_s - record.clock_s)
        return abs(reckoned - self.samples) > self._bound

    @property
    def _presses(self) -> bool:
        """Whether what is pending is more than others reckon by themselves."""
        return self._off or "extra" in self._pending

    @property
    def _bound(self) -> float:
        return max(OFF * self.samples, OFF_BATCHES * self._batch)

    def _period_s(self) -> float:
        """Of progress that others can reckon. Those who come together would else say it together ever after."""
        size = self._table.size
        period_s = min(REFRESH_S * size * size, REFRESH_MOST_S) * (0.75 + self.record.id[0] / 512)
        return max(self._pause_s(), period_s)

    def _pause_s(self) -> float:
        return max(self._config.progress_period_s, PROGRESS_S_PER_MEMBER * self._table.size)

    def accused(self, now: float) -> bool:
        """Somebody doubts our present incarnation. Returns whether it is refuted now, rather than soon."""
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
        """A record of ours that is newer than ours, or counts more steps, comes from an earlier life: go on above it,
        and from its steps. Returns True once there were too many for that: some other process is living it now."""
        self._lives += 1
        incarnation = max(record.incarnation, self.record.incarnation) + 1
        if self._lives >= MAX_LIVES:  # two that add each other's counts to their own would double them without end
            self.announce(now, incarnation=incarnation, sequence=0)
            return self._lives == MAX_LIVES
        more = max(0, record.steps - self._earlier_steps)
        self._earlier_steps += more
        steps = self._pending.get("steps", self.record.steps) + more
        self.announce(now, incarnation=incarnation, sequence=0, steps=steps)
        return False

    def _settle(self) -> None:
        record, due_s = self.record, math.inf
        if self._pending:
            due_s = self._progress_s if self._presses else self._refresh_s
        if record.rate:  # if nothing more is made, others soon reckon with too much
            off_s = self._began_s + record.clock_s + (self.samples + self._bound - record.samples) / record.rate
            stopped_s = max(self._progress_s, self._meter.paused_s, min(off_s, self._refresh_s))
            due_s = min(due_s, stopped_s)
        self.due_s = self._reckon_s = due_s
        if self._accused:
            self.due_s = min(self.due_s, self._refuted_s + REFUTE_EVERY_S)
