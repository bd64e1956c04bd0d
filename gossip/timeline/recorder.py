"""The timeline of one node: spans of its training loop, its exchanges and its events, in a writer's file.

A *process* is a row of the picture with a name, here a node. A *span* is a bar, from one time to another, on a *track*
of the process: a line of bars that do not overlap or that nest.
"""

from collections.abc import Sequence
from typing import Any

from gossip.timeline.writer import US, TimelineWriter

LOOP, EVENTS = "training loop", "events"
MIN_CALL_S = 0.001  # A call of step() without a visit to the boundary is a span of its own if it takes longer.
MAX_TRACKS = 64  # Most tracks for simultaneous exchanges; further ones share the last track.


class NodeTimeline:
    """The spans of one node in a timeline. Times are in seconds, on one clock.

    The training thread calls :meth:`record_step` and :meth:`record_time`, another thread the rest.

    Args:
        writer: The file, which several nodes may share.
        process: The node's number in the file.
        name: The node's name in the picture; empty if it is set later.
    """

    def __init__(self, writer: TimelineWriter, process: int, name: str = "") -> None:
        self.writer, self.number = writer, process
        self.last_span_end: float | None = None  # The end of the loop's last span; None before the first.
        self.busy_until: list[float] = []  # The end of the last span of each track of exchanges.
        if name:
            self.set_name(name)

    def set_name(self, name: str) -> None:
        self.writer.name(self.number, 0, "process_name", name=name)

    def record_span(self, track: str, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Record a span; ``args`` are shown when it is selected."""
        self.writer.write(self.number, track, "X", name, begin_s, dur=max(0.0, end_s - begin_s) * US, args=args)

    # -- the training thread ---------------------------------------------------------------------------------------
    def record_step(self, steps: int, begin_s: float, end_s: float, **visit: Any) -> None:
        """Record a call of ``step()``, and the computation since the call before.

        Args:
            steps: The number of steps so far.
            begin_s: The time at which the loop called ``step()``.
            end_s: The time at which the call returned.
            **visit: Figures of the visit to the step boundary; none if the call made no visit.
        """
        if self.last_span_end is not None:
            self.record_span(LOOP, "train", self.last_span_end, begin_s, step=steps)
        if visit or end_s - begin_s > MIN_CALL_S:
            self.record_span(LOOP, "boundary", begin_s, end_s, step=steps, **visit)
        self.last_span_end = end_s

    def record_time(self, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Record time that the loop spent on something other than steps: to join, to settle, to save."""
        self.record_span(LOOP, name, begin_s, end_s, **args)
        self.last_span_end = end_s

    def record_visit(self, at_s: float, **visit: Any) -> None:
        """Record a visit to the step boundary that takes no time, as in a simulation."""
        self.record_event("boundary", at_s, LOOP, **visit)

    # -- exchanges and events --------------------------------------------------------------------------------------
    def record_exchange(
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
        track, others = self.take_track(asked_s, end_s), " and ".join(side[:8] for side in sides[1:]) or "no member"
        name = f"{'failed: ' + reason if reason else 'exchange'} with {others}"
        self.record_span(track, name, asked_s, end_s, **args)
        if begun_s is None:
            return
        shared_name = f"{session:x}-" + "-".join(sorted(side[:8] for side in sides))  # The same on all sides.
        self.record_span(track, "streams", begun_s, end_s, exchange=shared_name)
        if not reason and len(sides) == 2:
            arrives = sides[0] > sides[1]  # The arrow leads from the side with the smaller id to the other one.
            kind, at_s, ends = ("f", end_s, {"bp": "e"}) if arrives else ("s", begun_s, {})
            self.writer.write(self.number, track, kind, "exchange", at_s, cat="exchange", id=shared_name, **ends)

    def record_event(self, name: str, at_s: float, track: str = EVENTS, **args: Any) -> None:
        """Record an event without a duration."""
        self.writer.write(self.number, track, "i", name, at_s, s="t", args=args)

    def take_track(self, begin_s: float, end_s: float) -> str:
        """Take a track from ``begin_s`` to ``end_s``, the last one if all are in use, and return its name."""
        for number, until in enumerate(self.busy_until):
            if until <= begin_s:
                self.busy_until[number] = end_s
                return f"exchanges {number + 1}"
        if len(self.busy_until) < MAX_TRACKS:
            self.busy_until.append(end_s)
        return f"exchanges {len(self.busy_until)}"
