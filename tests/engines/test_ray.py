"""Ray restarts a killed actor, and the other actors lose at most an exchange."""

import sys

import pytest

from tests.engines.hosts import HOME, documented, found
from tests.engines.launched import ENDLESS, EXAMPLES, Log, comes_back, goes_on, needs_package
from tests.harness.ports import free_port

pytestmark = [pytest.mark.engines, needs_package("ray")]

QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
# Declare a silent host dead after seconds; with Ray's defaults that takes most of a minute.
QUICK = {"RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "2"}
KILL = "import ray, sys; ray.init(sys.argv[1], namespace='swarm'); ray.kill(ray.get_actor('node-0'), no_restart=False)"


def test_the_first_actor_is_killed_and_replaced_and_nobody_else_stops(launch, tmp_path):
    port = free_port()
    where = f"127.0.0.1:{port}"
    head = launch(
        "head", tmp_path, sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address", "127.0.0.1", "--port", port, "--num-cpus", "3", "--include-dashboard", "false",
        "--object-store-memory", "80000000", "--disable-usage-stats", **QUIET,
    )  # fmt: skip
    head.until(lambda: "Ray runtime started" in head.out.read_text())
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(3)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "ray_digits.py", "--nodes", "3", "--address", where,
        "--states", tmp_path, *ENDLESS, **QUIET,
    )  # fmt: skip
    job.until(lambda: all(log.mixed(members=3) for log in logs))
    killed = launch("kill", tmp_path, sys.executable, "-c", KILL, where, **QUIET)
    assert killed.process.wait(120) == 0, killed.said()
    goes_on(logs[1:])
    comes_back(job, logs[0], members=3)
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1, 1]
    assert all(log.learned for log in logs)


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
