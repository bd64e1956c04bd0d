"""A swarm of processes on this machine: started, joined, killed and watched, from a notebook, a test or a command."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gossip.config import Config
from gossip.errors import ConfigError, LocalError
from node.observe.figures import line_of

__all__ = ["Child", "LocalSwarm"]

GRACE_S = 5.0  # between SIGTERM and SIGKILL; leaving a swarm takes under 2
POLL_PERIOD_S = 0.1
START_S = 120.0  # until a first node listens, on a machine that reads torch from a slow disk
TOGETHER_S = 600.0  # that the first wait for the last: without it they may have trained everything by then
NODES = 64  # as `gossip local` has it: each is a process of 200 MB and more
SEEDS = 3  # that a newcomer is told: one that lives is enough
KEPT = 20_000  # rows of history: of four nodes those of half a day, some 40 MB
TAIL_BYTES = 65_536  # of a child's output, enough for its last lines
ROWS_BYTES = 1 << 20  # read of one log at a time: 4,000 rows
ERROR_LINES = 20  # shown of a node that ended with an error
# As `python -m gossip`, but a gossip.py or node.py in the current folder hides nothing: -P leaves that folder out of
# the search, and where the packages are not installed they are found at its end.
START = "import sys; sys.path.append(sys.argv.pop(1)); from gossip.__main__ import main; main()"
HOME = str(Path(__file__).resolve().parents[1])
# What this process was started with (a seed, a state directory) cannot be meant for every one of its children.
INHERITED = (
    "SEEDS", "LISTEN", "ADVERTISE", "SECRET_FILE", "INSECURE", "STATE_DIR", "CONFIG", "LOG", "PAGE", "PROGRESS",
    "MUST_JOIN", "WAIT_FOR", "WAIT_S",
)  # fmt: skip


@dataclass(slots=True)
class Child:
    """One node: its process, and what its log has said so far."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path  # JSON lines, docs/cli.md
    out: Path
    err: Path
    address: str | None = None  # where it listens, once it says so
    figures: dict[str, Any] = field(default_factory=dict)  # its last progress row
    said: str = ""  # what it last said of itself, until it trains
    started_s: float = field(default_factory=lambda: time.monotonic())
    start_s: float | None = None  # how long it took until it listened
    ended: bool = False  # because it was told to
    _offset: int = 0
    _printed: int = 0  # bytes of ``out`` that were returned as lines

    @property
    def code(self) -> int | None:
        """None while it runs; 128 + n after signal n, as a shell has it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def printed(self) -> str:
        """The last 64 KB of what its script wrote on stdout."""
        return tail(self.out)

    def new_lines(self) -> list[str]:
        """Return what its script printed since the last call, as lines; one that has no end yet once the node ended."""
        ended = self.code is not None
        with self.out.open("rb") as file:
            file.seek(self._printed)
            data = file.read(ROWS_BYTES)
        full = len(data) == ROWS_BYTES
        if full or not ended:
            data = data[: data.rfind(b"\n") + 1] or (data if full else b"")
        self._printed += len(data)
        lines = data.decode(errors="replace").removesuffix("\n").split("\n") if data else []
        # A progress bar rewrites its line: a terminal shows what follows the last carriage return.
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]

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
            return f"starting: no Node yet, {passed_s:.0f} s so far"
        members = self.figures.get("members_alive", 0)
        here = f"{members} members are here" if members > 1 else "Nobody else is here"
        return f"{self.said}" + (f" {here}; no step yet, {passed_s:.0f} s so far" if members else "")

    def signal(self, number: int) -> None:
        """To its process and all that it started, which are a group of their own."""
        if self.process.poll() is None:
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class LocalSwarm:
    """A training script in several processes on this machine, each a node of one swarm: ``with LocalSwarm("train.py",
    nodes=4) as swarm``. The script is the one that ``gossip run`` takes on many machines.

    ``args``: the script's own arguments. ``nodes``: how many to begin with; the first is the others' seed. ``config``:
    keys of :class:`gossip.Config`, as a mapping or as the path of a TOML file. ``folder``: keeps each node's log and
    outputs, node-0.jsonl, node-0.out and node-0.err; if not given they go when the program lets go of the swarm.
    ``threads``: of arithmetic, a process; processes that each take every core slow one another down.

    Leaving the block, or :meth:`close`, ends every process, and so does letting go of the swarm, as a cell does that is
    run again, and the end of the program. It ends processes that it started and their own groups, none found by name.
    Raises ConfigError for a script or settings that cannot work, LocalError where a node does not begin.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        args: Sequence[object] = (),
        *,
        nodes: int = 0,
        folder: str | os.PathLike[str] | None = None,
        threads: int = 1,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        if not Path(script).is_file():
            raise ConfigError(f"There is no script {script}: name a Python file.")
        if not 0 <= nodes <= NODES:
            raise ConfigError(f"nodes = {nodes} cannot work: take 0 to {NODES} processes of one machine.")
        settings = None
        if isinstance(config, Mapping):
            settings = toml_of(config)
        elif config is not None:
            Config.from_toml(Path(config))
        self.children: list[Child] = []
        self._nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="gossip-") if folder is None else folder).resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._job = [str(script), *map(str, args)]
        self._options = ["--quiet", "--threads", str(threads)]
        if settings is not None:
            config = self._folder / "config.toml"
            config.write_text(settings, "utf-8")
        if config is not None:
            self._options += ["--config", str(config)]
        weakref.finalize(self, _let_go, self.children, self._folder if folder is None else None, os.getpid())

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """What entering the block does, for cells of a notebook: start the nodes, which begin to train when all are
        here, or after 10 minutes. Returns when the first listens."""
        if not self.children:
            for _ in range(self._nodes):
                self.add(wait_for=(self._nodes, TOGETHER_S))
        return self

    def close(self) -> None:
        """Ask every node to leave, and kill what has not after 5 s, together with what it started."""
        _end(self.children)
        self.new_rows()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- nodes ---------------------------------------------------------------------------------------------------
    def add(
        self, *, seed: str | None = None, listen: str = "127.0.0.1:0", page: str | None = None,
        wait_for: tuple[int, float] | None = None,
    ) -> Child:  # fmt: skip
        """Start one more node, which joins through those that run (or through ``seed`` alone), or begins a swarm where
        none does, perhaps with a page. ``wait_for``: members before it trains, and seconds at most. Returns at once,
        but for the first that others are to join through."""
        if len(self.running) >= NODES:
            raise LocalError(f"{NODES} nodes run on this machine: kill one, or let one leave, before another is added.")
        seeds = self._addresses() if seed is None else [seed]
        number = len(self.children)
        log, out, err = (self._folder / f"node-{number}.{kind}" for kind in ("jsonl", "out", "err"))
        log.unlink(missing_ok=True)  # an earlier run's rows are not this one's
        options = [*self._options, "--listen", listen, "--log", str(log)]
        for address in seeds:
            options += ["--seed", address]
        if page is not None:
            options += ["--page", page]
        if wait_for is not None:
            options += ["--wait-for", str(wait_for[0]), "--wait-s", f"{wait_for[1]:g}"]
        environment = {k: v for k, v in os.environ.items() if k not in {f"GOSSIP_{name}" for name in INHERITED}}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, HOME, "run", *options, *self._job],
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,  # ^C reaches this process alone, which then ends its children in order
            )
        child = Child(number, process, log, out, err)
        self.children.append(child)
        return child

    def kill(self, number: int) -> None:
        """Kill a node with signal 9, and with it what it started: it says nothing to anybody."""
        self._child(number).signal(signal.SIGKILL)
        self._child(number).process.wait()

    def leave(self, number: int) -> None:
        """Ask a node to leave, as SIGTERM does: it tells the others. Returns at once."""
        self._child(number).ended = True
        self._child(number).process.terminate()

    @property
    def running(self) -> list[Child]:
        """Those whose processes have not ended."""
        return [child for child in self.children if child.code is None]

    # -- what it says --------------------------------------------------------------------------------------------
    def metrics(self) -> dict[int, dict[str, Any]]:
        """The newest figures of each node by its number, those in docs/figures.md that are logged; also of nodes that
        have ended. Empty for one that has not begun to train."""
        self.new_rows()
        return {child.number: child.figures for child in self.children}

    def history(self, event: str | None = None) -> list[dict[str, Any]]:
        """What the nodes have logged, in the order of time: rows with ``node``, ``t`` (unix seconds), ``event`` and
        what belongs to it, docs/cli.md; of one event alone, as "progress", of which one comes a second in the first
        minute and every 10 s from ten minutes on. The last 20,000 are kept."""
        self.new_rows()
        rows = [row for row in self._rows if event is None or row["event"] == event]
        return sorted(rows, key=lambda row: float(row["t"]))  # one log may be read a moment before another

    def new_rows(self) -> list[tuple[Child, dict[str, Any]]]:
        """What the nodes have logged since the last call of this, :meth:`metrics` or :meth:`history`."""
        rows = [(child, row) for child in self.children for row in child.new_rows()]
        rows.sort(key=lambda pair: float(pair[1]["t"]))
        self._rows.extend({"node": child.number, **row} for child, row in rows)
        return rows

    def wait(self, until: Callable[[], object] | None = None, timeout_s: float = 600.0) -> bool:
        """Until ``until()`` holds, or else every node has ended; False where that took longer than ``timeout_s``, or
        where all have ended and it does not hold. Raises LocalError for a node that ended with an error."""
        before = time.monotonic()
        for _ in self.watch(POLL_PERIOD_S):
            if until is not None and until():
                return True
            if time.monotonic() - before > timeout_s:
                return False
        return until is None or bool(until())

    def watch(self, every_s: float = 1.0) -> Iterator[Self]:
        """``for _ in swarm.watch(): draw(swarm.history("progress"))``: a turn at most every ``every_s`` seconds while
        any node runs, and one when all have ended. Raises LocalError for a node that ended with an error."""
        while running := self.running:
            self.new_rows()
            self.check()
            yield self
            until = time.monotonic() + every_s
            while running and time.monotonic() < until:
                time.sleep(min(POLL_PERIOD_S, every_s))
                running = self.running
        self.new_rows()
        self.check()
        yield self

    def check(self) -> None:
        """Raise LocalError for a node that ended with an error of its own, with the last lines that it said."""
        for child in self.children:
            if child.code and not child.ended:
                said = "\n".join(last_lines(child.err, ERROR_LINES))
                raise LocalError(f"Node {child.number} ended with code {child.code}:\n{said}")

    def _child(self, number: int) -> Child:
        if not 0 <= number < len(self.children):
            raise LocalError(f"There is no node {number}: this swarm has had {len(self.children)}, numbered from 0.")
        return self.children[number]

    def _addresses(self) -> list[str]:
        """Where those that run listen; waits for the first that does. The newest first: they live longest."""
        before = time.monotonic()
        while running := self.running:
            self.new_rows()
            if found := [child.address for child in running if child.address is not None]:
                return found[-SEEDS:]
            self.check()
            if time.monotonic() - before > START_S:
                raise LocalError(f"No node listens after {START_S:g} s: see {running[0].err}.")
            time.sleep(POLL_PERIOD_S)
        self.check()
        return []


def toml_of(config: Mapping[str, Any]) -> str:
    """As a file that a node reads. Raises ConfigError for what cannot work there."""
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    try:
        Config.from_mapping(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config cannot be written as TOML ({error}): leave out what is None.") from None
    return text


def _end(children: Sequence[Child]) -> None:
    running = [child for child in children if child.code is None]
    for child in running:
        child.ended = True
        child.process.terminate()
    until_s = time.monotonic() + GRACE_S
    try:
        for child in running:
            child.process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second ^C while waiting kills at once
        for child in running:
            child.signal(signal.SIGKILL)
            child.process.wait()


def _let_go(children: Sequence[Child], folder: Path | None, process: int) -> None:
    """Nobody holds the swarm any more, or the program ends; not in a forked child, whose nodes they are not."""
    if os.getpid() == process:
        _end(children)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file that are not empty."""
    return [line for line in tail(path).splitlines() if line.strip()][-count:]
