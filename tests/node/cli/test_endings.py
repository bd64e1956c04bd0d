"""`gossip run`: how it ends."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from node.cli import main as cli
from tests.harness import warm
from tests.node.commands import NODE, gossip, refused
from tests.node.pretended import script_of


def test_a_script_without_a_node_is_told_that_it_was_in_no_swarm_and_ends_with_code_2(tmp_path):
    for text in ("print('trained')", "import sys; sys.exit(0)"):
        done = gossip("run", script_of(tmp_path, text))
        assert done.returncode == 2
        assert done.stderr.endswith(
            "train.py has ended and made no Node, so it was in no swarm. "
            "Put 'with Node(model, optimizer) as node:' around its loop.\n"
        )
    done = gossip("run", script_of(tmp_path, "import sys; sys.exit(4)"))
    assert (done.returncode, done.stderr) == (4, ""), "it says why itself"


# Note that a Node was made, as Node does, but without the import of torch.
MADE = "from node import running; running.note_made()"


@pytest.mark.parametrize(
    "text", [NODE, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MADE!r}], check=True)"]
)
def test_a_node_counts_in_the_script_and_in_a_process_that_it_starts(tmp_path, text):
    done = gossip("run", script_of(tmp_path, text))
    assert (done.returncode, done.stderr) == (0, "")


UNSTEPPED = "from node import running; running.note_made(); running.note_unstepped()"


@pytest.mark.parametrize(
    "text", [UNSTEPPED, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {UNSTEPPED!r}], check=True)"]
)
def test_a_script_that_trains_without_a_step_of_its_node_ends_with_code_2(tmp_path, text):
    done = gossip("run", script_of(tmp_path, text))
    assert done.returncode == 2
    assert done.stderr.endswith("train.py has trained without node.step(), so it has mixed with nobody.\n")


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


def test_a_module_that_raises_ends_with_code_1_and_its_own_traceback(tmp_path):
    file = script_of(tmp_path, "import absent_library", "train.py")
    done = gossip("run", "-m", "train", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{file}", line 1, in <module>\n')
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'absent_library'\n")


def test_a_script_that_trains_without_a_node_is_told_so_while_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "NODELESS_S", 0.2)
    monkeypatch.setattr(cli.running, "has_made_node", lambda: False)
    imports = iter([True, True, False, False])
    monkeypatch.setattr(cli, "is_importing", lambda _thread: next(imports, False))
    log = tmp_path / "log.jsonl"
    cli.tell_of_missing_node(Path("train.py"), log)
    assert next(imports, None) is None
    said = "train.py has run for 0.2 s since its last import and has made no Node yet"
    assert said in capsys.readouterr().err
    (row,) = map(json.loads, log.read_text().splitlines())
    assert row["event"] == "nodeless"
    assert said in row["sentence"]


class Clock:
    """A clock that only sleep() moves."""

    now = 0.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_script_without_a_node_is_told_so_five_seconds_after_its_last_import(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(cli, "time", clock)
    monkeypatch.setattr(cli.running, "has_made_node", lambda: False)
    monkeypatch.setattr(cli, "is_importing", lambda _thread: clock.now < 60.0)
    cli.tell_of_missing_node(Path("train.py"), None)
    assert "has made no Node yet" in capsys.readouterr().err
    assert 64.0 < clock.now < 66.0


def test_a_script_with_a_node_is_told_nothing_while_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(cli, "NODELESS_S", 0.2)
    monkeypatch.setattr(cli.running, "has_made_node", lambda: True)
    cli.tell_of_missing_node(Path("train.py"), None)
    assert capsys.readouterr().err == ""


def test_a_thread_that_imports_is_seen(tmp_path, monkeypatch):
    go = str(tmp_path / "go")
    script_of(tmp_path, f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.01)", "slow_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    thread = threading.Thread(target=lambda: importlib.import_module("slow_module"))
    thread.start()
    until = time.monotonic() + 30
    while not cli.is_importing(thread):
        assert time.monotonic() < until
    (tmp_path / "go").touch()
    thread.join()
    assert not cli.is_importing(threading.current_thread())


def test_a_script_that_raises_ends_with_code_1_and_its_own_traceback(tmp_path):
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
    done = gossip("run", script)
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


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import sys; sys.exit(5)", 5, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("from gossip.errors import *; raise ConfigError('codec is unknown.')", 2, "gossip: codec is unknown.\n"),
        ("from gossip.errors import *; raise LocalError('Port 7 is in use.')", 3, "gossip: Port 7 is in use.\n"),
        ("from gossip.errors import *; raise FaultError('A fault ended it.')", 4, "gossip: A fault ended it.\n"),
        ("from gossip.errors import *; raise RefusedError('secret', 'Wrong secret.')", 3, "gossip: Wrong secret.\n"),
    ],
)
def test_the_exit_code_says_who_has_to_act(tmp_path, text, code, told):
    done = gossip("run", script_of(tmp_path, text))
    assert (done.returncode, done.stderr) == (code, told)


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


def test_the_demo_without_scikit_learn_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, told = refused(monkeypatch, capsys, "demo")
    assert code == 3
    assert told.endswith("pip install 'gossip-trainer[examples]'.\n")
