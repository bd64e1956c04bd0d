"""Timelines of steps and exchanges as Chrome trace events, which Perfetto and chrome://tracing show."""

from gossip.timeline.merge import merge
from gossip.timeline.recorder import NodeTimeline
from gossip.timeline.writer import TimelineWriter

__all__ = ["NodeTimeline", "TimelineWriter", "merge"]
