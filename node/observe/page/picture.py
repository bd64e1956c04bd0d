"""The swarm as one node sees it: a row per member, and the history of loss and distance. Nothing here waits."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from node.observe.status import rows_of

MAX_ROWS = 256  # Members shown: a longer page is unreadable, and takes 64 KiB to send each second.
MAX_CURVES = 64  # Members whose losses are kept: 20 kB each.
MAX_POINTS = 512  # Points of one curve: the columns of a chart on a telephone.
OLD_S = 6.0  # Seconds since its last answer after which a row is old: two queries went unanswered.
MAX_NUMBER = 1e100  # Size of a float that is shown: rates and axes of larger ones overflow.
MAX_CHARACTERS = 40  # Characters of a version, a codec or a reason that are shown.
PACE_S = 10.0  # The window of a pace: steps may take seconds, and exchanges change the swarm's count.


@dataclass(slots=True)
class Curve:
    """A curve of bounded length. When it is full, every second point is dropped and the sampling rate halves."""

    points: list[tuple[float | None, ...]] = field(default_factory=list)
    stride: int = 1  # Of each ``stride`` added points the last is kept.
    skipped: int = 0  # Points that were added since the last kept one.

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

    answered_at: float  # On the clock of time.monotonic.
    row: dict[str, Any]
    # Rates since the answer before: MB/s, and samples per second. None if they are not known.
    sent_mb_s: float | None = None
    received_mb_s: float | None = None
    samples_s: float | None = None


class Pace:
    """The growth rate of a count over the last ``PACE_S``; unknown before, when one large step would be a spike."""

    def __init__(self) -> None:
        self.readings: deque[tuple[float, float]] = deque()  # Time and count.

    def add(self, now: float, count: float | None) -> float | None:
        """Record a count; return its growth per second, or None if that is unknown or the count restarted."""
        if count is None or (self.readings and count < self.readings[-1][1]):
            self.readings.clear()
        if count is None:
            return None
        self.readings.append((now, count))
        while len(self.readings) > 2 and self.readings[1][0] <= now - PACE_S:
            self.readings.popleft()
        began_at, first_count = self.readings[0]
        return round((count - first_count) / (now - began_at), 3) if now >= began_at + PACE_S else None


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
        self.swarm_samples_s: float | None = None  # The newest pace of the swarm.
        self.run = b""  # The id of the run whose samples are counted.

    # -- members and this node -------------------------------------------------------------------------------------
    def update(
        self, members: Iterable[tuple[MemberRecord, MemberState]], own: Mapping[str, Any], now: float, run: bytes = b"",
        path_of: Callable[[PeerId], str | None] = lambda peer: None,
    ) -> None:  # fmt: skip
        """Record the members that this node knows and its own figures, as in a status; call it about once a second.

        ``run`` is the id of the run whose samples the figures count. Taking over another one's count is no training.
        ``path_of`` tells how a member is reached.
        """
        if run != self.run:
            self.paces, self.run = (Pace(), Pace()), run
        self.on_answer(self.me, own, now)
        own_answer = self.answers[self.me]
        counts = own_answer.row["samples"], own_answer.row["swarm_samples"]
        paces = [pace.add(now, count) for pace, count in zip(self.paces, counts, strict=True)]  # Samples per second.
        own_answer.samples_s, self.swarm_samples_s = paces
        order = {MemberState.ALIVE: 0, MemberState.SUSPECT: 1, MemberState.DEAD: 2, MemberState.LEFT: 3}
        # This node first, then by state and id.
        ranked = sorted(members, key=lambda pair: (pair[0].id != self.me, order[pair[1]], pair[0].id))
        self.hidden = max(0, len(ranked) - MAX_ROWS)
        del ranked[MAX_ROWS:]
        self.rows = [{**self.row(record, state, now), "link": path_of(record.id)} for record, state in ranked]
        shown = [record.id for record, _ in ranked]
        for by_member, limit in ((self.answers, MAX_ROWS), (self.queried_at, MAX_ROWS), (self.losses, MAX_CURVES)):
            for gone in by_member.keys() - set(shown[:limit]):
                del by_member[gone]
        for record, _ in ranked[:MAX_CURVES]:
            self.add_loss(record)
        distance = own_answer.row["consensus_distance"]
        self.own_curve.add(round(time.time(), 1), distance, own_answer.sent_mb_s, own_answer.received_mb_s, *paces)

    def add_loss(self, record: MemberRecord) -> None:
        """Add the member's loss to its curve, if it has trained since the last point."""
        progress = self.progress(record)
        steps, loss = progress["steps"], progress["loss"]
        if loss is None:
            return
        curve = self.losses.setdefault(record.id, Curve())
        if curve.points and (curve.points[-1][0] or 0) > steps:  # The member has restarted and counts its steps from 0.
            curve = self.losses[record.id] = Curve()
        if not curve.points or curve.points[-1][0] != steps:
            curve.add(steps, loss)

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
        queried_at = self.queried_at.get(record.id, 0.0)
        has_ignored_query = answer is not None and now - answer.answered_at > OLD_S and queried_at > answer.answered_at
        return {
            "address": None if record.address is None else str(record.address), "ready": record.ready,
            **({} if answer is None else answer.row), **self.progress(record),
            "id": record.id.hex(), "state": state.value, "self": record.id == self.me,
            "mb_s_sent": None if answer is None else answer.sent_mb_s,
            "mb_s_received": None if answer is None else answer.received_mb_s,
            "samples_s": None if answer is None else answer.samples_s,
            "answered_s": None if answer is None else round(now - answer.answered_at, 1),
            "old": state in (MemberState.DEAD, MemberState.SUSPECT) or has_ignored_query,
        }  # fmt: skip

    # -- answers of members ----------------------------------------------------------------------------------------
    def on_answer(self, peer: PeerId, metrics: Mapping[str, Any], now: float) -> None:
        """Record a member's own figures. Only their shape can be checked."""
        row = row_of(metrics)
        before, answer = self.answers.get(peer), MemberAnswer(now, row)
        if before is not None and now > before.answered_at:
            passed_s = now - before.answered_at
            answer.sent_mb_s = rate(before.row["bytes_sent"], row["bytes_sent"], passed_s)
            answer.received_mb_s = rate(before.row["bytes_received"], row["bytes_received"], passed_s)
            answer.samples_s = rate(before.row["samples"], row["samples"], passed_s, 1.0)
        self.answers[peer] = answer

    def take_next_queries(self, count: int, now: float) -> list[tuple[PeerId, str]]:
        """Return dialable live members, the ones queried longest ago first, and count them as queried now."""
        dialable = [
            (PeerId(bytes.fromhex(row["id"])), row["address"]) for row in self.rows
            if row["address"] and row["state"] in ("alive", "suspect") and not row["self"]
        ]  # fmt: skip
        dialable.sort(key=lambda pair: self.queried_at.get(pair[0], -math.inf))  # Members never queried come first.
        for peer, _ in dialable[:count]:
            self.queried_at[peer] = now
        return dialable[:count]

    # -- data for a page -------------------------------------------------------------------------------------------
    def history(self) -> dict[str, Any]:
        """Return the data that a page begins with."""
        return {
            "losses": {peer.hex(): curve.points for peer, curve in self.losses.items()},
            "own": self.own_curve.points,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return the data that a page gets once a second."""
        own = self.own_curve.points[-1:]
        return {"members": self.rows, "hidden": self.hidden, "own": own, "swarm_samples_s": self.swarm_samples_s}


def row_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that a page shows, with invalid values replaced."""
    names = (
        "steps", "samples", "swarm_samples", "loss", "exchanges_done", "exchanges_failed", "bytes_sent",
        "bytes_received", "consensus_distance", "interval_steps",
    )  # fmt: skip
    row: dict[str, Any] = {name: number(metrics.get(name)) for name in names}
    for name in ("mixed", "failures"):
        rows = rows_of(metrics.get(name))
        row[name] = [[text(member), text(label), number(value)] for member, label, value in rows]
    row["codec"] = text(metrics.get("codec"))
    row["version"] = text(metrics.get("version"))
    return row


def number(value: Any) -> float | int | None:
    """Return a number that JSON can hold and a chart can draw; None for any other value."""
    if type(value) is int:
        return value if abs(value) < 2**53 else None
    return value if type(value) is float and abs(value) < MAX_NUMBER else None


def text(value: Any) -> str:
    """Return a printable text, shortened; empty for any other value."""
    return value[:MAX_CHARACTERS] if isinstance(value, str) and value.isprintable() else ""


def rate(before: float | None, after: float | None, passed_s: float, unit: float = 1e6) -> float | None:
    """Return the growth in units per second, MB/s for bytes; None if the count restarted."""
    if before is None or after is None or after < before:
        return None
    return round((after - before) / passed_s / unit, 4)
