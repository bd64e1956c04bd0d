"""The swarm as one node sees it: a row for every member, and what became of loss and distance. Nothing of it waits."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from node.observe.figures import SHOWN

__all__ = ["Curve", "SwarmPicture", "number"]

ROWS = 256  # members that are shown: a page of more is read by nobody, and 64 KiB to send once a second
TRACED = 64  # of them whose losses are kept: 20 kB each
POINTS = 512  # of one line: as many as a chart has columns on a telephone
OLD_S = 6.0  # without an answer, after which a row is old: two questions went unanswered
NAMED = 40  # characters of a version
PACE_S = 10.0  # over which samples a second are told: steps may take seconds, and exchanges move the swarm's count


@dataclass(slots=True)
class Curve:
    """A line of at most so many points: where it is full every second one goes, and from then on half as many come."""

    points: list[tuple[float | None, ...]] = field(default_factory=list)
    stride: int = 1
    skipped: int = 0

    def add(self, *point: float | None) -> None:
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        self.points.append(point)
        if len(self.points) >= POINTS:
            del self.points[1::2]
            self.stride *= 2


@dataclass(slots=True)
class Answered:
    """What a member last said of itself, checked, and when."""

    at: float  # on the clock of time.monotonic
    row: dict[str, Any]
    sent: float | None = None  # MB/s since what it said before
    received: float | None = None
    samples_s: float | None = None  # samples a second since then


class Pace:
    """How fast a count grows, over the last ``PACE_S``."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, float]] = deque()

    def add(self, now: float, count: float | None) -> float | None:
        """Note a count; returns how much it grows a second, None where that is not known or it began anew."""
        if count is None or (self.seen and count < self.seen[-1][1]):
            self.seen.clear()
        if count is None:
            return None
        self.seen.append((now, count))
        while len(self.seen) > 2 and self.seen[1][0] <= now - PACE_S:
            self.seen.popleft()
        since, before = self.seen[0]
        return round((count - before) / (now - since), 3) if now > since else None


class SwarmPicture:
    """``me``: whose it is. Times are on the clock of time.monotonic."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.rows: list[dict[str, Any]] = []
        self.hidden = 0  # members beyond those
        self.told: dict[PeerId, Answered] = {}
        self.asked: dict[PeerId, float] = {}  # whom, and when
        self.losses: dict[PeerId, Curve] = {}
        # (unix seconds, consensus distance, MB/s up, MB/s down, samples a second of this node and of the swarm)
        self.own = Curve()
        self.paces = Pace(), Pace()  # of this node's samples and of the swarm's

    # -- what is looked at -----------------------------------------------------------------------------------------
    def look(self, members: Iterable[tuple[MemberRecord, MemberState]], own: Mapping[str, Any], now: float) -> None:
        """Once a second or so: the members that this node knows of, and its own figures, as a status has them."""
        self.answered(self.me, own, now)
        mine = self.told[self.me]
        counts = mine.row["samples"], mine.row["swarm_samples"]
        paces = [pace.add(now, count) for pace, count in zip(self.paces, counts, strict=True)]
        mine.samples_s = paces[0]
        order = {MemberState.ALIVE: 0, MemberState.SUSPECT: 1, MemberState.DEAD: 2, MemberState.LEFT: 3}
        found = sorted(members, key=lambda one: (one[0].id != self.me, order[one[1]], one[0].id))
        self.hidden = max(0, len(found) - ROWS)
        del found[ROWS:]
        self.rows = [self.row(record, state, now) for record, state in found]
        here = {record.id for record, _ in found}
        for known in (self.told, self.asked, self.losses):
            for gone in known.keys() - here:
                del known[gone]
        for record, _ in found[:TRACED]:
            self.trace(record)
        self.own.add(round(time.time(), 1), mine.row["consensus_distance"], mine.sent, mine.received, *paces)

    def trace(self, record: MemberRecord) -> None:
        """Its loss of now, where it has trained since."""
        progress = self.progress(record)
        steps, loss = progress["steps"], progress["loss"]
        if loss is None:
            return
        line = self.losses.setdefault(record.id, Curve())
        if line.points and (line.points[-1][0] or 0) > steps:  # it has begun anew, and counts its steps from 0
            line = self.losses[record.id] = Curve()
        if not line.points or line.points[-1][0] != steps:
            line.add(steps, loss)

    def progress(self, record: MemberRecord) -> dict[str, Any]:
        """What it told when it was asked, which is of this life as its other figures are; else what its record says,
        which is of all its lives."""
        told = self.told.get(record.id)
        said = {"steps": record.steps, "samples": record.samples, "loss": number(record.loss)}
        if told is not None and None not in (told.row["steps"], told.row["samples"]):
            said = {name: told.row[name] for name in said}
        return said

    def row(self, record: MemberRecord, state: MemberState, now: float) -> dict[str, Any]:
        """One member: what its record says, and what it told when it was asked."""
        told = self.told.get(record.id)
        return {
            "address": None if record.address is None else str(record.address), "ready": record.ready,
            **({} if told is None else told.row), **self.progress(record),
            "id": record.id.hex(), "state": state.value, "self": record.id == self.me,
            "mb_s_sent": None if told is None else told.sent,
            "mb_s_received": None if told is None else told.received,
            "samples_s": None if told is None else told.samples_s,
            "answered_s": None if told is None else round(now - told.at, 1),
            "old": state in (MemberState.DEAD, MemberState.SUSPECT) or (
                told is not None and now - told.at > OLD_S and self.asked.get(record.id, 0.0) > told.at
            ),
        }  # fmt: skip

    # -- what others say -------------------------------------------------------------------------------------------
    def answered(self, peer: PeerId, metrics: Mapping[str, Any], now: float) -> None:
        """A member's own figures, of which nothing is believed but its shape."""
        row = row_of(metrics)
        before, told = self.told.get(peer), Answered(now, row)
        if before is not None and now > before.at:
            passed_s = now - before.at
            told.sent = rate(before.row["bytes_sent"], row["bytes_sent"], passed_s)
            told.received = rate(before.row["bytes_received"], row["bytes_received"], passed_s)
            told.samples_s = rate(before.row["samples"], row["samples"], passed_s, 1.0)
        self.told[peer] = told

    def next_to_ask(self, count: int, now: float) -> list[tuple[PeerId, str]]:
        """Members alive that can be dialled, those first who were asked the longest ago; they count as asked now."""
        can = [
            (PeerId(bytes.fromhex(row["id"])), row["address"]) for row in self.rows
            if row["address"] and row["state"] in ("alive", "suspect") and not row["self"]
        ]  # fmt: skip
        can.sort(key=lambda one: self.asked.get(one[0], -math.inf))
        for peer, _ in can[:count]:
            self.asked[peer] = now
        return can[:count]

    # -- what a page is told ---------------------------------------------------------------------------------------
    def history(self) -> dict[str, Any]:
        """What a page begins with."""
        return {
            "losses": {peer.hex(): trace.points for peer, trace in self.losses.items()},
            "own": self.own.points,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """What a page is told once a second."""
        return {"members": self.rows, "hidden": self.hidden, "own": self.own.points[-1:]}


def row_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "steps", "samples", "swarm_samples", "loss", "exchanges_done", "exchanges_failed", "bytes_sent",
        "bytes_received", "consensus_distance", "interval_steps",
    )  # fmt: skip
    row: dict[str, Any] = {name: number(metrics.get(name)) for name in names}
    for name in ("mixed", "failures"):
        row[name] = [[text(one[0]), text(one[1]), number(one[2])] for one in rows_of(metrics.get(name))]
    row["codec"] = text(metrics.get("codec"))
    row["version"] = text(metrics.get("version"))
    return row


def rows_of(value: Any) -> Iterable[Sequence[Any]]:
    given = value if isinstance(value, tuple | list) else ()
    return [one for one in given[:SHOWN] if isinstance(one, tuple | list) and len(one) >= 3]


def number(value: Any) -> float | int | None:
    """A number that JSON has and a chart can draw; None in the place of all else."""
    if type(value) is int:
        return value if abs(value) < 2**53 else None
    return value if type(value) is float and math.isfinite(value) else None


def text(value: Any) -> str:
    return value[:NAMED] if isinstance(value, str) and value.isprintable() else ""


def rate(before: float | None, after: float | None, passed_s: float, unit: float = 1e6) -> float | None:
    """How many units a second, of bytes MB/s; None where it began anew."""
    if before is None or after is None or after < before:
        return None
    return round((after - before) / passed_s / unit, 4)
