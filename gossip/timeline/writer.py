"""The writer of one timeline file.

The format is the JSON array of the Trace Event Format, whose closing bracket may be missing: a file that a killed
process leaves behind is readable up to its last whole event. An event's "ph" is its kind: "X" a span, "i" an instant,
"s" and "f" the start and the end of an arrow, "M" a name. Its "pid" and "tid" number the process and the track, and
"ts" and "dur" are its time and duration.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TextIO

from gossip.errors import ConfigError

__all__ = ["MAX_BYTES", "TimelineWriter"]

MAX_BYTES = 256_000_000  # About the size that Perfetto opens without a helper program.
MAX_QUEUED_EVENTS = 65_536  # Half a minute of a fast loop, for a slow disk. Further events are dropped and counted.
CLOSE_S = 5.0  # Patience for a slow disk at the end.
US = 1e6  # Microseconds in a second: the format's unit of time.


class TimelineWriter:
    """A file of trace events. Its methods may be called from any thread and never wait for the disk.

    A *process* is a row of the picture with a name, here a node; each of its *tracks* holds spans that do not overlap
    or that nest. Times are in seconds; a file's spans may come in any order. An error while writing, such as a full
    disk, ends the timeline and nothing else: :meth:`close` returns it.

    Args:
        path: The file to write; an existing one is overwritten.
        max_bytes: The size after which further events are counted and not written.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.bytes_left = path, max_bytes
        self.dropped = 0  # Number of events that were not written.
        self.failure: OSError | None = None
        self.tracks: dict[tuple[int, str], int] = {}  # Thread numbers by process and track.
        self.lock = threading.Lock()
        self.queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # Events to write; None ends the file.
        try:
            file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write the timeline {path}: {error.strerror}.") from error
        self.thread = threading.Thread(target=self.write_events, args=(file,), name="gossip-timeline", daemon=True)
        self.thread.start()

    def __enter__(self) -> TimelineWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    def name_process(self, number: int, name: str) -> None:
        """Write the name of a process."""
        self.queue_event({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})

    def write_span(self, process: int, track: str, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Write a span; ``args`` are shown when it is selected."""
        event = {"ph": "X", "name": name, "ts": begin_s * US, "dur": max(0.0, end_s - begin_s) * US}
        self.queue_event(event | self.track_numbers(process, track) | {"args": args})

    def write_instant(self, process: int, track: str, name: str, at_s: float, **args: Any) -> None:
        """Write a mark without a duration."""
        self.queue_event(
            {"ph": "i", "s": "t", "name": name, "ts": at_s * US} | self.track_numbers(process, track) | {"args": args}
        )

    def write_arrow(self, process: int, track: str, name: str, at_s: float, arrives: bool) -> None:
        """Write one end of an arrow, inside a span of this track. Both ends have the same ``name``."""
        event = {"ph": "f", "bp": "e"} if arrives else {"ph": "s"}
        event |= {"name": "exchange", "cat": "exchange", "id": name}
        self.queue_event(event | {"ts": at_s * US} | self.track_numbers(process, track))

    def track_numbers(self, process: int, track: str) -> dict[str, int]:
        """Return the process and thread numbers of a track. Its name is written when it is first used."""
        with self.lock:
            known = self.tracks.get((process, track))
            number = self.tracks.setdefault((process, track), len(self.tracks) + 1)
        if known is None:
            metadata = {"ph": "M", "pid": process, "tid": number}
            self.queue_event(metadata | {"name": "thread_name", "args": {"name": track}})
            self.queue_event(metadata | {"name": "thread_sort_index", "args": {"sort_index": number}})
        return {"pid": process, "tid": number}

    def queue_event(self, event: dict[str, Any]) -> None:
        """Queue an event for the writing thread, or count it as dropped if the disk is too slow."""
        if self.queue.qsize() >= MAX_QUEUED_EVENTS:
            self.dropped += 1
        else:
            self.queue.put(event)

    def close(self) -> OSError | None:
        """Write the queued events, close the file, and return the first error of the disk, if there was one."""
        self.queue.put(None)
        self.thread.join(CLOSE_S)
        return self.failure

    def write_events(self, file: TextIO) -> None:
        """Write queued events until :meth:`close`, in a thread of its own. Flush whenever the queue is empty."""
        separator = "[\n"  # Goes in front of the next event: the array's bracket, and later a comma.
        try:
            with file:
                while (event := self.queue.get()) is not None:
                    text = json.dumps(event, separators=(",", ":"))
                    self.bytes_left -= len(text) + 2
                    if self.bytes_left < 0:
                        self.dropped += 1
                        continue
                    file.write(separator + text)
                    separator = ",\n"
                    if self.queue.empty():
                        file.flush()
                file.write(("[" if separator == "[\n" else "") + "\n]\n")
        except OSError as error:
            self.failure = error
            while self.queue.get() is not None:  # The queue must not grow.
                self.dropped += 1
