"""node.local.LocalSwarm: it starts, adds, kills, stops and reads nodes, and its end always ends them."""

import gc
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gossip.errors import ConfigError, LocalError
from node import local
from node.local import LocalSwarm
from tests.harness import warm
from tests.node.pretended import pretended, script_of

pytestmark = pytest.mark.usefixtures("warm_nodes")

# A node that trains until it is stopped: it prints the seeds that it was given, and ends in order on SIGTERM.
LASTING = """
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(json.dumps([seeds, sys.argv[1:], os.environ.get("GOSSIP_CONFIG")]), flush=True)
    for step in range(1, 3_000):
        progress.tick(float(step), lambda: figures(step, 100 * step))
        time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path):
    return pretended(tmp_path, LASTING)


def trains(swarm, *numbers):
    return lambda: all(swarm.metrics()[number].get("steps", 0) >= 2 for number in numbers)


def told(child):
    """Return what the script of a node printed at its start."""
    return json.loads(child.printed)


# -- a swarm -----------------------------------------------------------------------------------------------------------
def test_one_is_killed_another_joins_through_who_lives_and_all_is_read(script):
    with LocalSwarm(script, ["--rate", 0.1], nodes=2, config={"mix_every_steps": 2}) as swarm:
        assert swarm.wait(trains(swarm, 0, 1))
        first, second = swarm.children
        seeds, arguments, config = told(second)
        assert (seeds, arguments) == (first.address, ["--rate", "0.1"])
        assert Path(config).read_text() == "mix_every_steps = 2\n"
        assert told(first)[0] is None
        swarm.kill(0)
        assert [child.number for child in swarm.running] == [1]
        third = swarm.add()
        assert swarm.wait(trains(swarm, 2)), "who was killed by us is no error"
        assert told(third)[0] == second.address
        swarm.leave(1)
        assert swarm.wait(lambda: len(swarm.running) == 1)
        assert (first.code, second.code, third.code) == (137, 143, None)
    assert third.code == 143
    rows = swarm.history("progress")
    assert {row["node"] for row in rows} == {0, 1, 2}
    assert [row["t"] for row in rows if row["node"] == 2] == sorted(row["t"] for row in rows if row["node"] == 2)
    assert {"listening", "progress"} <= {row["event"] for row in swarm.history()}
    assert swarm.metrics()[0]["samples"] == 16 * swarm.metrics()[0]["steps"]


def test_cells_of_a_notebook_do_without_a_block_and_one_that_is_run_again_ends_what_it_began(script):
    swarm = LocalSwarm(script, nodes=1).start()
    swarm.start()
    (child,) = swarm.children
    folder = child.log.parent
    assert folder.exists()
    del swarm
    gc.collect()
    assert child.code == 143
    assert not folder.exists()


def test_a_closed_swarm_starts_nothing(script):
    swarm = LocalSwarm(script, nodes=1)
    swarm.close()
    for call in (swarm.start, swarm.add):
        with pytest.raises(LocalError, match="This LocalSwarm is closed, and its nodes have ended: make a new one"):
            call()


def test_the_end_of_the_program_ends_every_node(script, tmp_path):
    program = f"""
        from node.local import LocalSwarm
        swarm = LocalSwarm({str(script)!r}, nodes=1).start()
        print(swarm.children[0].process.pid, swarm.children[0].log.parent, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=120
    )
    pid, folder = done.stdout.split()
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(folder).exists()


def test_it_is_watched_until_all_have_ended(tmp_path):
    script = pretended(tmp_path, "progress.close(1.0, figures(7, 7)); print('done')")
    with LocalSwarm(script, nodes=1, folder=tmp_path / "logs") as swarm:
        for turn in swarm.watch(0.1):
            assert turn is swarm
            last = swarm.running
        assert last == []
    assert swarm.children[0].printed == "done\n"
    assert swarm.history("final") == [{"node": 0, **swarm.metrics()[0]}]
    assert (tmp_path / "logs" / "node-0.jsonl").exists(), "a folder that was named is kept"


def test_a_wait_says_whether_its_condition_was_met(script, tmp_path):
    with LocalSwarm(script, nodes=1) as swarm:
        assert swarm.wait(lambda: False, timeout_s=0.2) is False
        assert swarm.running, "it has not waited for the end"
    short = pretended(tmp_path, "progress.close(1.0, figures(7, 7))")
    with LocalSwarm(short, nodes=1) as swarm:
        assert swarm.wait(lambda: not swarm.running) is True, "the end meets it"
        assert swarm.wait(lambda: False) is False, "nothing meets it any more"
        assert swarm.wait() is True


# -- what cannot work --------------------------------------------------------------------------------------------------
def test_a_node_that_breaks_is_an_error_that_shows_what_it_said(tmp_path):
    script = pretended(tmp_path, "raise KeyError('weights')")
    with LocalSwarm(script, nodes=1) as swarm, pytest.raises(LocalError, match=r"Node 0 ended with code 1:") as raised:
        swarm.wait()
    assert "KeyError: 'weights'" in str(raised.value)


def test_a_first_node_that_breaks_has_nobody_wait_for_it(tmp_path):
    script = script_of(tmp_path, "import sys; sys.exit('no data here')")
    with pytest.raises(LocalError, match="no data here"), LocalSwarm(script, nodes=2):
        pass


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"script": "nowhere.py"}, r"There is no script nowhere.py: name a Python file\."),
        ({"nodes": 65}, "nodes is 65: take 0 to 64"),
        ({"config": {"mix_evry_steps": 2}}, "mix_every_steps"),
        ({"config": {"mix_every_steps": None}}, r"leave out what is None\."),
        ({"config": {"graph": Path("graph")}}, r"config cannot be written as TOML"),
        ({"config": "nowhere.toml"}, r"Cannot read the config nowhere\.toml"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(arguments, sentence, tmp_path):
    given = {"script": script_of(tmp_path, "")} | arguments
    with pytest.raises(ConfigError, match=sentence):
        LocalSwarm(given.pop("script"), **given)


def test_no_more_are_added_than_one_machine_is_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MAX_NODES", 1)
    with LocalSwarm(script_of(tmp_path, "import time; time.sleep(60)"), nodes=1) as swarm:
        with pytest.raises(LocalError, match=r"1 nodes run on this machine: kill one"):
            swarm.add(seed="127.0.0.1:1")
        swarm.kill(0)
        with pytest.raises(TypeError, match="'wait_four' is no option of a node"):
            swarm.add(seed="127.0.0.1:1", wait_four=3)
        assert swarm.add(seed="127.0.0.1:1").number == 1


def test_what_is_read_late_of_one_log_stands_where_it_belongs(tmp_path):
    swarm = LocalSwarm(script_of(tmp_path, ""), folder=tmp_path)
    swarm.children += [
        local.Child(number, None, tmp_path / f"{number}.jsonl", tmp_path, tmp_path) for number in range(2)
    ]
    (tmp_path / "1.jsonl").write_text('{"t": 5.0, "event": "alone"}\n')
    assert len(swarm.history()) == 1
    (tmp_path / "0.jsonl").write_text('{"t": 4.0, "event": "alone"}\n')
    assert [(row["node"], row["t"]) for row in swarm.history()] == [(0, 4.0), (1, 5.0)]
    swarm.children.clear()


def test_a_node_that_there_is_not_is_named(tmp_path):
    with pytest.raises(LocalError, match=r"There is no node 3: this swarm has had 0"):
        LocalSwarm(script_of(tmp_path, "")).kill(3)


# -- processes and logs ------------------------------------------------------------------------------------------------
def test_a_process_that_ignores_sigterm_is_killed_with_all_that_it_started(tmp_path, monkeypatch, until):
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    script = script_of(
        tmp_path,
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(worker.pid, flush=True)
        time.sleep(60)
        """,
    )
    with LocalSwarm(script, folder=tmp_path) as swarm:
        child = swarm.add()
        until(lambda: local.last_lines(child.out, 1))
        worker = int(local.last_lines(child.out, 1)[0])
    assert child.code == 128 + signal.SIGKILL
    until(lambda: not warm.is_running(worker))  # The kernel ends a killed process when it next runs it.


def test_a_row_still_being_written_is_left_for_later(tmp_path):
    script = script_of(tmp_path, "")
    with LocalSwarm(script, folder=tmp_path) as swarm:
        child = swarm.add()
        child.process.wait()
        child.log.write_text('{"t":1,"event":"listening","address":"h:1"}\n{"t":2,"event":"al')
        assert [row["t"] for row in child.new_rows()] == [1]
        assert child.new_rows() == []
        with child.log.open("a") as log:
            log.write('one"}\n')
        assert [row["event"] for row in child.new_rows()] == ["alone"]
        with child.log.open("a") as log:  # What a node logs in a day.
            log.writelines(f'{{"t":{t},"event":"progress","steps":{t}}}\n' for t in range(100_000))
        assert swarm.metrics()[0]["steps"] == 99_999
    assert child.address == "h:1"
