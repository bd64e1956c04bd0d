"""A swarm of processes on this machine: started, joined, killed and watched, from a notebook, a test or a command."""

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
from pathlib import Path
from typing import Any, Self

from gossip.config import Config
from gossip.errors import ConfigError, LocalError, checked_whole
from node.child import Child, last_lines
from node.options import OPTIONS, flags_of

GRACE_S = 10.0  # Seconds between SIGTERM and SIGKILL; leaving a swarm takes under 7 s with its last mixes.
POLL_PERIOD_S = 0.1  # Seconds between two looks at the processes.
START_S = 120.0  # Limit until the first node listens: a machine may read torch from a slow disk.
TOGETHER_S = 600.0  # The nodes wait this long for each other: otherwise the first could finish before the last begins.
MAX_NODES = 64  # The limit of `gossip local` too: each node is a process of 200 MB and more.
MAX_SEEDS = 3  # Seeds that a newcomer gets: one alive is enough.
MAX_ROWS = 20_000  # Rows of history: half a day of four nodes, some 40 MB.
ERROR_LINES = 20  # Lines shown of a node that ended with an error.
# Like `python -m gossip`, but -P leaves the current folder out of the search path, so that a gossip.py or node.py there
# shadows nothing. The packages' own folder is appended for the case that they are not installed.
START = "import sys; sys.path.append(sys.argv.pop(1)); from gossip.__main__ import main; main()"
COMMAND = (sys.executable, "-P", "-c", START, str(Path(__file__).resolve().parents[1]))
# Variables of this process that its nodes do not get: a seed or a state directory does not fit all of them.
REMOVED_VARIABLES = {option.variable for option in OPTIONS.values() if not option.inherited}


class LocalSwarm:
    """A training script in several processes on this machine, each a node of one swarm.

    Use it as ``with LocalSwarm("train.py", nodes=4) as swarm``. The script is the one that ``gossip run`` takes on many
    machines. Every process ends when the block or the program ends, on :meth:`close`, or when the swarm is
    garbage-collected, like after running a notebook cell again. Only processes that it started and their groups are
    ended, none found by name.

    Args:
        script: The path of the training script; or "-m", as for ``python -m``.
        args: The script's own arguments, after the name of the module.
        nodes: The number of nodes to begin with; the first is the others' seed.
        folder: Keeps each node's log and outputs: node-0.jsonl, node-0.out and node-0.err. If not given they are
            deleted with the swarm.
        threads: Threads of arithmetic per process; processes that each take every core slow one another down.
        config: Keys of :class:`gossip.Config`, as a mapping or as the path of a TOML file.
        trace: True if each node writes a timeline into the folder, node-0.trace.json and so on.

    Raises:
        ConfigError: The script or the settings cannot work.
        LocalError: A node does not start.
    """

    def __init__(
        self, script: str | os.PathLike[str], args: Sequence[object] = (), *, nodes: int = 0,
        folder: str | os.PathLike[str] | None = None, threads: int = 1,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None, trace: bool = False,
    ) -> None:  # fmt: skip
        is_module = str(script) == "-m"
        check_script(Path(str(args[0])) if is_module and args else Path(script), is_module)
        nodes = checked_whole("nodes", nodes, f"take 0 to {MAX_NODES} processes of one machine.", 0, MAX_NODES)
        settings = None  # The text of a configuration file that is to be written.
        if isinstance(config, Mapping):
            settings = toml_of(config)
        elif config is not None:
            Config.from_toml(Path(config))  # It raises the errors that every node would raise.
        self.children: list[Child] = []
        self.is_closed = False
        self._nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="gossip-") if folder is None else folder).resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        self._job = [str(script), *map(str, args)]
        self._threads, self._traces = threads, trace
        if settings is not None:
            config = self._folder / "node-config.toml"
            config.write_text(settings, "utf-8")
        self._config = config
        weakref.finalize(self, _clean_up, self.children, self._folder if folder is None else None, os.getpid())

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Start the nodes, as entering the block does; for cells of a notebook.

        They begin to train when all are present, or after 10 minutes. Returns once the first node listens.
        """
        self.check_open()
        if not self.children:
            for _ in range(self._nodes):
                self.add(wait_for=self._nodes, wait_s=TOGETHER_S)
        return self

    def close(self) -> None:
        """Ask every node to leave, and kill the rest after :data:`GRACE_S`, with the processes that they started."""
        self.is_closed = True
        _end_nodes(self.children)
        self.new_rows()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- nodes ---------------------------------------------------------------------------------------------------
    def add(self, *, seed: str | None = None, **options: Any) -> Child:
        """Start one more node.

        It joins through the running nodes, or through ``seed`` alone; if none runs it begins a swarm. Returns at once,
        unless it must wait for the first node to listen.

        Args:
            seed: The only seed to join through.
            **options: Options of its Node that are numbers or texts, as ``page="127.0.0.1:0"`` or ``wait_for=4``
                (docs/options.md). It listens on 127.0.0.1 if none is given.
        """
        self.check_open()
        if len(self.running) >= MAX_NODES:
            raise LocalError(
                f"{MAX_NODES} nodes run on this machine: kill one, or let one leave, before another is added."
            )
        seeds = self._addresses() if seed is None else [seed]
        number = len(self.children)
        log, out, err = (self._folder / f"node-{number}.{kind}" for kind in ("jsonl", "out", "err"))
        for earlier in (log, *self._folder.glob(f"node-{number}.trace*.json")):
            earlier.unlink(missing_ok=True)  # What an earlier run wrote does not belong to this one.
        own = {"quiet": True, "seeds": seeds, "listen": "127.0.0.1:0", "config": self._config, "log": log}
        if self._traces:
            own["trace"] = self._folder / f"node-{number}.trace.json"
        flags = flags_of(**own | options)
        environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*COMMAND, "run", "--threads", str(self._threads), *flags, *self._job],
                # Sets of texts have one order in all processes, so that a vocabulary made of one is the same.
                env={"PYTHONHASHSEED": "0", **environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,  # ^C reaches this process alone, which then ends its children in order.
            )
        child = Child(number, process, log, out, err)
        self.children.append(child)
        return child

    def kill(self, number: int) -> None:
        """Kill a node with signal 9, together with what it started, so that it sends no farewell."""
        self._child(number).signal(signal.SIGKILL)
        self._child(number).process.wait()

    def leave(self, number: int) -> None:
        """Ask a node to leave, as SIGTERM does, so that it tells the others. Returns at once."""
        child = self._child(number)
        if child.code is None:  # One that has crashed keeps its error.
            child.was_told_to_end = True
            child.process.terminate()

    @property
    def running(self) -> list[Child]:
        """Return the nodes whose processes have not ended."""
        return [child for child in self.children if child.code is None]

    # -- logs ----------------------------------------------------------------------------------------------------
    def metrics(self) -> dict[int, dict[str, Any]]:
        """Return the newest logged figures of each node by its number, ended nodes included; see docs/figures.md.

        The figures of a node that has not begun to train are empty.
        """
        self.new_rows()
        return {child.number: child.figures for child in self.children}

    def history(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the nodes' log rows in order of time, of all events or of one.

        A row has ``node``, ``t`` (unix seconds), ``event`` and its fields, see docs/cli.md. A "progress" row comes
        every second in the first minute and every 10 s from ten minutes on. The last 20,000 rows are kept.
        """
        self.new_rows()
        rows = [row for row in self._rows if event is None or row["event"] == event]
        return sorted(rows, key=lambda row: float(row["t"]))  # One log may be read a moment before another.

    def new_rows(self) -> list[tuple[Child, dict[str, Any]]]:
        """Return the rows logged since the last call of this method, :meth:`metrics` or :meth:`history`."""
        rows = [(child, row) for child in self.children for row in child.new_rows()]
        rows.sort(key=lambda pair: float(pair[1]["t"]))
        self._rows.extend({"node": child.number, **row} for child, row in rows)
        return rows

    def wait(self, until: Callable[[], object] | None = None, timeout_s: float = 600.0) -> bool:
        """Wait until ``until()`` is true, or, without it, until every node has ended.

        Returns:
            False after ``timeout_s``, or if all nodes have ended and ``until()`` is false.

        Raises:
            LocalError: A node ended with an error.
        """
        began_s = time.monotonic()
        for _ in self.watch(POLL_PERIOD_S):
            if until is not None and until():
                return True
            if time.monotonic() - began_s > timeout_s:
                return False
        return until is None or bool(until())

    def watch(self, every_s: float = 1.0) -> Iterator[Self]:
        """Yield at most every ``every_s`` seconds while any node runs, and once when all have ended.

        Use it as ``for _ in swarm.watch(): draw(swarm.history("progress"))``. Raises LocalError for a node that ended
        with an error.
        """
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
        """Raise LocalError for a node that ended with an error of its own, with its last lines of output."""
        for child in self.children:
            if child.code and not child.was_told_to_end:
                last_output = "\n".join(last_lines(child.err, ERROR_LINES))
                raise LocalError(f"Node {child.number} ended with code {child.code}:\n{last_output}")

    def check_open(self) -> None:
        """Raise LocalError after :meth:`close`: nothing would end a later node with its block."""
        if self.is_closed:
            raise LocalError("This LocalSwarm is closed, and its nodes have ended: make a new one to start others.")

    def _child(self, number: int) -> Child:
        if not 0 <= number < len(self.children):
            raise LocalError(f"There is no node {number}: this swarm has had {len(self.children)}, numbered from 0.")
        return self.children[number]

    def _addresses(self) -> list[str]:
        """Return the addresses of the newest running nodes, at most ``MAX_SEEDS``; wait until one listens."""
        began_s = time.monotonic()
        while running := self.running:
            self.new_rows()
            if addresses := [child.address for child in running if child.address is not None]:
                return addresses[-MAX_SEEDS:]
            self.check()
            if time.monotonic() - began_s > START_S:
                raise LocalError(f"No node listens after {START_S:g} s: see {running[0].err}.")
            time.sleep(POLL_PERIOD_S)
        self.check()
        return []


def check_script(script: Path, is_module: bool) -> None:
    """Raise ConfigError if there is no such file, or if a module is named by its file."""
    if not is_module and not script.is_file():
        raise ConfigError(f"There is no script {script}: name a Python file.")
    if is_module and (script.is_file() or not all(map(str.isidentifier, str(script).split(".")))):
        raise ConfigError(f"-m takes the name of a module, as package.train, not {script}: leave -m out to run a file.")


def toml_of(config: Mapping[str, Any]) -> str:
    """Return settings as the text of a TOML file. Raises ConfigError for settings that cannot work."""
    try:
        text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items())
        Config.from_mapping(tomllib.loads(text))
    except (TypeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config cannot be written as TOML ({error}): leave out what is None.") from None
    return text


def _end_nodes(children: Sequence[Child]) -> None:
    """Ask these nodes to leave, and kill the ones that still run after ``GRACE_S``."""
    running = [child for child in children if child.code is None]
    for child in running:
        child.was_told_to_end = True
        child.process.terminate()
    until_s = time.monotonic() + GRACE_S
    try:
        for child in running:
            child.process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:  # A second ^C while waiting kills at once.
        for child in running:
            child.signal(signal.SIGKILL)
            child.process.wait()


def _clean_up(children: Sequence[Child], folder: Path | None, process: int) -> None:
    """End the nodes, and delete their folder, if there is one; not in a forked child, which owns neither.

    Called when the swarm is garbage-collected or the program ends.
    """
    if os.getpid() == process:
        _end_nodes(children)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
