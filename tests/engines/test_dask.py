"""Dask gives a task whose worker was killed to another worker, and the other tasks go on."""

import sys

import pytest

from tests.engines.hosts import HOME, documented
from tests.engines.launched import ENDLESS, EXAMPLES, Log, comes_back, goes_on, kill, needs_package, trains_on

pytestmark = [pytest.mark.engines, needs_package("distributed")]

# By default Dask gives up a worker that does not reach its scheduler within 30 s, which happens on a busy machine.
PATIENT = {f"DASK_DISTRIBUTED__COMM__TIMEOUTS__{name}": "300s" for name in ("CONNECT", "TCP")}


def test_a_workers_process_is_killed_and_its_node_comes_back_in_another(launch, tmp_path):
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(2)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "dask_digits.py", "--nodes", "2", "--states", tmp_path,
        *ENDLESS, **PATIENT,
    )  # fmt: skip
    job.until(lambda: all(log.mixed() for log in logs))
    kill(logs[0].pid)
    trains_on(job, logs[1])
    comes_back(job, logs[0])
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1]
    assert all(log.learned for log in logs)


@pytest.mark.netns
def test_tasks_on_two_of_three_hosts_are_one_swarm_and_one_whose_host_is_lost_comes_back_on_the_third(hosts, tmp_path):
    machines, states = hosts(3), tmp_path / "shared"
    for machine in machines:
        machine.add_nat()
    first = machines[0]
    first.run(f"cd / && {documented('Dask')}")
    for machine in machines:
        machine.run(f"cd / && {documented('Dask', 1)}")
    job = first.run(
        documented("Dask", 2), *ENDLESS,
        **{"/etc/gossip": HOME, "/shared/gossip": states, "nodes 4": "nodes 2"},
    )  # fmt: skip
    logs = [Log(states / f"node-{number}" / "log.jsonl") for number in range(2)]
    job.until(lambda: all(log.mixed() for log in logs))
    at = [next(machine for machine in machines if log.addresses[-1].startswith(f"{machine.address}:")) for log in logs]
    assert at[0] is not at[1], "a worker has a thread, and a task takes it"

    lost = next(number for number, machine in enumerate(at) if machine is not first)
    at[lost].off()
    trains_on(job, logs[1 - lost])
    comes_back(job, logs[lost])
    (third,) = [machine for machine in machines if machine not in at]
    assert logs[lost].addresses[-1].startswith(f"{third.address}:")
    assert logs[1 - lost].lives == 1
