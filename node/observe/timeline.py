"""A node's timeline: where its steps and exchanges spend their time, as a file for Perfetto."""

import time
from pathlib import Path

from gossip.averaging.visit import Visit
from gossip.recent import Recent
from gossip.timeline import NodeTimeline, TimelineWriter
from node.model.snapshot import ModelState
from node.model.state import State
from node.observe import notices
from node.observe.events import ExchangeEvent, MemberEvent, NodeEvent
from node.observe.listeners import Listeners

MAX_STREAM_BEGINS = 1_024  # Exchanges that have begun and not ended; more than run at the same time.


class LoopTimeline:
    """The timeline of one node. Times in the file are unix time, so that the files of several nodes fit together.

    Args:
        path: The file to write.
        listeners: The source of the node's events.
        model: The model, whose copies between a GPU and the host are recorded.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path, listeners: Listeners, model: State) -> None:
        self.writer, self.listeners = TimelineWriter(path), listeners
        self.node = NodeTimeline(self.writer, 1)
        self.copies = model.record_copies() if isinstance(model, ModelState) else None
        self.me = ""  # This node's id, from the start on.
        self.visit: Visit | None = None  # The latest visit to the step boundary, until its span is written.
        self.stream_begins = Recent[int, float](MAX_STREAM_BEGINS)  # By session, when the streams began.

    def start(self, me: str) -> None:
        """Begin to record, under this id."""
        self.me = me
        self.node.set_name(f"node {me[:8]}")
        self.listeners.on("*", self.on_event)

    # -- the training thread ---------------------------------------------------------------------------------------
    def record_step(self, steps: int, seconds: float) -> None:
        """Record a call of ``step()`` that has just returned, after this many seconds."""
        now, visit, self.visit = time.time(), self.visit, None
        figures = {} if visit is None else figures_of(visit)
        self.node.record_step(steps, now - seconds, now, **figures)
        self.add_copies()

    def record_time(self, name: str, seconds: float) -> None:
        """Record this many seconds, which end now, that the loop spent on something other than steps."""
        now, self.visit = time.time(), None
        self.node.record_time(name, now - seconds, now)
        self.add_copies()

    def add_copies(self) -> None:
        """Record the copies that have ended meanwhile."""
        for copy in () if self.copies is None else self.copies.ended():
            track = f"{copy.device} to host" if copy.direction == "down" else f"host to {copy.device}"
            self.node.record_span(track, track, copy.begin_s, copy.end_s, bytes=copy.size_bytes)

    def close(self) -> None:
        """End the file; call it when the listeners are closed."""
        self.add_copies()
        failure, lost, path = self.writer.close(), self.writer.dropped, self.writer.path
        if failure is not None:
            text = f"The timeline {path} is incomplete, as it could not be written: {failure.strerror}."
        elif lost:
            text = f"The timeline {path} lacks its last {lost:,} events: it is full, or its disk is slow."
        else:
            return
        notices.log(self.me, "timeline", text, True)

    # -- the listeners' thread -------------------------------------------------------------------------------------
    def on_event(self, event: NodeEvent) -> None:
        """Record an event; an exchange becomes a span from its request for a snapshot to its end."""
        if not isinstance(event, ExchangeEvent):
            name = f"{event.id[:8]} {event.after}" if isinstance(event, MemberEvent) else event.kind
            self.node.record_event(name, event.at_s, text=str(event))
        elif event.kind == "exchange.begun":
            self.stream_begins[event.session] = event.at_s
        else:
            begun_s = self.stream_begins.pop(event.session, None)
            self.node.record_exchange(
                event.session, (self.me, *event.partners), event.at_s - event.seconds, begun_s, event.at_s,
                event.reason, codec=event.codec, bytes_sent=event.bytes_sent, bytes_received=event.bytes_received,
                distance=event.distance,
            )  # fmt: skip


def figures_of(visit: Visit) -> dict[str, int | bool]:
    """Return the figures of a visit that a timeline shows."""
    copies = len(visit.snapshots) + (visit.spare_copy is not None) + (visit.newcomers_copy is not None)
    return {"copies": copies, "updates": len(visit.updates), "replaced": visit.has_replaced}
