"""`gossip local`, and the demo that it stages with a swarm of processes on this machine."""

import contextlib
import functools
import json
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.child import Child
from node.cli import demo, demo_job, local
from tests.harness import warm
from tests.node.cli.test_agreement import Ended
from tests.node.pretended import pretended, script_of

pytestmark = pytest.mark.usefixtures("warm_nodes")


@pytest.fixture
def local_command(called):
    """`gossip local` as a user types it, in this process."""
    return functools.partial(called, "local")


# -- gossip local ------------------------------------------------------------------------------------------------------
def test_a_local_swarm_has_one_seed_and_one_thread_each(tmp_path, local_command, monkeypatch):
    script = pretended(
        tmp_path,
        """
        progress.tick(1.0, lambda: figures(12, 100))
        progress.write_event(2.0, "alone", "This node is alone.")
        progress.close(3.0, figures(34, 100))
        print("noise")
        print(json.dumps([bool(seeds), os.environ["OMP_NUM_THREADS"], os.environ["PYTHONHASHSEED"], sys.argv[1:]]))
        sys.exit(4 if "--fail" in sys.argv and seeds is None else 0)
        """,
    )
    monkeypatch.setenv("GOSSIP_SEEDS", "h:1")  # must not reach the processes
    done = local_command("-n", "3", "--log-dir", tmp_path / "logs", script, "--fail")
    assert done.returncode == 4  # The worst of them.
    results = sorted(line for line in done.stdout.splitlines() if "noise" not in line)
    own = '"1", "0", ["--fail"]]'
    assert results == [f"node 0: [false, {own}", f"node 1: [true, {own}", f"node 2: [true, {own}"]
    assert "node 1: This node is alone." in done.stderr
    assert [row.split("│")[1:4] for row in done.stderr.splitlines() if row.startswith("│")] == [
        [f" {number}    ", " 34    ", " 544     "] for number in range(3)
    ]
    assert len((tmp_path / "logs" / "node-2.jsonl").read_text().splitlines()) == 4


def test_a_local_swarm_ends_with_how_far_its_models_agree(tmp_path, local_command):
    script = pretended(
        tmp_path,
        """
        progress.tick(1.0, lambda: figures(12, 100))
        progress.write_event(2.0, "settled", "Settled.", digest="ab", distance=0.0, tensor="", steps=12)
        progress.close(3.0, figures(12, 100))
        """,
    )
    done = local_command("-n", "2", script)
    assert done.stderr.rstrip().splitlines()[-2] == "The nodes agree to the bit."


def test_a_local_swarm_runs_a_module(tmp_path, local_command, monkeypatch):
    (tmp_path / "package").mkdir()
    pretended(tmp_path / "package", "print(__name__, __spec__.name, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    done = local_command("-n", "2", "-m", "package.train", "--fail")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"node {n}: __main__ package.train ['--fail']" for n in range(2)]


@pytest.mark.parametrize(
    ("options", "waits"), [([], ["2", "600"]), (["--wait-for", "1"], ["1", "600"]), (["--wait-s", "7.5"], ["2", "7.5"])]
)
def test_a_local_swarm_trains_when_all_are_here_unless_told_otherwise(tmp_path, local_command, options, waits):
    script = pretended(
        tmp_path, 'print(json.dumps([os.environ.get("GOSSIP_WAIT_FOR"), os.environ.get("GOSSIP_WAIT_S")]))'
    )
    done = local_command("-n", "2", *options, script)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line.partition(": ")[2]) for line in done.stdout.splitlines()] == [waits, waits]


def test_a_local_swarm_waits_for_no_more_than_it_starts(tmp_path, local_command):
    done = local_command("-n", "2", "--wait-for", "3", pretended(tmp_path, ""))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gossip: --wait-for 3 waits for more members than -n 2 starts: lower it or raise -n.\n"


def test_scripts_without_a_node_are_named_and_no_table_of_zeros_is_shown(tmp_path, local_command):
    done = local_command("-n", "2", script_of(tmp_path, "print('trained')"))
    assert done.returncode == 2
    for number in range(2):
        assert (
            f"node {number} ended with code 2:\n  gossip: {tmp_path}/train.py has ended and made no Node" in done.stderr
        )
    assert "│" not in done.stderr


def test_what_the_scripts_print_is_shown_line_by_line_while_they_run(tmp_path):
    script = pretended(
        tmp_path,
        """
        print("trains")
        sys.stdout.write("one\\rtwo\\nhalf")
        sys.stdout.flush()
        while not os.path.exists(sys.argv[1]): time.sleep(0.02)
        print(" and whole")
        sys.stdout.write("last")
        """,
    )
    words = ("-m", "gossip", "local", "-n", "2", script, tmp_path / "go")
    with warm.Python(*words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while_they_run = sorted(process.stdout.readline() for _ in range(4))
        assert while_they_run == sorted(f"node {number}: {line}\n" for number in (0, 1) for line in ("trains", "two"))
        (tmp_path / "go").touch()
        rest = process.stdout.read().splitlines()
    assert sorted(rest) == sorted(f"node {number}: {line}" for number in (0, 1) for line in ("half and whole", "last"))


def test_on_a_terminal_prints_stand_above_the_live_lines_and_in_a_pipe_they_are_alone(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    with local.Screen(SimpleNamespace(children=[])) as screen:
        screen.print("node 0: in a file")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        screen.print("node 0: on a terminal")
    said = capsys.readouterr()
    assert said.out == "node 0: in a file\n"
    assert "node 0: on a terminal" in said.err
    assert "in a file" not in said.err


@pytest.mark.parametrize("is_free_again", [False, True])
def test_a_port_that_another_program_took_is_replaced(tmp_path, monkeypatch, capsys, is_free_again):
    script = pretended(tmp_path, "progress.close(1.0, figures(1, 1)); print('done')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = iter([server.getsockname()[1], local.free_port()])
        monkeypatch.setattr(local, "free_port", lambda: next(ports))
        if is_free_again:  # when we look
            monkeypatch.setattr(local, "is_taken", lambda port: False)
        code = local.run_local(script, [], {}, nodes=2, threads=1, log_dir=None)
    assert code == 0
    assert set(capsys.readouterr().out.splitlines()) == {"node 0: done", "node 1: done"}


def test_a_node_that_fails_is_shown_with_its_traceback_while_the_others_go_on(tmp_path, monkeypatch):
    shown = tmp_path / "shown"
    script = pretended(
        tmp_path,
        f"""
        if seeds: raise ValueError("broke here")
        for _ in range(600):
            if os.path.exists({str(shown)!r}): sys.exit(0)
            time.sleep(0.05)
        sys.exit(5)
        """,
    )
    said = []

    def say(_screen, sentence):
        said.append(sentence)
        if "broke here" in sentence:
            shown.touch()

    monkeypatch.setattr(local.Screen, "say", say)
    assert local.run_local(script, [], {}, nodes=2, threads=1, log_dir=None) == 1  # Node 0 ends with code 0.
    (told,) = [text for text in said if "node 1 ended with code" in text]  # Lines of ten seconds have two spaces.
    assert told.startswith("node 1 ended with code 1:\n  Traceback (most recent call last):\n")
    assert told.endswith("\n  ValueError: broke here")


def test_a_node_that_loads_for_long_says_for_how_long_and_then_what_it_waits_for(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(local.time, "monotonic", lambda: now_s)
    child = Child(2, None, tmp_path / "log", tmp_path / "out", tmp_path / "err")
    monkeypatch.setattr(Child, "code", property(lambda self: None))
    now_s = 142.0
    assert child.line() == "node 2  starting: no Node yet, 42 s so far"
    child.read({"event": "listening", "address": "h:1"})
    assert child.start_s == 42.0
    assert child.line() == "node 2  listens on h:1, and looks for weights"
    child.read({"event": "joined", "sentence": "Took the weights."})
    child.read({"event": "progress", "steps": 0, "members_alive": 2})
    assert child.line() == "node 2  Took the weights. 2 members are here; no step yet, 42 s so far"
    child.read({"event": "progress", "steps": 0, "members_alive": 1})
    assert child.line() == "node 2  Took the weights. No other member is here; no step yet, 42 s so far"


def test_sigterm_ends_every_process_of_a_local_swarm(tmp_path, until):
    script = pretended(
        tmp_path,
        """
        from pathlib import Path
        Path(sys.argv[1], str(os.getpid())).touch()
        time.sleep(60)
        """,
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    words = ("-m", "gossip", "local", "-n", "2", script, pids)
    with warm.Python(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: len(list(pids.iterdir())) == 2, 30.0)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 143
    assert not any(Path("/proc", pid.name).exists() for pid in pids.iterdir())


@pytest.fixture
def said_over(monkeypatch, capsys):
    """Return a function that shows nodes at each of these times, by a function to the line of each, without a terminal.

    It returns the lines that are printed.
    """

    def show(times_s, *nodes):
        clock = SimpleNamespace(now_s=0.0)
        monkeypatch.setattr(local.time, "monotonic", lambda: clock.now_s)
        children = [SimpleNamespace(line=lambda node=node: node(clock.now_s)) for node in nodes]
        with local.Screen(SimpleNamespace(children=children)) as screen:
            for clock.now_s in times_s:
                screen.show()
        return capsys.readouterr().err.splitlines()

    return show


def test_where_there_is_no_terminal_a_node_is_shown_every_ten_seconds_and_no_more_once_it_stands(said_over):
    times_s = [tenth / 10 for tenth in range(605)]
    lines = said_over(times_s, lambda _: "node 0  ended with code 0", lambda now_s: f"node 1  step {10 * now_s:.0f}")
    assert lines.count("node 0  ended with code 0") == 1
    assert [line for line in lines if "node 1" in line] == [f"node 1  step {step}" for step in range(0, 605, 100)]


def test_a_long_wait_is_told_in_a_file_as_it_doubles(said_over):
    times_s = range(0, 310, 10)
    lines = said_over(times_s, lambda now_s: f"node 1  starting: no Node yet, {now_s:.0f} s so far")
    assert [line.split()[-4] for line in lines] == ["0", "10", "20", "40", "70", "130", "260"]


# -- gossip demo -------------------------------------------------------------------------------------------------------
PLOT = """
    from pathlib import Path

    first, joined = Path(os.environ["PLOT"], "first"), Path(os.environ["PLOT"], "joined")
    begins = seeds is None or seeds == first.read_text()
    assert os.environ.get("GOSSIP_WAIT_FOR") == ("3" if begins else None)  # all three, before anybody trains
    assert sys.argv[-2:] == ["--members", "4"]  # the newcomer as well, before anybody ends
    half = int(sys.argv[2]) // 2
    if seeds is None:
        joined.unlink(missing_ok=True)  # of a demo before this one
        first.write_text(f"127.0.0.1:{{server.getsockname()[1]}}")
    elif seeds != first.read_text():  # the newcomer, through another than the first
        progress.write_event(0.5, "joined", "Took the weights.")
        joined.touch()
    if "GOSSIP_PAGE" in os.environ:
        progress.write_event(0.2, "page", "The page of this node: http://" + os.environ["GOSSIP_PAGE"] + "/")
    progress.tick(1.0, lambda: figures(10, half))
    while seeds is None or not joined.exists():  # the first stays until it is killed
        time.sleep(0.02)
    progress.close(50.0, figures(40, 2 * half))
    print(json.dumps({{"accuracy": {accuracy}, "consensus_distance": 0.01}}))
"""


@pytest.fixture
def plot(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("PLOT", str(tmp_path))
    return lambda accuracy: pretended(tmp_path, textwrap.dedent(PLOT).format(accuracy=accuracy))


def test_the_demo_kills_the_seed_half_way_and_a_newcomer_joins_through_a_living_node(plot, capsys):
    assert demo.run_demo(nodes=3, as_json=True, limit_s=60, job=plot(0.97)) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["ok"]
    assert [(row["node"], row["killed"], row["exit_code"]) for row in outcome["nodes"]] == [
        (0, True, 128 + 9), (1, False, 0), (2, False, 0), (3, False, 0),
    ]  # fmt: skip
    assert [row["accuracy"] for row in outcome["nodes"]] == [None, 0.97, 0.97, 0.97]
    told = "\n".join(outcome["events"])
    assert "node 0 (the seed) killed with -9 at 24,000 samples" in told
    assert "node 3 starts, and knows nothing but the address of node " in told
    assert "node 3: Took the weights." in told


def test_the_demos_page_is_a_survivors_and_a_browser_shows_it_where_that_was_asked_for(plot, capsys, monkeypatch):
    pytest.importorskip("h11", reason="the page needs gossip-trainer[page]")
    pytest.importorskip("prometheus_client", reason="the page needs gossip-trainer[page]")
    opened = []
    monkeypatch.setattr(demo.webbrowser, "open", opened.append)
    for opens in (False, True):
        assert demo.run_demo(nodes=3, as_json=True, limit_s=60, job=plot(0.97), page=True, opens=opens) == 0
        told = "\n".join(json.loads(capsys.readouterr().out)["events"])
        assert told.count("node 1: The page of this node: http://127.0.0.1:0/") == told.count("The page of") == 1
        assert opened == ["http://127.0.0.1:0/"] * opens


def test_the_demo_fails_when_a_node_has_not_learned(plot, capsys):
    assert demo.run_demo(nodes=3, as_json=False, limit_s=60, job=plot(0.95)) == 1
    shown = capsys.readouterr().out
    assert shown.count("95.0%") == 3
    assert "Not every survivor and the newcomer reached 96%" in shown


def test_the_demo_ends_in_time_and_says_so(tmp_path, capsys):
    pytest.importorskip("sklearn")
    job = pretended(tmp_path, "time.sleep(60)")
    assert demo.run_demo(nodes=3, as_json=True, limit_s=1, job=job) == 1
    assert "time is up after " in json.loads(capsys.readouterr().out)["events"][-1]


@pytest.fixture
def is_late_at(monkeypatch):
    """Return a function that asks whether a demo of 90 s is late: at a time, with so many samples trained."""
    now_s = 0.0
    monkeypatch.setattr(demo.time, "monotonic", lambda: now_s)
    children = []
    stage = demo.Stage(SimpleNamespace(children=children), None)

    def is_late(at_s, trained):
        nonlocal now_s
        now_s = at_s
        return stage.is_late(90.0, trained)

    is_late.children = children
    return is_late


def test_the_demo_tells_what_nodes_logged_between_its_last_look_and_their_end():
    child = SimpleNamespace(number=0, address=None, figures={}, code=0, start_s=None)
    looks = [[], [(child, {"event": "joined", "sentence": "Took the weights."})]]
    swarm = SimpleNamespace(children=[child], running=[], add=lambda **_: child, new_rows=lambda: looks.pop(0))
    stage = demo.Stage(swarm, SimpleNamespace(show=lambda: swarm.running.clear(), say=lambda _: None))
    swarm.running.append(child)
    stage.play(1, 60.0)
    assert "node 0: Took the weights." in stage.outcome.events[-1]


def test_the_demo_gives_a_slow_machine_more_time_for_as_long_as_something_happens(is_late_at):
    assert not any(is_late_at(float(second), second) for second in range(900))  # One sample a second.
    assert is_late_at(899.0 + demo.STILL_S + 1, 899)
    assert is_late_at(901.0, 5_000)  # Ten times the limit.


def test_the_demos_limits_grow_with_the_time_that_a_node_took_to_start(is_late_at):
    is_late_at.children.append(SimpleNamespace(start_s=10 * demo.START_S))
    assert not is_late_at(500.0, 1)
    still_s = 10 * demo.STILL_S  # On a machine that is ten times as slow.
    assert not is_late_at(500.0 + still_s - 1, 1)
    assert is_late_at(500.0 + still_s + 1, 1)


def test_nodes_of_the_demo_train_on_until_the_newcomer_has_come(monkeypatch, capsys):
    """On a busy machine a newcomer may still load its libraries when the others have trained everything."""
    pytest.importorskip("sklearn")

    class Swarm(contextlib.ExitStack):
        finished, steps = False, 0

        def __init__(self, *_):
            super().__init__()

        @property
        def swarm_samples(self):
            return 20 * self.steps

        @property
        def members(self):  # The first is forgotten before the newcomer comes.
            ids = "abc" if self.steps < 50 else "bc" if self.steps < 150 else "bcd"
            return [SimpleNamespace(id=one) for one in ids]

        def shard(self, data, batch_size):
            return [(data[0][:batch_size], data[1][:batch_size])] * 90

        def step(self, **_):
            Swarm.steps += 1

        def settle(self, *_, **__):
            return 0.0

        def finish(self):
            pass

    monkeypatch.setattr(demo_job, "Node", Swarm)
    monkeypatch.setattr(sys, "argv", ["job", "--samples", "1000", "--step-delay", "0", "--members", "4"])
    demo_job.main()
    assert Swarm.steps == 150
    assert json.loads(capsys.readouterr().out)["consensus_distance"] == 0.0
    # A node that starts now is the newcomer itself: it waits for no member, and never met the dead one.
    Swarm.steps = 40
    demo_job.main()
    assert Swarm.steps == 50
    demo_job.main()  # If all is trained already, it trains nothing.
    assert Swarm.steps == 50


def test_a_newcomer_that_found_everything_trained_is_no_failure_and_a_survivor_is(tmp_path):
    child = Ended(3, None, tmp_path / "log", tmp_path / "out", tmp_path / "err")
    (tmp_path / "out").write_text('{"accuracy": 0.97}\n')
    assert demo.describe(child, False, newcomer=True)["ok"]
    assert not demo.describe(child, False, newcomer=False)["ok"]


def test_the_demo_shows_why_a_node_broke_instead_of_waiting_for_the_rest(tmp_path, capsys):
    pytest.importorskip("sklearn")
    job = pretended(tmp_path, "if seeds: raise KeyError('weights')\ntime.sleep(60)")
    assert demo.run_demo(nodes=3, as_json=True, limit_s=60, job=job) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["events"][-1].endswith("ended with code 1")
    assert "KeyError: 'weights'" in shown.err
