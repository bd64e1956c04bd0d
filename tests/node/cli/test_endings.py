"""`gossip run`: how it ends."""

import importlib
import json
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from node.cli import main as cli
from tests.harness import warm
from tests.node.commands import NODE, gossip
from tests.node.pretended import script_of

# Note that a Node was made, as Node does, but without the import of torch.
MADE = "from node import running; running.note_made()"
UNSTEPPED = f"{MADE}; running.note_unstepped()"
NODELESS = (
    "gossip: {script} has ended and made no Node, so it was in no swarm. "
    "Put 'with Node(model, optimizer) as node:' around its loop.\n"
)
STEPLESS = "gossip: {script} has trained without node.step(), so it has mixed with nobody.\n"


def in_a_process(text):
    """Return a script that runs this text in a process of its own."""
    return f"import subprocess, sys; subprocess.run([sys.executable, '-c', {text!r}], check=True)"


ENDS = {
    "no node": ("print('trained')", 2, NODELESS), "no node, exit 0": ("import sys; sys.exit(0)", 2, NODELESS),
    "no node, exit 4": ("import sys; sys.exit(4)", 4, ""),
    "no node, exit with a text": ("import sys; sys.exit('no data')", 1, "no data\n"), "a node": (NODE, 0, ""),
    "a node in a process": (in_a_process(MADE), 0, ""), "no step": (UNSTEPPED, 2, STEPLESS),
    "no step in a process": (in_a_process(UNSTEPPED), 2, STEPLESS), "^C": ("raise KeyboardInterrupt", 130, ""),
    "config": ("from gossip.errors import *; raise ConfigError('codec is unknown.')", 2, "gossip: codec is unknown.\n"),
    "local": ("from gossip.errors import *; raise LocalError('Port 7 is in use.')", 3, "gossip: Port 7 is in use.\n"),
    "fault": ("from gossip.errors import *; raise FaultError('A fault.')", 4, "gossip: A fault.\n"),
    "refused": ("from gossip.errors import *; raise RefusedError('secret', 'Wrong.')", 3, "gossip: Wrong.\n"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "code", "told"), ENDS.values(), ids=ENDS)
def test_the_exit_code_says_who_has_to_act_and_a_sentence_what_was_forgotten(tmp_path, text, code, told):
    script = script_of(tmp_path, text)
    done = gossip("run", script)
    assert (done.returncode, done.stderr) == (code, told.format(script=script))


TELLING = """
    import json, sys
    print(json.dumps([__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], relative]))
"""


@pytest.mark.parametrize("module", ["package.train", "package", "alone"])
def test_a_module_runs_as_python_itself_runs_it(tmp_path, module):
    package = tmp_path / "package"
    package.mkdir()
    script_of(package, "value = 7", "__init__.py")
    told = textwrap.dedent(TELLING)
    for name in ("train.py", "__main__.py"):
        script_of(package, f"from . import value as relative\n{told}\n{MADE}", name)
    script_of(tmp_path, f"relative = None\n{told}\n{MADE}", "alone.py")
    words = "-m", module, "--rate", "0.1", "-m"
    ours = gossip("run", *words, cwd=tmp_path)
    theirs = warm.run(*words, cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("absent", "There is no module absent to run"),
        ("package.absent", "There is no module package.absent to run"),
        ("package", "There is no module package to run"),
        ("package.train.deeper", "There is no module package.train.deeper to run"),
        ("package/train.py", "-m takes the name of a module, as package.train, not package/train.py: leave -m out"),
        ("alone.py", "-m takes the name of a module, as package.train, not alone.py: leave -m out to run a file."),
    ],
)
def test_what_is_no_module_is_refused_before_anything_of_it_runs(tmp_path, module, told):
    (tmp_path / "package").mkdir()
    for name in ("alone.py", "package/__init__.py", "package/train.py"):
        script_of(tmp_path, "" if name.endswith("__init__.py") else "print('ran')", name)
    done = gossip("run", "-m", module, cwd=tmp_path)
    assert (done.returncode, done.stdout.replace("ran\n", "")) == (2, "")
    assert done.stderr.startswith(f"gossip: {told}")
    assert done.stderr.count("\n") == 1


class Clock:
    """A clock that only sleep() moves."""

    now = 0.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """Return the clock of a script that imports for a minute."""
    clock = Clock()
    monkeypatch.setattr(cli, "time", clock)
    monkeypatch.setattr(cli, "is_importing", lambda _thread: clock.now < 60.0)
    return clock


def test_a_script_without_a_node_is_told_so_five_seconds_after_its_last_import(clock, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.running, "has_made_node", lambda: False)
    cli.tell_of_missing_node(Path("train.py"), log := tmp_path / "log.jsonl")
    assert 64.0 < clock.now < 66.0
    said = "train.py has run for 5 s since its last import and has made no Node yet"
    assert said in capsys.readouterr().err
    (row,) = map(json.loads, log.read_text().splitlines())
    assert row["event"] == "nodeless"
    assert said in row["sentence"]


def test_a_script_with_a_node_is_told_nothing_while_it_runs(clock, monkeypatch, capsys):
    monkeypatch.setattr(cli.running, "has_made_node", lambda: clock.now > 62.0)
    cli.tell_of_missing_node(Path("train.py"), None)
    assert capsys.readouterr().err == ""


def test_a_thread_that_imports_is_seen(tmp_path, monkeypatch, until):
    go = str(tmp_path / "go")
    script_of(tmp_path, f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.01)", "slow_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    thread = threading.Thread(target=lambda: importlib.import_module("slow_module"))
    thread.start()
    until(lambda: cli.is_importing(thread), 30.0)
    (tmp_path / "go").touch()
    thread.join()
    assert not cli.is_importing(threading.current_thread())


@pytest.mark.parametrize("way", ["script", "module"])
def test_a_script_that_raises_ends_with_code_1_and_its_own_traceback(tmp_path, way):
    script = script_of(
        tmp_path,
        """
        class Node:
            def __enter__(self): return self
            def __exit__(self, *_): print("left")
        with Node():
            {}["weights"]
        """,
    )
    words = [script] if way == "script" else ["-m", "train"]
    done = gossip("run", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "left\n"
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{script}", line 6, in <module>\n')
    assert done.stderr.endswith("KeyError: 'weights'\n")
    assert "runpy" not in done.stderr


def test_a_script_that_does_not_parse_is_shown_where_it_breaks(tmp_path):
    done = gossip("run", script_of(tmp_path, "loss = = 3"))
    assert done.returncode == 1
    assert "loss = = 3" in done.stderr
    assert "runpy" not in done.stderr


def test_a_sigterm_that_an_import_swallows_ends_the_script_where_it_would_train(tmp_path):
    text = """
import os, signal, time
import torch
from torch import nn
from node import Node
try:  # as libraries do around what they can do without
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
except BaseException:
    print("swallowed", flush=True)
with Node(nn.Linear(4, 2)) as node:
    print("trains", flush=True)
    for _ in range(500):
        node.step()
        time.sleep(0.01)
"""
    done = gossip("run", script_of(tmp_path, text))
    assert done.stdout.split() == ["swallowed"]
    assert done.returncode == 143


def test_sigterm_unwinds_the_script_and_ends_with_143(tmp_path):
    script = script_of(
        tmp_path,
        """
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("left", flush=True)
        """,
    )
    arguments = [sys.executable, "-m", "gossip", "run", script]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "left\n"
    assert process.returncode == 143


def test_a_second_interrupt_while_the_interpreter_ends_cuts_it_short_without_a_traceback(tmp_path):
    script = script_of(
        tmp_path,
        """
        import atexit, signal, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background
        atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    arguments = [sys.executable, "-m", "gossip", "run", script]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in ("ready\n", "ending\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


def test_the_demo_without_scikit_learn_says_how_to_get_it(monkeypatch, called):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = called("demo")
    assert done.returncode == 3
    assert done.stderr.endswith("pip install 'gossip-trainer[examples]'.\n")
