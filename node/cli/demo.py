"""`gossip demo`: a swarm on real data loses its first node half-way, gains another, and learns all the same."""

import importlib.util
import json
import shutil
import sys
import tempfile
import time
import webbrowser
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gossip.errors import DataError
from node.child import Child, last_lines
from node.cli.local import Screen, ending_on_signals
from node.local import ERROR_LINES, POLL_PERIOD_S, LocalSwarm
from node.settings import page_address
from node.terminal import plain_console

SAMPLES = 48_000  # Of the whole swarm: 33 epochs, three times what 96 % takes.
STEP_DELAY_S = 0.03  # 750 steps of 16 samples on each of four nodes: some 25 s to watch.
TARGET = 0.96  # Accuracy on the test set of the digits.
SHOWN_EVENTS = ("joined", "merged", "finished", "page")  # The kinds of nodes' events that the demo shows.
STILL_S = 60.0  # Once the limit has passed, seconds without progress after which time is up: machines differ in speed.
MAX_LIMITS = 10  # The multiple of the limit after which time is up in any case.
START_S = 5.0  # A node's start on two quiet cores; a slower machine gets proportionally more time.


@dataclass(slots=True)
class DemoResult:
    """The outcome, for the table and for ``--json``."""

    ok: bool = False
    seconds: float = 0.0
    target: float = TARGET
    samples: int = SAMPLES
    events: list[str] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)


def run_demo(
    *, nodes: int, as_json: bool, limit_s: float, job: Path | None = None, page: bool = False, opens: bool = False
) -> int:
    """Run the demo; return 0 if every survivor and the newcomer reach 96 % on the digits' test set, else 1.

    Args:
        nodes: Nodes to begin with.
        as_json: Print the outcome as JSON instead of a table.
        limit_s: The time limit in seconds, which is extended on slow machines.
        job: A script to use instead of :mod:`node.cli.demo_job`, with the same arguments and output.
        page: Give the second node a live page.
        opens: Open that page in a browser.

    Raises:
        DataError: scikit-learn is missing.
        ConfigError: A package that the page needs is missing.
    """
    if page:
        page_address("127.0.0.1:0", None)
    if importlib.util.find_spec("sklearn") is None:
        raise DataError("The demo trains on scikit-learn's digits: pip install 'gossip-trainer[examples]'.")
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="gossip-demo-") as name:
        folder = Path(name)
        # A copy, since a script's own folder comes first on sys.path, and in ours node.py would hide the package node.
        script = Path(shutil.copy(job or Path(__file__).with_name("demo_job.py"), folder / "digits.py"))
        # One more than at the beginning, so that no node ends before the newcomer has come.
        arguments = ["--samples", str(SAMPLES), "--step-delay", str(STEP_DELAY_S), "--members", str(nodes + 1)]
        with LocalSwarm(script, arguments, folder=folder) as swarm, Screen(swarm) as screen:
            stage = Stage(swarm, screen, page, opens)
            stage.play(nodes, limit_s)
        outcome = stage.outcome
        outcome.nodes = [describe(child, child is stage.killed, child is stage.newcomer) for child in swarm.children]
        outcome.ok = stage.newcomer is not None and all(row["ok"] for row in outcome.nodes if not row["killed"])
        if as_json:
            print(json.dumps(asdict(outcome)))
        else:
            print_outcome(outcome)
        for child in stage.broken:
            print(*last_lines(child.err, ERROR_LINES), sep="\n", file=sys.stderr)
    return 0 if outcome.ok else 1


class Stage:
    """The course of the demo: start, kill the first node at half of the samples, add one through a live node, wait.

    Training begins when all nodes are present and goes on until the newcomer has come. Loading libraries takes from two
    seconds to two minutes, depending on the load of the machine.
    """

    def __init__(self, swarm: LocalSwarm, screen: Screen, page: bool = False, opens: bool = False) -> None:
        self.outcome = DemoResult()
        self.killed: Child | None = None  # The first node, once it is killed.
        self.newcomer: Child | None = None  # The node that was added then.
        self.broken: list[Child] = []  # Nodes that ended with an error of their own.
        self._swarm = swarm
        self._screen = screen
        self._page, self._opens = page, opens
        self._began_s = self._progress_s = time.monotonic()  # Times of the start and of the last progress.
        self._progress = (0, 0)  # Samples, and nodes that listen.

    def is_late(self, limit_s: float, trained: int) -> bool:
        """Return True if time is up; a slow machine gets more, while ``trained``, the swarm's samples, advance."""
        now = time.monotonic()
        starts_s = [child.start_s for child in self._swarm.children if child.start_s is not None]
        if (trained, len(starts_s)) != self._progress:
            self._progress, self._progress_s = (trained, len(starts_s)), now
        slowness = max([1.0, *(start_s / START_S for start_s in starts_s)])
        # The times that these would be on a machine of usual speed.
        passed_s = (now - self._began_s) / slowness
        still_s = (now - self._progress_s) / slowness
        return passed_s > limit_s and (still_s > min(STILL_S, limit_s) or passed_s > MAX_LIMITS * limit_s)

    def play(self, nodes: int, limit_s: float) -> None:
        """Run until all nodes have ended, or time is up."""
        together: dict[str, Any] = {"wait_for": nodes, "wait_s": MAX_LIMITS * limit_s}
        first = self._swarm.add(**together)
        self._tell(f"node 0 starts, then {nodes - 1} more; loading libraries takes seconds, on a busy machine a minute")
        while self._swarm.running:
            self._tell_events()
            if len(self._swarm.children) < nodes and first.address is not None:
                for number in range(1, nodes):  # The page belongs to a node that lives to the end.
                    paged_at = "127.0.0.1:0" if self._page and number == 1 else None
                    self._swarm.add(seed=first.address, page=paged_at, **together)
                self._tell(f"node 0 listens on {first.address}; nodes 1 to {nodes - 1} know nothing but that address")
            trained = max(int(child.figures.get("swarm_samples", 0)) for child in self._swarm.children)
            others = [child for child in self._swarm.running if child is not first and child.address is not None]
            if self.killed is None and first.code is None and others and trained >= SAMPLES // 2:
                self._replace_first(first, others[len(others) // 2], trained)
            self._screen.show()
            self.broken = [child for child in self._swarm.children if child.code and child is not self.killed]
            if self.broken:  # Waiting for the rest would show nothing.
                self._tell(f"node {self.broken[0].number} ended with code {self.broken[0].code}")
                break
            if self.is_late(limit_s, trained):
                self._tell(f"time is up after {time.monotonic() - self._began_s:.0f} s")
                break
            time.sleep(POLL_PERIOD_S)
        self._tell_events()  # Nodes may have logged some between the last look and their end.
        self.outcome.seconds = round(time.monotonic() - self._began_s, 1)

    def _replace_first(self, first: Child, seed: Child, trained: int) -> None:
        """Kill the first node, and start another one that knows only the node ``seed``."""
        self._swarm.kill(first.number)
        self.killed = first
        self._tell(f"node 0 (the seed) killed with -9 at {trained:,} samples")
        self.newcomer = self._swarm.add(seed=seed.address)
        self._tell(f"node {self.newcomer.number} starts, and knows nothing but the address of node {seed.number}")

    def _tell_events(self) -> None:
        """Tell what nodes have logged since the last call."""
        for child, row in self._swarm.new_rows():
            if row["event"] in SHOWN_EVENTS and child is not self.killed:
                if row["event"] == "page" and self._opens:
                    webbrowser.open(row["sentence"].split()[-1])
                self._tell(f"node {child.number}: {row['sentence']}")

    def _tell(self, sentence: str) -> None:
        line = f"{time.monotonic() - self._began_s:5.1f} s  {sentence}"
        self.outcome.events.append(line.strip())
        self._screen.say(line)


def describe(child: Child, killed: bool, newcomer: bool) -> dict[str, Any]:
    """Return one row of the table. On a busy machine the newcomer may start after the run's end and train nothing."""
    figures = child.figures
    result = result_of(child)
    accuracy = result.get("accuracy")
    is_right = accuracy is not None and accuracy >= TARGET and (newcomer or figures.get("steps", 0) > 0)
    return {
        "node": child.number, "killed": killed, "ok": child.code == 0 and is_right, "exit_code": child.code,
        "steps": figures.get("steps", 0), "samples": figures.get("samples", 0),
        "exchanges": figures.get("exchanges_done", 0), "failed": figures.get("exchanges_failed", 0),
        "mb_sent": round(figures.get("bytes_sent", 0) / 1e6, 2),
        "consensus_distance": result.get("consensus_distance"), "accuracy": accuracy,
    }  # fmt: skip


def result_of(child: Child) -> dict[str, Any]:
    """Return the JSON line that a job ends with; empty if it did not get that far."""
    for line in last_lines(child.out, 1):
        try:
            result = json.loads(line)
        except ValueError:
            break
        if isinstance(result, dict):
            return result
    return {}


def print_outcome(outcome: DemoResult) -> None:
    """Print the closing table and the verdict to stdout."""
    from rich.table import Table

    console = plain_console()
    table = Table("node", "steps", "samples", "exchanges", "failed", "MB sent", "test accuracy", title="digits")
    for row in outcome.nodes:
        accuracy = row["accuracy"]
        accuracy_text = "killed" if row["killed"] else "-" if accuracy is None else f"{accuracy:.1%}"
        counts = (f"{row[key]:,}" for key in ("steps", "samples", "exchanges", "failed"))
        table.add_row(str(row["node"]), *counts, f"{row['mb_sent']:.2f}", accuracy_text)
    console.print(table)
    verdict = "Every survivor and the newcomer reached" if outcome.ok else "Not every survivor and the newcomer reached"
    console.print(f"{verdict} {outcome.target:.0%} in {outcome.seconds:.0f} s.")
