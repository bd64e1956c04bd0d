"""The timeline of one node: its training loop, its exchanges and its events, as spans of a writer's file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossip.timeline.writer import TimelineWriter

__all__ = ["NodeTimeline"]

LOOP, EVENTS = "training loop", "events"
NOTED_S = 0.001  # A call of step() without a visit to the boundary is a span of its own if it takes longer.
TRACKS = 64  # Most tracks for simultaneous exchanges; further ones share the last track.


class NodeTimeline:
    """The spans of one node in a timeline. Times are in seconds, on one clock.

    The training thread calls :meth:`stepped` and :meth:`spent`, another thread the rest.

    Args:
        writer: The file, which several nodes may share.
        process: The node's number in the file.
        name: The node's name in the picture.
    """

    def __init__(self, writer: TimelineWriter, process: int, name: str) -> None:
        self.writer, self.number = writer, process
        self.since: float | None = None  # The end of the loop's last span.
        self.busy_until: list[float] = []  # By track of exchanges, the end of its last span.
        writer.process(process, name)

    # -- the training thread ---------------------------------------------------------------------------------------
    def stepped(self, steps: int, begin_s: float, end_s: float, **visit: Any) -> None:
        """Record a call of ``step()``, and the computation since the call before.

        Args:
            steps: The number of steps so far.
            begin_s: The time at which the loop called ``step()``.
            end_s: The time at which the call returned.
            **visit: Figures of the visit to the step boundary; none if the call made no visit.
        """
        if self.since is not None:
            self.writer.span(self.number, LOOP, "train", self.since, begin_s, step=steps)
        if visit or end_s - begin_s > NOTED_S:
            self.writer.span(self.number, LOOP, "boundary", begin_s, end_s, step=steps, **visit)
        self.since = end_s

    def spent(self, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Record time that the loop spends otherwise: to join, to settle, to save."""
        self.writer.span(self.number, LOOP, name, begin_s, end_s, **args)
        self.since = end_s

    def visited(self, at_s: float, **visit: Any) -> None:
        """Record a visit to the step boundary that takes no time, as in a simulation."""
        self.writer.instant(self.number, LOOP, "boundary", at_s, **visit)

    def copied(self, name: str, begin_s: float, end_s: float, size_bytes: int) -> None:
        """Record a copy between a device and its host, on the track ``name``, which has one copy at a time."""
        self.writer.span(self.number, name, name, begin_s, end_s, bytes=size_bytes)

    # -- exchanges and events --------------------------------------------------------------------------------------
    def exchanged(
        self, session: int, sides: Sequence[str], asked_s: float, begun_s: float | None, end_s: float, reason: str = "",
        **args: Any,
    ) -> None:  # fmt: skip
        """Record an exchange that has ended.

        Args:
            session: Its number, the same on all sides.
            sides: The ids of all sides, this node's first.
            asked_s: The time at which it asked for a snapshot.
            begun_s: The time at which its streams began; None if they never did.
            end_s: The time of its end.
            reason: The reason of its failure; empty if it was applied.
            **args: Further figures.
        """
        track, others = self.track(asked_s, end_s), " and ".join(side[:8] for side in sides[1:]) or "no member"
        name = f"{'failed: ' + reason if reason else 'exchange'} with {others}"
        self.writer.span(self.number, track, name, asked_s, end_s, **args)
        if begun_s is None:
            return
        shared = f"{session:x}-" + "-".join(sorted(side[:8] for side in sides))
        self.writer.span(self.number, track, "streams", begun_s, end_s, exchange=shared)
        if not reason and len(sides) == 2:
            arrives = sides[0] > sides[1]
            self.writer.arrow(self.number, track, shared, end_s if arrives else begun_s, arrives)

    def happened(self, name: str, at_s: float, **args: Any) -> None:
        """Record an event without a duration."""
        self.writer.instant(self.number, EVENTS, name, at_s, **args)

    def track(self, begin_s: float, end_s: float) -> str:
        """Return a track that is free at ``begin_s``, or the last one if all tracks are in use."""
        for number, until in enumerate(self.busy_until):
            if until <= begin_s:
                self.busy_until[number] = end_s
                return f"exchanges {number + 1}"
        if len(self.busy_until) < TRACKS:
            self.busy_until.append(end_s)
        return f"exchanges {len(self.busy_until)}"
