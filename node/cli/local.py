"""A swarm of processes on this machine, watched through the logs that they write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from gossip.errors import LocalError
from node.observe.figures import columns_of, line_of

__all__ = ["Child", "LocalSwarm", "Screen", "ending_on_signals", "free_port", "run_local"]

GRACE_S = 5.0  # between SIGTERM and SIGKILL; leaving a swarm takes under 2
POLL_PERIOD_S = 0.1
LINE_PERIOD_S = 10.0  # where there is no terminal to rewrite: 360 lines an hour of each node
PORT_TRIES = 3  # another program took the free port before our node did: rare once, never thrice
TAIL_BYTES = 65_536  # of a child's output, enough for its last lines
OUTPUT_LINES, ERROR_LINES = 3, 20  # shown of each child at the end
ROWS_BYTES = 1 << 20  # read of one log at a time: 4,000 rows


@dataclass(slots=True)
class Child:
    """One node: its process, and what its log has said so far."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path  # JSON lines, see node.progress
    out: Path
    err: Path
    address: str | None = None  # where it listens, once it says so
    figures: dict[str, Any] = field(default_factory=dict)  # its last progress row
    said: str = ""  # what it last said of itself, until it trains
    started_s: float = field(default_factory=lambda: time.monotonic())
    start_s: float | None = None  # how long it took until it listened
    _offset: int = 0

    @property
    def code(self) -> int | None:
        """None while it runs; 128 + n after signal n, as a shell has it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def new_rows(self) -> list[dict[str, Any]]:
        """The rows since the last call, whole lines only."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._offset)
                data = file.read(ROWS_BYTES)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = [json.loads(line) for line in whole.splitlines() if line]
        for row in rows:
            if row["event"] == "listening":
                self.address = row["address"]
                self.start_s = time.monotonic() - self.started_s
                self.said = f"listens on {self.address}, and looks for weights"
            elif row["event"] in ("started", "joined", "merging", "merged", "finished"):
                self.said = row["sentence"]
            elif row["event"] in ("progress", "final"):
                self.figures = row
        return rows

    def line(self) -> str:
        """As one line for a person."""
        code = self.code
        ended = "" if code is None else f"  ended with code {code}"
        if self.figures.get("steps"):
            return f"node {self.number}  {line_of(self.figures)}{ended}"
        return f"node {self.number}{ended or '  ' + self.beginning()}"

    def beginning(self) -> str:
        """What it does before its first step, which on a busy machine may take minutes."""
        passed_s = time.monotonic() - self.started_s
        if not self.said:
            return f"starting: it loads its libraries, {passed_s:.0f} s so far"
        members = self.figures.get("members_alive", 0)
        return f"{self.said}" + (
            f" {members} members are here; no step yet, {passed_s:.0f} s so far" if members else ""
        )


class LocalSwarm:
    """Processes of ``gossip run`` with their logs and outputs in ``folder``; leaving the block ends them all.

    It ends processes that it started and, with a kill, their own groups; never anything found by name.
    """

    def __init__(
        self, script: Path, args: Sequence[str], *, folder: Path, threads: int = 1, config: Path | None = None
    ) -> None:
        self.children: list[Child] = []
        self._job = [str(script), *args]
        self._folder = folder
        self._options = ["--quiet", "--threads", str(threads)]
        if config is not None:
            self._options += ["--config", str(config)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(
        self, *, seed: str | None = None, listen: str = "127.0.0.1:0", page: str | None = None,
        wait_for: tuple[int, float] | None = None,
    ) -> Child:  # fmt: skip
        """Start one more node, perhaps with a page; ``wait_for``: members before it trains, and seconds at most."""
        number = len(self.children)
        log, out, err = (self._folder / f"node-{number}.{kind}" for kind in ("jsonl", "out", "err"))
        log.unlink(missing_ok=True)  # an earlier run's rows are not this one's
        options = [*self._options, "--listen", listen, "--log", str(log)]
        if seed is not None:
            options += ["--seed", seed]
        if page is not None:
            options += ["--page", page]
        if wait_for is not None:
            options += ["--wait-for", str(wait_for[0]), "--wait-s", f"{wait_for[1]:g}"]
        # What this command was started with (a seed, a state directory) cannot be meant for every one of its children.
        inherited = (
            "SEEDS",
            "LISTEN",
            "ADVERTISE",
            "SECRET_FILE",
            "INSECURE",
            "STATE_DIR",
            "CONFIG",
            "LOG",
            "PAGE",
            "PROGRESS",
            "MUST_JOIN",
            "WAIT_FOR",
            "WAIT_S",
        )
        environment = {k: v for k, v in os.environ.items() if k not in {f"GOSSIP_{name}" for name in inherited}}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "gossip", "run", *options, *self._job],
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,  # ^C reaches this process alone, which then ends its children in order
            )
        child = Child(number, process, log, out, err)
        self.children.append(child)
        return child

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children if child.code is None]

    def new_rows(self) -> list[tuple[Child, dict[str, Any]]]:
        """What the nodes have logged since the last call, in the order of time."""
        rows = [(child, row) for child in self.children for row in child.new_rows()]
        return sorted(rows, key=lambda pair: float(pair[1]["t"]))

    def end(self) -> None:
        """Ask every process to leave, and kill what has not after 5 s, together with what it started."""
        running = self.running
        for child in running:
            child.process.terminate()
        until_s = time.monotonic() + GRACE_S
        try:
            for child in running:
                child.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:  # a second ^C while waiting kills at once
            for child in running:
                if child.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.process.pid, signal.SIGKILL)
                    child.process.wait()


class Screen:
    """One live line per node on stderr: rewritten on a terminal; elsewhere printed every 10 s where it is new."""

    def __init__(self, swarm: LocalSwarm) -> None:
        from rich.console import Console
        from rich.live import Live

        self._swarm = swarm
        self._shown_s = float("-inf")
        self._shown: list[str] = []
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show how the nodes stand, if it is time to."""
        from rich.text import Text

        now_s = time.monotonic()
        lines = [child.line() for child in self._swarm.children]
        if self._live is not None:
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now_s - self._shown_s >= LINE_PERIOD_S:
            if new := [line for line in lines if line not in self._shown]:
                self.say("\n".join(new))
            self._shown_s, self._shown = now_s, lines

    def say(self, sentence: str) -> None:
        """A line that stays."""
        self.console.print(sentence, soft_wrap=True)


def run_local(
    script: Path, args: Sequence[str], *, nodes: int, threads: int, config: Path | None, log_dir: Path | None
) -> int:
    """Run a script in ``nodes`` processes, the first the seed of the others; the worst of their exit codes."""
    with ending_on_signals(), folder_of(log_dir) as folder:
        for _ in range(PORT_TRIES):
            with LocalSwarm(script, args, folder=folder, threads=threads, config=config) as swarm:
                port = free_port()
                seed = f"127.0.0.1:{port}"
                first = swarm.start(listen=seed)
                for _ in range(nodes - 1):
                    swarm.start(seed=seed)
                if not watch(swarm, first, port):
                    continue
                report(swarm)
                return max(child.code or 0 for child in swarm.children)
    raise LocalError("Other programs keep taking the port of the first node: try again.")


def watch(swarm: LocalSwarm, first: Child, port: int) -> bool:
    """Show the swarm until it has ended; False when the first node found its port taken."""
    told: set[int] = set()  # of whom it was said how they failed
    with Screen(swarm) as screen:
        while True:
            running = swarm.running
            for child, row in swarm.new_rows():
                # Comings and goings of members are left out: every node would tell of every other.
                if "sentence" in row and row["event"] not in ("listening", "member"):
                    screen.say(f"node {child.number}: {row['sentence']}")
            screen.show()
            if first.code not in (None, 0) and first.address is None and was_taken(first, port):
                return False
            for child in swarm.children:
                if child.code and child.number not in told:
                    told.add(child.number)
                    lines = "".join(f"\n  {line}" for line in last_lines(child.err, ERROR_LINES))
                    screen.say(f"node {child.number} ended with code {child.code}{':' if lines else ''}{lines}")
            if not running:
                return True
            time.sleep(POLL_PERIOD_S)


def report(swarm: LocalSwarm) -> None:
    """The last lines of each node's output on stdout; on stderr what went wrong, and a table."""
    from rich.console import Console
    from rich.table import Table

    for child in swarm.children:
        for line in last_lines(child.out, OUTPUT_LINES):
            print(f"node {child.number}: {line}")
        if child.code:  # all of it was shown when it happened, by now perhaps pages above
            for line in last_lines(child.err, 1):
                print(f"node {child.number}: {line}", file=sys.stderr)
    sys.stdout.flush()
    table = Table("node", *columns_of({}), "exit code")
    for child in swarm.children:
        table.add_row(str(child.number), *columns_of(child.figures).values(), str(child.code))
    Console(stderr=True, highlight=False).print(table)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an orderly way out; further ones are ignored, since that way is bounded."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def folder_of(log_dir: Path | None) -> Iterator[Path]:
    """The folder for logs and outputs: the user's, or one that is deleted at the end."""
    if log_dir is None:
        with tempfile.TemporaryDirectory(prefix="gossip-") as folder:
            yield Path(folder)
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"The folder {log_dir} cannot be made ({error.strerror}): name another --log-dir.") from None
    yield log_dir.resolve()


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file that are not empty."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def free_port() -> int:
    """A loopback port that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def was_taken(child: Child, port: int) -> bool:
    """Whether another program has the port that this one was to listen on, or had it then, as the node says."""
    return is_taken(port) or any("Cannot listen on" in line for line in last_lines(child.err, ERROR_LINES))


def is_taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False
