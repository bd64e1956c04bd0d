"""An example as a user runs it, in its own process; a test reads its log and may kill it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
PATIENCE_S = 300.0  # The longest time without a step: importing a framework takes minutes on a busy machine.


class Play:
    """``gossip run EXAMPLE --folder FOLDER`` in ``folder``; ``kill`` is SIGKILL.

    With ``--alone`` the example makes no Node, which ``gossip run`` reports as a mistake, so ``python`` runs it.
    """

    def __init__(self, script, folder, *args, seed=None, environment=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.number = folder, len(list(folder.glob("*.jsonl")))
        self.log = folder / f"{self.number}.jsonl"
        self.steps, self.end = None, 0.0  # The steps at the latest look, and the deadline of the next one.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
        options = ["--quiet", "--threads", "1", "--log", str(self.log), *(["--seed", seed] if seed else [])]
        self.out, self.err = (folder / f"{self.number}.{kind}" for kind in ("out", "err"))
        launcher = [] if "--alone" in args else ["-m", "gossip", "run", *options]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(EXAMPLES / script), "--folder", str(folder), *args],
                env={**inherited, **(environment or {}), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip

    def rows(self, event):
        text = self.log.read_text() if self.log.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in rows if row["event"] == event]

    def until(self, what):
        """Wait until ``what()`` is true, and return its value. If the process ends first, fail with its errors."""
        while not (found := what()):
            assert self.process.poll() is None, self.err.read_text()[-3000:]
            self.wait()
        return found

    def wait(self):
        """Wait a moment; fail if the process has taken no step for PATIENCE_S. The total time has no limit."""
        steps = [row["steps"] for row in self.rows("progress")[-1:]]
        now = time.monotonic()
        if steps != self.steps:
            self.steps, self.end = steps, now + PATIENCE_S
        assert now < self.end, f"no step for {PATIENCE_S:g} s: {self.err.read_text()[-3000:]}"
        time.sleep(0.2)

    @property
    def address(self):
        return self.until(lambda: self.rows("listening"))[0]["address"]

    @contextlib.contextmanager
    def held(self):
        """Stop the process meanwhile, so that it does not finish before another one has loaded its libraries."""
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait(30)

    def result(self):
        """Wait for the process to succeed; return its last line, parsed as JSON."""
        while self.process.poll() is None:
            self.wait()
        assert self.process.returncode == 0, self.err.read_text()[-3000:]
        return json.loads(self.out.read_text().splitlines()[-1])
