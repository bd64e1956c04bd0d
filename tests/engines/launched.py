"""A command that a launcher started, seen from outside: its processes, and the logs that nodes write."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "engines"
PATIENCE_S = 600.0  # The timeout of every wait: an engine begins in seconds, or in minutes on a busy machine.
ENDLESS = ("--samples", "1000000000", "--step-delay", "0.005")  # Options for a run that the test ends itself.


def needs_package(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if a package that make test-engines installs is missing."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not here: make test-engines")


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without GOSSIP_ variables, with one thread for each process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    # This Python's folder holds the commands gossip and torchrun.
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])
    return inherited | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"} | variables


def until(what, why=lambda: ""):
    """Wait until ``what()`` is true, and return its value."""
    end = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s in vain: {why()}"
        time.sleep(0.1)
    return found


class Launched:
    """A command in its own process group; its output is in ``out`` and ``err``."""

    def __init__(self, name, folder, *command, **variables):
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = (folder / f"{name}.{kind}" for kind in ("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(part) for part in command], env=environment(**variables), cwd=folder,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid

    def said(self):
        return f"{self.out.read_text()[-2000:]}\n{self.err.read_text()[-4000:]}"

    def until(self, what):
        """Wait until ``what()`` is true. If the command ends before that, fail with its output."""

        def unless_ended():
            found = what()
            assert found or self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said()}"
            return found

        return until(unless_ended, self.said)

    def result(self):
        """Wait for the command to succeed; return its last line, parsed as JSON."""
        assert self.process.wait(PATIENCE_S) == 0, self.said()
        return json.loads(self.out.read_text().splitlines()[-1])

    def end(self):
        """Kill the command and all of its descendants, if they still run."""
        for pid in [*descendants(self.pid), self.pid]:
            kill(pid)
        self.process.wait(30)


class Log:
    """The file of GOSSIP_LOG of one node, with the events of all its lives."""

    def __init__(self, path):
        self.path = path

    def rows(self, event=None):
        text = self.path.read_text() if self.path.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in rows if event in (None, row["event"])]

    @property
    def ids(self):
        """The node's id in each life."""
        return [row["id"] for row in self.rows("listening")]

    @property
    def addresses(self):
        return [row["address"] for row in self.rows("listening")]

    @property
    def lives(self):
        return len(self.ids)

    @property
    def pid(self):
        """The process that writes the log, which is the node's."""
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):  # The process has ended, or the file is closed.
                if link.readlink() == self.path:
                    return int(link.parts[2])
        raise AssertionError(f"nobody writes {self.path}")

    def figure(self, name):
        """Return the latest value of a progress figure in this life; 0 before the first."""
        rows = self.rows()
        began = max((number for number, row in enumerate(rows) if row["event"] == "listening"), default=0)
        rows = [row for row in rows[began:] if row["event"] == "progress"]
        return rows[-1][name] if rows else 0

    @property
    def learned(self):
        """True if the node has learned digits: an untrained model has a loss of 2.3."""
        losses = [row["loss"] for row in self.rows("progress")[-20:] if row["loss"] is not None]
        return bool(losses) and min(losses) < 1.0

    def mixed(self, more=0, members=2):
        """Return True if the node has more than ``more`` exchanges, and at least ``members`` alive members."""
        return self.figure("exchanges_done") > more and self.figure("members_alive") >= members


def goes_on(logs):
    """Wait until each node has completed more than five further exchanges."""
    before = [log.figure("exchanges_done") for log in logs]
    until(lambda: all(log.mixed(more=count + 5) for log, count in zip(logs, before, strict=True)))


def trains_on(job, log):
    """Wait until the node, which may be alone, has taken 50 further steps."""
    before = log.figure("steps")
    job.until(lambda: log.figure("steps") > before + 50)


def comes_back(job, log, members=2):
    """Wait until the node mixes in its second life, as who it was, and with the swarm's weights."""
    job.until(lambda: log.lives == 2 and log.mixed(members=members))
    assert len(set(log.ids)) == 1, "its directory says who it is"
    assert log.rows("joined"), "the swarm's weights"


def children(pid):
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(one) for thread in threads for one in (thread / "children").read_text().split()]
    except OSError:  # The process has ended.
        return []


def descendants(pid):
    found = children(pid)
    return [*found, *(further for one in found for further in descendants(one))]


def variable_of(pid, name):
    """Return a variable of a process's initial environment; None if it is unset, or the process has ended."""
    try:
        rows = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return None
    return next((row.partition("=")[2] for row in rows if row.startswith(f"{name}=")), None)


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
