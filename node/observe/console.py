"""The console output of one node: a live line, a JSONL log, and a closing table.

It has no thread or clock of its own: the node's driver calls ``tick`` a few times a second and passes the time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from gossip.errors import ConfigError
from node.observe import notices
from node.observe.figures import RATES, Reading, line_of, table_of
from node.terminal import plain_console

# Seconds between two lines, and between two rows of the log:
REWRITE_PERIOD_S = 0.25  # A line that a terminal rewrites, as fast as an eye can follow numbers.
LINE_PERIOD_S = 10.0  # A line in a file: 360 an hour.
ROW_PERIOD_S = 1.0  # A row of a young run. Members' own counts arrive as often.
SPARSE_PERIOD_S = 10.0  # A row of a long run: about 9,000 a day, 3 MB.
ROWS_PER_AGE = 60  # In between, the period of rows is a sixtieth of the time since the start.


class Console:
    """The live line on ``stream`` (rewritten on a terminal, a plain line every 10 s elsewhere) and the rows in ``log``.

    Rows are JSON objects with ``t`` (unix seconds), the node's ``id`` and ``event``: ``listening`` (with ``address``),
    ``progress``, ``final``, and the kinds that the node reports. A ``progress`` row comes every second in the first
    minute and every 10 s from ten minutes on. In between it comes after each sixtieth of the time since the start. If
    the log is renamed or removed (logrotate), a new file of that name begins. Output never stops training: a line or
    log that cannot be written is turned off, the log with one notice.

    Without a stream, notices go to Python's logging (:mod:`node.observe.notices`). With ``embedded`` no command shows
    them, so warnings appear even if the program has set up no logging.

    Raises :class:`ConfigError` when the log cannot be opened.
    """

    def __init__(
        self, now_s: float, node_id: str, address: str, *, log: Path | None = None, line: bool = True,
        stream: TextIO | None = None, embedded: bool = False,
    ) -> None:  # fmt: skip
        self._id = node_id
        self._embedded, self._closed = embedded, False
        self._stream: TextIO | None = (stream or sys.stderr) if line else None
        self._terminal = self._stream is not None and self._stream.isatty()
        self._line_period_s = REWRITE_PERIOD_S if self._terminal else LINE_PERIOD_S
        self.tick_period_s = min(ROW_PERIOD_S, self._line_period_s)  # The period at which to call tick.
        self._log = None if log is None else _Log.open(log)
        self._began_s = self._row_at_s = self._line_at_s = now_s  # Times of the start, the last row and the last line.
        self._rates = _Rates(now_s)
        self.write_event(now_s, "listening", f"Node {node_id[:8]} listens on {address}.", address=address)

    @classmethod
    def from_environment(cls, now_s: float, node_id: str, address: str, environment: Mapping[str, str]) -> Self:
        """Create the console from the variables that ``gossip run`` sets.

        ``GOSSIP_LOG`` names the log, and ``GOSSIP_PROGRESS`` is ``line`` or ``off``. Without ``GOSSIP_PROGRESS`` there
        is no line: a program that embeds a Node keeps its terminal and gets warnings only.
        """
        log = environment.get("GOSSIP_LOG")
        line = environment.get("GOSSIP_PROGRESS", "off") == "line"
        embedded = "GOSSIP_PROGRESS" not in environment
        return cls(now_s, node_id, address, log=Path(log) if log else None, line=line, embedded=embedded)

    def tick(self, now_s: float, read: Callable[[], Reading]) -> None:
        """Write the line and the row that are due; ``read`` is called only when one is."""
        # A clock set back must not silence the output until it has caught up, hence the absolute difference.
        row_period_s = min(max(ROW_PERIOD_S, (self._row_at_s - self._began_s) / ROWS_PER_AGE), SPARSE_PERIOD_S)
        is_row_due = self._log is not None and abs(now_s - self._row_at_s) >= row_period_s
        is_line_due = self._stream is not None and abs(now_s - self._line_at_s) >= self._line_period_s
        if not is_row_due and not is_line_due:
            return
        figures = self._with_rates(now_s, read())
        if is_row_due:
            self._row_at_s = now_s
            self._write_row(now_s, {"event": "progress", **figures})
        if is_line_due:
            self._line_at_s = now_s
            line = f"{self._id[:8]}  {line_of(figures)}"
            if self._terminal:
                width = shutil.get_terminal_size().columns - 1  # A full last column would wrap.
                self._print(f"\r{line[:width]}\x1b[K")
            else:
                self._print(f"{line}\n")

    def write_event(self, now_s: float, kind: str, sentence: str, **fields: Any) -> None:
        """Print a sentence at once with the node's id, and log it as a row."""
        self._write_row(now_s, {"event": kind, "sentence": sentence, **fields})
        shown = sentence if kind == "listening" else f"{self._id[:8]}  {sentence}"
        self._print(f"\r\x1b[K{shown}\n" if self._terminal else f"{shown}\n")
        if self._stream is None and not self._closed:
            notices.log(self._id, kind, sentence, self._embedded)

    def close(self, now_s: float, final: Reading) -> None:
        """Write the last row and this node's table; nothing is written afterwards."""
        figures = self._with_rates(now_s, final)
        self._write_row(now_s, {"event": "final", **figures})
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._stream is not None:
            self._print("\r\x1b[K" if self._terminal else "")
            if final["steps"]:  # A node that never trained has said why; a table of zeros would hide that.
                with contextlib.suppress(OSError, ValueError):
                    print_table(self._id, final, self._stream)
            self._stream = None
        self._closed = True

    def _with_rates(self, now_s: float, figures: Reading) -> Reading:
        return {**figures, **self._rates.update(now_s, figures)}

    def _write_row(self, now_s: float, row: dict[str, Any]) -> None:
        if self._log is None:
            return
        failure = self._log.write({"t": round(now_s, 3), "id": self._id, **row})
        if failure is not None:
            path, self._log = self._log.path, None
            # Report it even where the line is off, since a missing log goes unnoticed.
            notice = f"The log {path} cannot be written ({failure}) and is off from here; training goes on."
            if self._stream is not None:
                self._print(f"{notice}\n")
            elif self._embedded:
                notices.log(self._id, "log", notice, True)
            else:
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(f"{notice}\n")

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # The terminal is gone, or the script closed stderr.
            self._stream = None


class _Rates:
    """Transfer rates in MB/s over windows of about a second, so that the line does not flicker between 0 and 40."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._counts = dict.fromkeys([figure.rate_of for figure in RATES], 0)
        self._rates = {figure.name: 0.0 for figure in RATES}

    def update(self, now_s: float, row: Reading) -> dict[str, float]:
        """Return the rates by name, computed anew if a window of ``ROW_PERIOD_S`` has passed."""
        passed_s = now_s - self._since_s
        if abs(passed_s) >= ROW_PERIOD_S:
            if passed_s > 0:
                scale = 1e-6 / passed_s  # From bytes to MB per second.
                for figure in RATES:
                    growth = max(0, row[figure.rate_of] - self._counts[figure.rate_of])  # A restart counts anew.
                    self._rates[figure.name] = round(growth * scale, 3)
            self._since_s, self._counts = now_s, {name: row[name] for name in self._counts}
        return self._rates


class _Log:
    """A file of JSON lines, each appended by one write, so that a kill costs at most one row."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def open(cls, path: Path) -> _Log:
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":  # An earlier run was killed inside its last row.
                os.write(handle, b"\n")
        except OSError as error:
            raise ConfigError(f"The log {path} cannot be opened ({error.strerror}): name another file.") from None
        return cls(path, handle)

    def write(self, row: Mapping[str, Any]) -> str | None:
        """Write a row; return None, or the reason why that failed."""
        # JSON has no NaN, so a diverged loss becomes null.
        not_finite = {key: None for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        text = json.dumps({**row, **not_finite}, separators=(",", ":"), allow_nan=False)
        data = (text + "\n").encode()
        self._reopen_if_rotated()
        try:
            if os.write(self._handle, data) != len(data):  # The disk filled up in the middle of a row.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.close()
            return error.strerror or "unknown"
        return None

    def _reopen_if_rotated(self) -> None:
        """Reopen the log if its name no longer leads to this file, because it was rotated.

        Devices are not checked. If the name cannot be opened, rows go on into the old file.
        """
        ours = os.fstat(self._handle)
        if not stat.S_ISREG(ours.st_mode):
            return
        with contextlib.suppress(OSError, ConfigError):
            if not self.path.exists() or not os.path.samestat(self.path.stat(), ours):
                fresh = _Log.open(self.path)
                os.close(self._handle)
                self._handle = fresh._handle

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)


def print_table(node_id: str, final: Reading, stream: TextIO) -> None:
    """Print this node's whole run as a table of two columns."""
    from rich.table import Table  # Imported here: it takes 50 ms that only a table is worth.

    table = Table(title=f"node {node_id[:8]}", show_header=False, title_justify="left")
    for row in table_of(final):
        table.add_row(*row)
    plain_console(stream).print(table)
