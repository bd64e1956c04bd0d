"""Real processes on emulated links. The assertions hold at any speed of the machine."""

import multiprocessing
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import __main__ as command
from benchmarks.replay.links import EmulatedLinks, missing
from benchmarks.replay.play import Playing, looks, read
from sim.learning.learners import Learners
from tests.replay.test_plan import plan

pytestmark = pytest.mark.netns


@pytest.fixture(autouse=True)
def possible():
    if why := missing():
        pytest.skip(why)


def played(planned, folder, look=lambda links: None):
    """Play a plan to its end; call ``look`` at each sentence that it says."""
    with EmulatedLinks(len(planned.names)) as links:
        playing = Playing(planned, links, folder, lambda sentence: look(links))
        playing.run()
    return playing


def test_a_node_alone_trains_bit_for_bit_as_the_simulated_peer_does(tmp_path):
    alone = plan(peers=1, duration_s=4, **{"task.model": "linear", "compute.step_s": 0.05})
    (body,) = played(alone, tmp_path).bodies
    steps = [row["steps"] for row in looks(read(body))]
    learners = Learners(alone.scenario.task, alone.names, alone.scenario.seed)
    vectors = np.fromfile(body.folder / "vectors.f32", np.float32).reshape(-1, learners.elements)
    assert len(steps) >= 3
    for before, after, vector in zip([0, *steps], steps, vectors, strict=False):
        learners.train(np.array([0]), np.array([after - before]))
        assert np.array_equal(learners.matrix[0], vector)


def test_over_tls_they_mix_as_well(tmp_path):
    changes = {"task.model": "linear", "network.tls": True, "gossip.mix_every_steps": 4, "compute.step_s": 0.05}
    assert played(plan(peers=2, duration_s=10, **changes), tmp_path).seen().mixes
    assert (tmp_path / "swarm.secret").exists()


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_nodes_have_the_congestion_control_of_the_scenario(tmp_path, congestion):
    if congestion not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text():
        pytest.skip(f"this kernel has no {congestion}")
    two = plan(peers=2, duration_s=6, **{"task.model": "linear", "network.congestion": congestion})
    seen = []

    def look(links):
        with links.inside(1):
            seen.append(subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout)

    played(two, tmp_path, look)
    words = set(" ".join(seen).split())
    assert words & {"cubic", "bbr"} == {congestion}


@pytest.mark.parametrize(("ends", "states"), [({"farewell": 1.0}, ["left"]), ({}, ["dead"])])
def test_a_node_that_says_goodbye_has_left_and_one_that_is_killed_is_dead(tmp_path, ends, states):
    trace = tmp_path / "trace.csv"
    trace.write_text("peer,from_s,until_s\n0,0,\n1,0,6\n")
    two = plan(peers=2, duration_s=20, churn={"trace": str(trace), **ends}, **{"task.model": "linear"})
    seen = played(two, tmp_path).seen()
    assert [change.state for change in seen.changes if change.observer == 0][-1:] == states
    assert len(seen.deaths()) == (not ends)


def test_kills_returns_and_cuts_are_played_and_the_report_has_both_sides(monkeypatch, capsys, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("peer,from_s,until_s\n0,0,\n1,0,6\n1,9,\n2,0,\n")
    file = tmp_path / "hard.toml"
    file.write_text(
        f"""
        name = "hard"
        peers = 3
        duration_s = 20
        task = {{ model = "linear" }}
        gossip = {{ preset = "wan", mix_every_steps = 4 }}
        compute = {{ step_s = 0.05 }}
        churn = {{ trace = "{trace}" }}
        membership = {{ start = "seed", join_every_s = 0.5 }}
        [network]
        latency = {{ kind = "constant", value_ms = 5 }}
        rate_mbit_s = 50
        partitions = [{{ at_s = 12, until_s = 14 }}]
        """
    )
    assert command.main([str(file), "--seeds", "1", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "hard" in shown
    assert "kill to dead s, median" in shown
    assert "| healing s |" in (tmp_path / "out" / "gaps.md").read_text() or "disturbed" in shown
    assert '"name": "hard"' in (tmp_path / "out" / "hard.json").read_text()
    assert multiprocessing.active_children() == []


def test_stopped_it_says_what_is_kept_and_leaves_no_process(monkeypatch, capsys, tmp_path):
    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Playing, "go", stop)
    file = tmp_path / "any.toml"
    file.write_text("duration_s = 5\npeers = 2\nmembership = { start = 'seed' }\ntask = { model = 'linear' }\n")
    assert command.main([str(file), "--seeds", "1"]) == 130
    assert "Stopped; nothing was saved" in capsys.readouterr().err
    assert multiprocessing.active_children() == []
