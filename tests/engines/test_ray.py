"""Ray starts an actor again that was killed, and the other actors notice a lost exchange at most."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.engines.launched import ENDLESS, EXAMPLES, Log, goes_on

pytestmark = pytest.mark.engines

QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
KILL = "import ray, sys; ray.init(sys.argv[1], namespace='swarm'); ray.kill(ray.get_actor('node-0'), no_restart=False)"


def test_the_first_actor_is_killed_and_replaced_and_nobody_else_stops(launch, tmp_path, free_port):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not here: make test-engines")
    where = f"127.0.0.1:{free_port}"
    head = launch(
        "head", tmp_path, sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address", "127.0.0.1", "--port", free_port, "--num-cpus", "3", "--include-dashboard", "false",
        "--object-store-memory", "80000000", "--disable-usage-stats", **QUIET,
    )  # fmt: skip
    head.until(lambda: "Ray runtime started" in head.out.read_text())
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(3)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "ray_digits.py", "--nodes", "3", "--address", where,
        "--states", tmp_path, "--samples", ENDLESS, "--step-delay", "0.005", **QUIET,
    )  # fmt: skip
    job.until(lambda: all(log.mixed(members=3) for log in logs))
    killed = launch("kill", tmp_path, sys.executable, "-c", KILL, where, **QUIET)
    assert killed.process.wait(120) == 0, killed.said()
    goes_on(logs[1:])
    job.until(lambda: logs[0].lives == 2 and logs[0].mixed(members=3))
    assert len(set(logs[0].ids)) == 1, "its directory says who it is"
    assert logs[0].rows("joined"), "the swarm's weights"
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1, 1]
    assert all(log.learned for log in logs)
