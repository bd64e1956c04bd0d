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
from typing import Any, TextIO

from gossip.errors import ConfigError

MAX_BYTES = 256_000_000  # About the size that Perfetto opens without a helper program.
MAX_QUEUED_EVENTS = 65_536  # Half a minute of a fast loop, for a slow disk. Further events are dropped and counted.
CLOSE_S = 5.0  # Patience for a slow disk at the end.
US = 1e6  # Microseconds in a second: the format's unit of time.


class TimelineWriter:
    """A file of trace events. Its methods may be called from any thread and never wait for the disk.

    Times are in seconds; a file's events may come in any order. An error while writing, such as a full disk, ends the
    timeline and nothing else: :meth:`close` returns it.

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, process: int, track: str, kind: str, name: str, at_s: float, **fields: Any) -> None:
        """Write an event on a track of a process. The track's name is written when it is first used."""
        with self.lock:
            is_new = (process, track) not in self.tracks
            number = self.tracks.setdefault((process, track), len(self.tracks) + 1)
        if is_new:
            self.name(process, number, "thread_name", name=track)
            self.name(process, number, "thread_sort_index", sort_index=number)
        self.queue_event({"ph": kind, "name": name, "ts": at_s * US, "pid": process, "tid": number} | fields)

    def name(self, process: int, thread: int, what: str, **args: Any) -> None:
        """Write metadata of a process, of its thread 0, or of one of its tracks."""
        self.queue_event({"ph": "M", "pid": process, "tid": thread, "name": what, "args": args})

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
