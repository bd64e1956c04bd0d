"""A merge of several nodes' timelines into one, with their clocks aligned by the exchanges that they share.

Both sides of an exchange begin their streams within a latency of each other and end them together. The difference of
their clocks is therefore estimated by the mean of two differences, at the beginning and at the end, as NTP does. The
median over all exchanges of a pair of nodes is robust against delayed ones.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossip.errors import ConfigError

Event = dict[str, Any]  # An event of the Trace Event Format; "ts" is its time in microseconds, "pid" its node.


class Merged(NamedTuple):
    """The result of a merge.

    Attributes:
        events: The number of events written.
        shifts_s: Seconds that were added to the clock of each file; None for a file that shares no exchange with the
            first one, directly or through others, and keeps its clock.
    """

    events: int
    shifts_s: tuple[float | None, ...]


def merge(paths: Sequence[Path], out: Path) -> Merged:
    """Merge timelines into one file.

    Args:
        paths: The files; the clock of the first one is kept.
        out: The file to write, which may be none of ``paths``.

    Raises:
        ConfigError: A file cannot be read or written, or is no timeline.
    """
    if not paths:
        raise ConfigError("There is no timeline to merge.")
    if out.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"{out} is one of the timelines to merge: name another file for the result.")
    files = [read_timeline(path) for path in paths]
    shifts = clock_shifts(files)
    merged: list[Event] = []
    nodes: dict[tuple[int, int], int] = {}  # The number in the merged file, by the file's and the node's in it.
    for number, (events, shift) in enumerate(zip(files, shifts, strict=True)):
        for event in events:
            moved = event | {"pid": nodes.setdefault((number, event["pid"]), len(nodes) + 1)}
            if "ts" in event and shift:
                moved["ts"] = event["ts"] + shift
            merged.append(moved)
    try:
        out.write_text("[\n" + ",\n".join(json.dumps(event, separators=(",", ":")) for event in merged) + "\n]\n")
    except OSError as error:
        raise ConfigError(f"Cannot write the timeline {out}: {error.strerror}.") from error
    return Merged(len(merged), tuple(None if shift is None else shift / 1e6 for shift in shifts))


def read_timeline(path: Path) -> list[Event]:
    """Read a timeline, up to its last whole event if its process was killed.

    Raises:
        ConfigError: The file cannot be read, or is no timeline.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not text")
        raise ConfigError(f"Cannot read the timeline {path}: {reason}.") from error
    if not text:
        return []  # The process was killed before it wrote the first events.
    if f"{text}\n".startswith("[\n"):
        # A killed process leaves no closing bracket, and may leave a part of its last event.
        for whole in (text, text + "]", text[: max(1, text.rfind(",\n"))] + "]"):
            try:
                events: list[Event] = json.loads(whole)
            except (ValueError, RecursionError):
                continue
            if all(map(is_event, events)):
                return events
            break
    raise ConfigError(f"{path} is no timeline: give files that --trace has written.")


def is_event(value: object) -> bool:
    """Return True for an event whose fields, as far as a merge reads them, are of the right kinds."""
    if not isinstance(value, dict) or not isinstance(value.get("args", {}), dict):
        return False
    has_times = all(is_time(value[name]) for name in ("ts", "dur") if name in value)
    return type(value.get("pid")) is int and has_times and ("ts" in value or value.get("name") != "streams")


def is_time(value: object) -> bool:
    """Return True for a number of microseconds; a larger one than a float's whole numbers is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def clock_shifts(files: Sequence[Sequence[Event]]) -> list[float | None]:
    """Return the microseconds to add to the times of each file; None for a file that keeps its clock.

    From the first file on, each file whose clock is known gives the clocks of those that share exchanges with it.
    """
    times = [stream_times(events) for events in files]
    shifts: list[float | None] = [0.0, *[None] * (len(files) - 1)]
    queue = [0]  # Files whose clock is known and whose neighbours have not been looked at.
    while queue:
        known = queue.pop(0)
        known_shift = shifts[known]
        assert known_shift is not None
        for other in [index for index, shift in enumerate(shifts) if shift is None]:
            shared = sorted(times[known].keys() & times[other].keys())
            if shared:
                differences = [sum(times[known][name]) / 2 - sum(times[other][name]) / 2 for name in shared]
                shifts[other] = known_shift + statistics.median(differences)
                queue.append(other)
    return shifts


def stream_times(events: Sequence[Event]) -> Mapping[str, tuple[float, float]]:
    """Return when the streams of each exchange began and ended, in microseconds, by the exchange's name."""
    times: dict[str, tuple[float, float]] = {}
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        name = event.get("args", {}).get("exchange") if event.get("name") == "streams" else None
        if isinstance(name, str):
            times[name] = event["ts"], event["ts"] + event.get("dur", 0.0)
            counts[name] += 1
    # An exchange that a file has twice is shared with no other file: a simulator's file has both sides.
    return {name: begin_and_end for name, begin_and_end in times.items() if counts[name] == 1}
