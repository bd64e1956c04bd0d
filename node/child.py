"""One process of a swarm on this machine: its state, by what its node has logged and printed."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.observe.figures import line_of

TAIL_BYTES = 65_536  # Bytes read from the end of a child's output, enough for its last lines.
LINES_BYTES = 1 << 20  # Bytes read from one output at a time.


@dataclass(slots=True)
class LoggedNode:
    """A Node of a script, as its log shows it."""

    id: str | None  # 32 hexadecimal digits; None in a log without ids.
    address: str  # The address on which it listens.
    figures: dict[str, Any] = field(default_factory=dict)  # Its last progress row.
    settled: dict[str, Any] | None = None  # The row of its last node.settle; None if it has trained on since.
    has_ended: bool = False

    def read(self, row: dict[str, Any]) -> None:
        """Note what a row says."""
        if row["event"] == "settled":
            self.settled = row
        elif row["event"] in ("progress", "final"):
            self.figures, self.has_ended = row, row["event"] == "final"
            if self.settled is not None and row["steps"] > self.settled["steps"]:
                self.settled = None


@dataclass(slots=True)
class Child:
    """One node: its process, and what its log has said so far."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path  # JSON lines, see docs/cli.md.
    out: Path
    err: Path
    nodes: list[LoggedNode] = field(default_factory=list)  # The Nodes of its script: the first is the node itself.
    status_text: str = ""  # Its last report before it trains.
    started_s: float = field(default_factory=lambda: time.monotonic())
    start_s: float | None = None  # Seconds from its start until it listened; None until then.
    was_told_to_end: bool = False  # Its exit code is then no error.
    _read_bytes: int = 0  # Bytes of ``log`` that were returned as rows.
    _printed_bytes: int = 0  # Bytes of ``out`` that were returned as lines.

    @property
    def code(self) -> int | None:
        """Return the exit code: None while it runs, and 128 + n after signal n, as in a shell."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def address(self) -> str | None:
        """Return the address on which it listens; None until it does."""
        return self.nodes[0].address if self.nodes else None

    @property
    def figures(self) -> dict[str, Any]:
        """Return its last progress row; empty before the first."""
        return self.nodes[0].figures if self.nodes else {}

    @property
    def printed(self) -> str:
        """Return the last 64 KB of what its script wrote to stdout."""
        return tail(self.out)

    def new_lines(self) -> list[str]:
        """Return the lines printed since the last call; an unfinished line only once the node has ended."""
        has_ended = self.code is not None
        with self.out.open("rb") as file:
            file.seek(self._printed_bytes)
            data = file.read(LINES_BYTES)
        is_full = len(data) == LINES_BYTES  # More may follow.
        if is_full or not has_ended:
            # A line longer than one read is returned in parts.
            data = data[: data.rfind(b"\n") + 1] or (data if is_full else b"")
        self._printed_bytes += len(data)
        lines = data.decode(errors="replace").removesuffix("\n").split("\n") if data else []
        # A progress bar rewrites its line: keep what follows the last carriage return, as a terminal does.
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the log rows since the last call, whole lines only."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole_lines)
        rows = [json.loads(line) for line in whole_lines.splitlines() if line]
        for row in rows:
            self.read(row)
        return rows

    def read(self, row: dict[str, Any]) -> None:
        """Note what a row of the log says. A script with several Nodes has one log for all."""
        event = row["event"]
        node = next((node for node in self.nodes if node.id == row.get("id")), None)
        if event == "listening":
            # It takes its own earlier place, or that of a Node that has ended, as it takes its port.
            replaced = node or next((other for other in self.nodes if other.has_ended), None)
            place = next((place for place, other in enumerate(self.nodes) if other is replaced), None)
            new = LoggedNode(row.get("id"), row["address"])
            if place is None:
                self.nodes.append(new)
            else:
                self.nodes[place] = new
        elif node is not None:
            node.read(row)
        if self.nodes and self.nodes[0].id == row.get("id"):
            if event == "listening":
                self.start_s = time.monotonic() - self.started_s
                self.status_text = f"listens on {self.address}, and looks for weights"
            elif event in ("started", "joined", "merging", "merged", "finished"):
                self.status_text = row["sentence"]

    def line(self) -> str:
        """Return the node's state as one line of text."""
        code = self.code
        ending = "" if code is None else f"  ended with code {code}"
        if self.figures.get("steps"):
            return f"node {self.number}  {line_of(self.figures)}{ending}"
        return f"node {self.number}{ending or '  ' + self.start_text()}"

    def start_text(self) -> str:
        """Return what the node does before its first step, which may take minutes on a busy machine."""
        passed_s = time.monotonic() - self.started_s
        if not self.status_text:
            return f"starting: no Node yet, {passed_s:.0f} s so far"
        members = self.figures.get("members_alive", 0)  # 0: the node has logged no figures yet.
        if not members:
            return self.status_text
        here = f"{members} members are here" if members > 1 else "No other member is here"
        return f"{self.status_text} {here}; no step yet, {passed_s:.0f} s so far"

    def signal(self, number: int) -> None:
        """Send a signal to its process group: the process and all that it started."""
        if self.process.poll() is None:
            self.was_told_to_end = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a text file."""
    return [line for line in tail(path).splitlines() if line.strip()][-count:]
