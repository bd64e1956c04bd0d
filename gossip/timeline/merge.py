"""A merge of several nodes' timelines into one, with their clocks aligned by the exchanges that they share.

Both sides of an exchange begin their streams within a latency of each other and end them together, so half the sum of
the differences at both ends estimates the difference of two clocks, as NTP does. The median over all exchanges of a
pair of nodes is robust against delayed ones.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossip.errors import ConfigError

__all__ = ["Merged", "merge", "read_timeline"]

Event = dict[str, Any]


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
    if out.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"{out} is one of the timelines to merge: name another file for the result.")
    files = [read_timeline(path) for path in paths]
    shifts = clock_shifts(files)
    merged: list[Event] = []
    for number, (events, shift) in enumerate(zip(files, shifts, strict=True)):
        numbers = {pid: number * 100_000 + pid for pid in sorted({event["pid"] for event in events})}
        for event in events:
            moved = event | {"pid": numbers[event["pid"]]}
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
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "it is not text")
        raise ConfigError(f"Cannot read the timeline {path}: {why}.") from error
    events: list[Event] = []
    fault = ConfigError(f"{path} is no timeline: give files that --trace has written.")
    if not lines or lines[0] != "[":
        raise fault
    for number, line in enumerate(lines[1:], 2):
        if line == "]":
            break
        try:
            event = json.loads(line.removesuffix(","))
        except ValueError as error:
            if number == len(lines):
                break
            raise fault from error
        whole = isinstance(event, dict) and isinstance(event.get("pid"), int)
        if not whole or not isinstance(event.get("ts", 0.0), int | float):
            raise fault
        events.append(event)
    return events


def clock_shifts(files: Sequence[Sequence[Event]]) -> list[float | None]:
    """Return the microseconds to add to the times of each file; None for a file that keeps its clock.

    From the first file on, each file whose clock is known gives the clocks of those that share exchanges with it.
    """
    seen = [stream_times(events) for events in files]
    shifts: list[float | None] = [0.0, *[None] * (len(files) - 1)]
    reached = [0]
    while reached:
        here = reached.pop(0)
        for other in range(len(files)):
            shared = [] if shifts[other] is not None else sorted(seen[here].keys() & seen[other].keys())
            if shared:
                apart = [sum(seen[here][one]) / 2 - sum(seen[other][one]) / 2 for one in shared]
                shifts[other] = (shifts[here] or 0.0) + statistics.median(apart)
                reached.append(other)
    return shifts


def stream_times(events: Sequence[Event]) -> Mapping[str, tuple[float, float]]:
    """Return when the streams of each exchange began and ended, in microseconds, by the exchange's name."""
    found: dict[str, tuple[float, float]] = {}
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        name = event.get("args", {}).get("exchange") if event.get("name") == "streams" else None
        if isinstance(name, str):
            found[name] = event["ts"], event["ts"] + event.get("dur", 0.0)
            counts[name] += 1
    return {name: both for name, both in found.items() if counts[name] == 1}  # A simulator's file has both sides.
