"""The swarm as one node sees it: a row per member, and the history of loss and distance. Nothing here waits."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from node.observe.figures import SHOWN_ROWS

__all__ = ["Curve", "SwarmPicture", "number"]

MAX_ROWS = 256  # Members shown: a longer page is unreadable, and takes 64 KiB to send each second.
MAX_CURVES = 64  # Members whose losses are kept: 20 kB each.
MAX_POINTS = 512  # Points of one curve: the columns of a chart on a telephone.
OLD_S = 6.0  # Seconds since its last answer after which a row is old: two queries went unanswered.
MAX_CHARACTERS = 40  # Characters of a version, a codec or a reason that are shown.
PACE_S = 10.0  # The window for samples per second: steps may take seconds, and exchanges change the swarm's count.


@dataclass(slots=True)
class Curve:
    """A curve of bounded length. When it is full, every second point is dropped and the sampling rate halves."""

    points: list[tuple[float | None, ...]] = field(default_factory=list)
    stride: int = 1
    skipped: int = 0

    def add(self, *point: float | None) -> None:
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        self.points.append(point)
        if len(self.points) >= MAX_POINTS:
            del self.points[1::2]
            self.stride *= 2


@dataclass(slots=True)
class MemberAnswer:
    """A member's last answer, checked, and its time."""

    at: float  # On the clock of time.monotonic.
    row: dict[str, Any]
    sent_mb_s: float | None = None  # MB/s since the answer before.
    received_mb_s: float | None = None
    samples_s: float | None = None  # Samples per second since then.


class Pace:
    """The growth rate of a count over the last ``PACE_S``."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, float]] = deque()

    def add(self, now: float, count: float | None) -> float | None:
        """Record a count; return its growth per second, or None if that is unknown or the count restarted."""
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
    """The swarm as the member ``me`` sees it. Times are on the clock of time.monotonic."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.rows: list[dict[str, Any]] = []
        self.hidden = 0  # Members beyond ``MAX_ROWS``.
        self.answers: dict[PeerId, MemberAnswer] = {}
        self.queried_at: dict[PeerId, float] = {}  # The time of the last query to each member.
        self.losses: dict[PeerId, Curve] = {}
        # (unix seconds, consensus distance, MB/s up, MB/s down, samples per second of this node and of the swarm)
        self.own_curve = Curve()
        self.paces = Pace(), Pace()  # For this node's samples and for the swarm's.

    # -- members and this node -------------------------------------------------------------------------------------
    def update(self, members: Iterable[tuple[MemberRecord, MemberState]], own: Mapping[str, Any], now: float) -> None:
        """Record the members that this node knows and its own figures, as in a status; call it about once a second."""
        self.on_answer(self.me, own, now)
        mine = self.answers[self.me]
        counts = mine.row["samples"], mine.row["swarm_samples"]
        paces = [pace.add(now, count) for pace, count in zip(self.paces, counts, strict=True)]
        mine.samples_s = paces[0]
        order = {MemberState.ALIVE: 0, MemberState.SUSPECT: 1, MemberState.DEAD: 2, MemberState.LEFT: 3}
        found = sorted(members, key=lambda one: (one[0].id != self.me, order[one[1]], one[0].id))
        self.hidden = max(0, len(found) - MAX_ROWS)
        del found[MAX_ROWS:]
        self.rows = [self.row(record, state, now) for record, state in found]
        here = {record.id for record, _ in found}
        for known in (self.answers, self.queried_at, self.losses):
            for gone in known.keys() - here:
                del known[gone]
        for record, _ in found[:MAX_CURVES]:
            self.add_loss(record)
        distance = mine.row["consensus_distance"]
        self.own_curve.add(round(time.time(), 1), distance, mine.sent_mb_s, mine.received_mb_s, *paces)

    def add_loss(self, record: MemberRecord) -> None:
        """Add the member's loss to its curve, if it has trained since the last point."""
        progress = self.progress(record)
        steps, loss = progress["steps"], progress["loss"]
        if loss is None:
            return
        line = self.losses.setdefault(record.id, Curve())
        if line.points and (line.points[-1][0] or 0) > steps:  # The member has restarted and counts its steps from 0.
            line = self.losses[record.id] = Curve()
        if not line.points or line.points[-1][0] != steps:
            line.add(steps, loss)

    def progress(self, record: MemberRecord) -> dict[str, Any]:
        """Return a member's steps, samples and loss.

        They come from its last answer, which counts only this life, as its other figures do. Without an answer they
        come from its record, which counts all its lives.
        """
        answer = self.answers.get(record.id)
        figures = {"steps": record.steps, "samples": record.samples, "loss": number(record.loss)}
        if answer is not None and None not in (answer.row["steps"], answer.row["samples"]):
            figures = {name: answer.row[name] for name in figures}
        return figures

    def row(self, record: MemberRecord, state: MemberState, now: float) -> dict[str, Any]:
        """Return the row of one member, from its record and its last answer."""
        answer = self.answers.get(record.id)
        return {
            "address": None if record.address is None else str(record.address), "ready": record.ready,
            **({} if answer is None else answer.row), **self.progress(record),
            "id": record.id.hex(), "state": state.value, "self": record.id == self.me,
            "mb_s_sent": None if answer is None else answer.sent_mb_s,
            "mb_s_received": None if answer is None else answer.received_mb_s,
            "samples_s": None if answer is None else answer.samples_s,
            "answered_s": None if answer is None else round(now - answer.at, 1),
            "old": state in (MemberState.DEAD, MemberState.SUSPECT) or (
                answer is not None and now - answer.at > OLD_S and self.queried_at.get(record.id, 0.0) > answer.at
            ),
        }  # fmt: skip

    # -- answers of members ----------------------------------------------------------------------------------------
    def on_answer(self, peer: PeerId, metrics: Mapping[str, Any], now: float) -> None:
        """Record a member's own figures. Only their shape can be checked."""
        row = row_of(metrics)
        before, answer = self.answers.get(peer), MemberAnswer(now, row)
        if before is not None and now > before.at:
            passed_s = now - before.at
            answer.sent_mb_s = rate(before.row["bytes_sent"], row["bytes_sent"], passed_s)
            answer.received_mb_s = rate(before.row["bytes_received"], row["bytes_received"], passed_s)
            answer.samples_s = rate(before.row["samples"], row["samples"], passed_s, 1.0)
        self.answers[peer] = answer

    def take_next_queries(self, count: int, now: float) -> list[tuple[PeerId, str]]:
        """Return dialable live members, the ones queried longest ago first, and count them as queried now."""
        can = [
            (PeerId(bytes.fromhex(row["id"])), row["address"]) for row in self.rows
            if row["address"] and row["state"] in ("alive", "suspect") and not row["self"]
        ]  # fmt: skip
        can.sort(key=lambda one: self.queried_at.get(one[0], -math.inf))
        for peer, _ in can[:count]:
            self.queried_at[peer] = now
        return can[:count]

    # -- data for a page -------------------------------------------------------------------------------------------
    def history(self) -> dict[str, Any]:
        """Return the data that a page begins with."""
        return {
            "losses": {peer.hex(): trace.points for peer, trace in self.losses.items()},
            "own": self.own_curve.points,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return the data that a page gets once a second."""
        return {"members": self.rows, "hidden": self.hidden, "own": self.own_curve.points[-1:]}


def row_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that a page shows, with invalid values replaced."""
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
    return [one for one in given[:SHOWN_ROWS] if isinstance(one, tuple | list) and len(one) >= 3]


def number(value: Any) -> float | int | None:
    """Return a number that JSON can hold and a chart can draw; None for any other value."""
    if type(value) is int:
        return value if abs(value) < 2**53 else None
    return value if type(value) is float and math.isfinite(value) else None


def text(value: Any) -> str:
    return value[:MAX_CHARACTERS] if isinstance(value, str) and value.isprintable() else ""


def rate(before: float | None, after: float | None, passed_s: float, unit: float = 1e6) -> float | None:
    """Return the growth in units per second, MB/s for bytes; None if the count restarted."""
    if before is None or after is None or after < before:
        return None
    return round((after - before) / passed_s / unit, 4)
