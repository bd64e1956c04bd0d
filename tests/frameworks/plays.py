"""An example as a user runs it, in its own process; a test reads its log and may kill it."""

import contextlib
import signal
import sys
import time

from tests.engines.launched import ROOT, Launched, Log

EXAMPLES = ROOT / "examples" / "frameworks"
PATIENCE_S = 300.0  # The longest time without a step: importing a framework takes minutes on a busy machine.


def record_settling(callback, steps):
    """Return a list to which each ``callback.settle()`` adds ``steps()``, once it has mixed three times or more."""
    settled, inner = [], callback.settle

    def settle():
        before = callback.node.metrics().exchanges_done
        inner()
        settled.append(steps())
        assert callback.node.metrics().exchanges_done >= before + 3

    callback.settle = settle
    return settled


def counts(callback):
    figures = callback.node.metrics()
    return figures.steps, figures.samples


class Play(Launched):
    """``gossip run EXAMPLE --folder FOLDER`` in ``folder``; ``kill`` is SIGKILL.

    With ``--alone`` the example makes no Node, which ``gossip run`` reports as a mistake, so ``python`` runs it.
    """

    def __init__(self, script, folder, *args, seed=None, environment=None):
        number = len(list(folder.glob("*.out")))
        self.folder, self.log = folder, Log(folder / f"{number}.jsonl")
        self.steps, self.end_s = None, 0.0  # The steps at the latest look, and the deadline of the next one.
        options = ["--quiet", "--threads", "1", "--log", self.log.path, *(["--seed", seed] if seed else [])]
        launcher = [] if "--alone" in args else ["-m", "gossip", "run", *options]
        command = [sys.executable, *launcher, EXAMPLES / script, "--folder", folder, *args]
        super().__init__(number, folder, *command, **environment or {})

    def until(self, what):
        """Wait until ``what()`` is true, and return its value. If the process ends first, fail with its errors."""
        while not (found := what()):
            assert self.process.poll() is None, self.said()
            self.wait()
        return found

    def wait(self):
        """Wait a moment; fail if the process has taken no step for PATIENCE_S. The total time has no limit."""
        steps, now = self.log.figure("steps"), time.monotonic()
        if steps != self.steps:
            self.steps, self.end_s = steps, now + PATIENCE_S
        assert now < self.end_s, f"no step for {PATIENCE_S:g} s: {self.said()}"
        time.sleep(0.2)

    @property
    def address(self):
        return self.until(lambda: self.log.addresses)[0]

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
        return super().result()
