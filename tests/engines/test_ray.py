"""Ray restarts a killed actor, or a killed worker of Ray Train; the other nodes lose at most an exchange."""

import json
import sys

import pytest

from tests.engines.hosts import HOME, documented, found
from tests.engines.launched import ENDLESS, EXAMPLES, PATIENCE_S, Log, comes_back, goes_on, kill, needs_package
from tests.harness.ports import free_port

pytestmark = [pytest.mark.engines, needs_package("ray")]

# Without a mode, a token in this home, of another local Ray, would lock the job out of the cluster.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
# Declare a silent host dead after seconds; with Ray's defaults that takes most of a minute.
QUICK = {"RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "2"}
KILL = "import ray, sys; ray.init(sys.argv[1], namespace='swarm'); ray.kill(ray.get_actor('node-0'), no_restart=False)"


@pytest.fixture
def cluster(launch, tmp_path):
    """Start Ray on this machine, and return its address."""
    port = free_port()
    head = launch(
        "head", tmp_path, sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address", "127.0.0.1", "--port", port, "--num-cpus", "3", "--include-dashboard", "false",
        "--object-store-memory", "80000000", "--disable-usage-stats", **QUIET,
    )  # fmt: skip
    head.until(lambda: "Ray runtime started" in head.out.read_text())
    return f"127.0.0.1:{port}"


def test_the_first_actor_is_killed_and_replaced_and_nobody_else_stops(launch, tmp_path, cluster):
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(3)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "ray_digits.py", "--nodes", "3", "--address", cluster,
        "--states", tmp_path, *ENDLESS, **QUIET,
    )  # fmt: skip
    job.until(lambda: all(log.mixed(members=3) for log in logs))
    killed = launch("kill", tmp_path, sys.executable, "-c", KILL, cluster, **QUIET)
    assert killed.process.wait(120) == 0, killed.said()
    goes_on(logs[1:])
    comes_back(job, logs[0], members=3)
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1, 1]
    assert all(log.learned for log in logs)


@needs_package("pyarrow")
def test_the_first_worker_of_ray_train_is_killed_and_starts_again_alone(launch, tmp_path, cluster):
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(3)]
    command = [
        sys.executable, EXAMPLES / "ray_train_digits.py", "--nodes", "3", "--address", cluster,
        "--states", tmp_path, "--storage", tmp_path / "storage",
    ]  # fmt: skip
    job = launch("job", tmp_path, *command, *ENDLESS, **QUIET)
    job.until(lambda: all(log.mixed(members=3) for log in logs))
    kill(logs[0].pid)
    goes_on(logs[1:])
    comes_back(job, logs[0], members=3)
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1, 1]
    assert all(log.learned for log in logs)
    job.until(lambda: logs[1].figure("swarm_samples") > 100_000)  # Many times what nodes train between checkpoints.
    samples = str(logs[1].figure("swarm_samples") + 20_000)
    job.end()

    again = launch("again", tmp_path, *command, "--samples", samples, **QUIET)
    assert again.process.wait(PATIENCE_S) == 0, again.said()
    results = [json.loads(line) for line in again.out.read_text().splitlines() if line.startswith("{")]
    assert [result["node"] for result in results] == [log.ids[0] for log in logs], "their directories say who they are"
    assert all(result["accuracy"] > 0.9 for result in results)
    trained = sum(log.figure("samples") for log in logs)
    assert trained < results[0]["swarm_samples"] - 20_000, "the checkpoints count"


@pytest.mark.netns
def test_actors_on_three_hosts_are_one_swarm_and_one_whose_host_is_lost_joins_from_another(hosts):
    machines = hosts(3)
    for number, machine in enumerate(machines):
        machine.add_nat()
        begun = machine.run(f"cd / && {documented('Ray', min(number, 1))} --num-cpus 4", variables=QUIET | QUICK)
        assert begun.process.wait(60) == 0, begun.said()
    first, *others = machines
    job = first.run(
        documented("Ray", 2), *ENDLESS, variables=QUIET,
        **{"/var/gossip": f"{HOME}/states", "/etc/gossip": HOME, "nodes 4": "nodes 3"},
    )  # fmt: skip
    logs = [job.until(lambda number=number: found(machines, f"states/node-{number}")) for number in range(3)]
    job.until(lambda: all(log.mixed(members=3) for log, _ in logs))
    assert {machine for _, machine in logs} == set(machines), "one on each"
    assert all(log.addresses[-1].startswith(f"{machine.address}:") for log, machine in logs)
    assert first.processes("ray::Addresses"), "not where it may be lost together with a node that asks it"

    gone = others[0]
    (lost,) = [number for number, (_, machine) in enumerate(logs) if machine is gone]
    gone.off()
    stay = [log for log, machine in logs if machine is not gone]
    goes_on(stay)
    again, elsewhere = job.until(lambda: found([one for one in machines if one is not gone], f"states/node-{lost}"))
    job.until(lambda: again.mixed(members=3))
    assert again.rows("joined"), "the swarm's weights"
    assert again.addresses[-1].startswith(f"{elsewhere.address}:")
    assert [log.lives for log in stay] == [1, 1]
