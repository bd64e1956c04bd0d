"""`gossip local`: a swarm of processes on this machine, one line per node, and a table at the end."""

import contextlib
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from gossip.errors import ConfigError, LocalError
from gossip.timeline import merge
from node.child import Child, last_lines
from node.cli.agreement import describe_agreement, describe_file
from node.local import ERROR_LINES, POLL_PERIOD_S, TOGETHER_S, LocalSwarm
from node.observe.figures import columns_of
from node.settings import timeline_file
from node.terminal import plain_console

LINE_PERIOD_S = 10.0  # Seconds between lines where no terminal can rewrite them: 360 an hour per node.
PORT_TRIES = 3  # Another program may take the free port before our node does: rare once, never three times.
NODES_PER_SCRIPT = 4  # Ports looked for in a row. A script with more Nodes may meet one that another program has.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """One live line per node on stderr: rewritten on a terminal; elsewhere printed every 10 s if it is new."""

    def __init__(self, swarm: LocalSwarm) -> None:
        from rich.live import Live

        self._swarm = swarm
        self._shown_at_s = float("-inf")  # The time of the last lines; -inf before the first.
        self._shown: list[str] = []
        self.console = plain_console(stderr=True)
        # Scripts' output goes to stdout, perhaps a file, so rich must not redirect it to the terminal.
        live = partial(Live, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live = live(console=self.console) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show the state of the nodes, if that is due."""
        from rich.text import Text

        now_s = time.monotonic()
        lines = [child.line() for child in self._swarm.children]
        if self._live is not None:
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now_s - self._shown_at_s >= LINE_PERIOD_S:
            coarse_lines = [with_coarse_wait(line) for line in lines]
            if new := [line for line, text in zip(lines, coarse_lines, strict=True) if text not in self._shown]:
                self.say("\n".join(new))
            self._shown_at_s, self._shown = now_s, coarse_lines

    def say(self, sentence: str) -> None:
        """Print a line that stays."""
        self.console.print(sentence, soft_wrap=True)

    def print(self, line: str) -> None:
        """Print a line of a node on stdout, above the live lines where both are on a terminal."""
        if self._live is not None and sys.stdout.isatty():
            self.say(line)
        else:
            print(line, flush=True)


def with_coarse_wait(line: str) -> str:
    """Replace a waiting time by its power of two, so that a log repeats the line only when the time has doubled."""
    return re.sub(r"(\d+) s so far", lambda waited: f"{int(waited[1]).bit_length()}", line)


def run_local(
    script: Path, args: Sequence[str], options: Mapping[str, Any], *, nodes: int, threads: int, log_dir: Path | None,
    module: bool = False,
) -> int:  # fmt: skip
    """Run a script in ``nodes`` processes that wait for each other, the first the seed of the others.

    Args:
        script: The script, or with ``module`` the name of a module.
        args: Its arguments.
        options: The options of :mod:`node.options` that `gossip local` takes, for all nodes.
        nodes: The number of processes.
        threads: Threads of arithmetic per process.
        log_dir: The folder for logs and outputs; None for a temporary one.
        module: ``script`` is run as ``python -m`` does it.

    Returns:
        The highest exit code of the processes.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("wait_for", 0) > nodes:
        raise ConfigError(
            f"--wait-for {given['wait_for']} waits for more members than -n {nodes} starts: lower it or raise -n."
        )
    if module:
        script, args = Path("-m"), [str(script), *args]
    trace = timeline_file(given.pop("trace", None))
    each = {"wait_for": nodes, "wait_s": TOGETHER_S} | given
    with ending_on_signals(), folder_of(log_dir) as folder:
        for _ in range(PORT_TRIES):
            with LocalSwarm(
                script, args, folder=folder, threads=threads, config=given.get("config"), trace=trace is not None
            ) as swarm:  # fmt: skip
                port = free_port()
                seed = f"127.0.0.1:{port}"
                first = swarm.add(listen=seed, **each)
                for _ in range(nodes - 1):
                    swarm.add(seed=seed, **each)
                if not watch(swarm, first, port):
                    continue
                report(swarm)
                if trace is not None:
                    merge_timelines(folder, nodes, trace)
                return max(child.code or 0 for child in swarm.children)
    raise LocalError("Other programs keep taking the port of the first node: try again.")


def watch(swarm: LocalSwarm, first: Child, port: int) -> bool:
    """Show the swarm until it has ended; return False if the first node found its port taken."""
    reported: set[int] = set()  # Nodes whose failure was shown.
    with Screen(swarm) as screen:
        while True:
            running = swarm.running
            for child, row in swarm.new_rows():
                # Skip membership changes, since every node reports every other one.
                if "sentence" in row and row["event"] not in ("listening", "member"):
                    screen.say(f"node {child.number}: {row['sentence']}")
            printed = show_prints(swarm, screen)
            screen.show()
            if first.code not in (None, 0) and first.address is None and was_taken(first, port):
                return False
            for child in swarm.children:
                if child.code and child.number not in reported:
                    reported.add(child.number)
                    lines = "".join(f"\n  {line}" for line in last_lines(child.err, ERROR_LINES))
                    screen.say(f"node {child.number} ended with code {child.code}{':' if lines else ''}{lines}")
            if not running and not printed:  # All nodes have ended, and all that they printed is shown.
                return True
            if running:
                time.sleep(POLL_PERIOD_S)


def show_prints(swarm: LocalSwarm, screen: Screen) -> bool:
    """Print the lines that the scripts printed since the last call; return True if there were any."""
    lines = [f"node {child.number}: {line}" for child in swarm.children for line in child.new_lines()]
    for line in lines:
        screen.print(line)
    return bool(lines)


def report(swarm: LocalSwarm) -> None:
    """Print failures, the table of final figures, and how far the models agree to stderr."""
    from rich.table import Table

    for child in swarm.children:
        if child.code:  # Its last lines were shown when it ended, perhaps pages above.
            for line in last_lines(child.err, 1):
                print(f"node {child.number}: {line}", file=sys.stderr)
    if not any(child.figures for child in swarm.children):  # A table of zeros would hide the reason.
        return
    table = Table("node", *columns_of({}), "exit code")
    for child in swarm.children:
        for place, node in enumerate(child.nodes):
            name = f"{child.number}.{place + 1}" if len(child.nodes) > 1 else str(child.number)
            table.add_row(name, *columns_of(node.figures).values(), str(child.code))
    plain_console(stderr=True).print(table)
    for sentence in (*describe_agreement(swarm.children), describe_file(swarm.children)):
        print(sentence, file=sys.stderr)


def merge_timelines(folder: Path, nodes: int, out: Path) -> None:
    """Merge the timelines that this many nodes wrote into a folder, and print where the result is."""
    files = [file for number in range(nodes) for file in sorted(folder.glob(f"node-{number}.trace*.json"))]
    if files:
        merge(files, out)
    said = f"The timeline is {out}: open it at https://ui.perfetto.dev." if files else "No node has written a timeline."
    print(said, file=sys.stderr)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an orderly exit, which is bounded in time; ignore further ones."""

    def leave(received: int, _frame: FrameType | None) -> NoReturn:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + received)

    handlers_before = {number: signal.signal(number, leave) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def folder_of(log_dir: Path | None) -> Iterator[Path]:
    """Yield the folder for logs and outputs: the user's, or a temporary one."""
    if log_dir is None:
        with tempfile.TemporaryDirectory(prefix="gossip-") as folder:
            yield Path(folder)
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"The folder {log_dir} cannot be made ({error.strerror}): name another --log-dir.") from None
    yield log_dir.resolve()


def free_port() -> int:
    """Return a loopback port that was free a moment ago, like the next ones, which further Nodes of a script take."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            port: int = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for other in range(port + 1, port + NODES_PER_SCRIPT):
                stack.enter_context(socket.create_server(("127.0.0.1", other)))
            return port


def was_taken(child: Child, port: int) -> bool:
    """Return True if another program holds the node's port, or held it when the node tried to listen."""
    return is_taken(port) or any("Cannot listen on" in line for line in last_lines(child.err, ERROR_LINES))


def is_taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False
