"""Spark's barrier stage: if one task fails, all start again with their ids, from the last checkpoint."""

import json
import sys

import pytest

from tests.engines.hosts import HOME, documented
from tests.engines.launched import ENDLESS, EXAMPLES, Log, goes_on, kill, needs_package

# Ten Java virtual machines on two processors start in half the time without the second compiler.
QUICK = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
# Declare a silent host dead after seconds instead of two minutes.
IMPATIENT = " ".join(
    f"--conf spark.{name}"
    for name in ("network.timeout=15s", "network.timeoutInterval=5s", "executor.heartbeatInterval=2s")
)

pytestmark = [pytest.mark.engines, needs_package("pyspark")]


KEPT_SAMPLES = 20_000  # The checkpoints' count, many times what nodes train while they find each other again.


def checkpoint(log):
    """Return the figures of the checkpoint that a node wrote last; a count of 0 before the first."""
    file = log.path.parent / "run.json"
    return json.loads(file.read_text())["meta"] if file.exists() else {"swarm_samples": 0}


@pytest.fixture(autouse=True)
def spark(needs):
    needs("java", "apt-get install openjdk-17-jre-headless")


def test_a_task_is_killed_and_all_start_again_where_their_checkpoints_were(launch, tmp_path):
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(2)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "spark_digits.py", "--nodes", "2", "--master", "local[2,4]",
        "--states", tmp_path, *ENDLESS,
        SPARK_LOCAL_IP="127.0.0.1", SPARK_SUBMIT_OPTS="-Dspark.ui.enabled=false", PYSPARK_PYTHON=sys.executable,
    )  # fmt: skip
    job.until(lambda: all(log.mixed() for log in logs))
    job.until(lambda: all(checkpoint(log)["swarm_samples"] > KEPT_SAMPLES for log in logs))
    kept = [checkpoint(log) for log in logs]
    kill(logs[0].pid)
    job.until(lambda: all(log.lives >= 2 and log.mixed() for log in logs))
    assert [len(set(log.ids)) for log in logs] == [1, 1], "their directories say who they are"
    assert sum(len(log.rows("joined")) for log in logs) >= 2, "one of them in each life: the other is who begins"
    job.until(lambda: all(checkpoint(log)["samples"] != old["samples"] for log, old in zip(logs, kept, strict=True)))
    assert len({figures["run_id"] for figures in [*kept, *map(checkpoint, logs)]}) == 1, "the checkpoints' run goes on"
    least = min(old["swarm_samples"] for old in kept)
    others = [log.figure("swarm_samples") - log.figure("samples") for log in logs]
    assert min(others) > least / 4, "with its count, of which about half are the other node's"
    goes_on(logs)
    assert all(log.learned for log in logs)


@pytest.mark.netns
def test_tasks_on_two_hosts_are_one_swarm_and_all_start_again_on_the_one_that_is_left(hosts, tmp_path):
    machines, states = hosts(2), tmp_path / "shared"
    variables = QUICK | {"SPARK_WORKER_DIR": f"{HOME}/work", "SPARK_WORKER_CORES": "2"}
    for machine in machines:
        machine.add_nat()
    first, second = machines
    first.run(f"cd / && {documented('Spark')}", variables=variables)
    for machine in machines:
        machine.run(f"cd / && {documented('Spark', 1)}", variables=variables, THIS_HOST=machine.address)
    job = first.run(
        documented("Spark", 2), *ENDLESS, variables=variables,
        **{"/etc/gossip": HOME, "/shared/gossip": states, "nodes 4": "nodes 2", "--master": f"{IMPATIENT} --master"},
    )  # fmt: skip
    logs = [Log(states / f"node-{number}" / "log.jsonl") for number in range(2)]
    job.until(lambda: all(log.mixed() for log in logs))
    assert sorted(log.addresses[-1].partition(":")[0] for log in logs) == [machine.address for machine in machines]
    job.until(lambda: all((log.path.parent / "run.safetensors").exists() for log in logs))
    kept = [checkpoint(log) for log in logs]

    second.off()
    job.until(lambda: all(log.lives >= 2 and log.mixed() for log in logs))
    assert {log.addresses[-1].partition(":")[0] for log in logs} == {first.address}
    assert [len(set(log.ids)) for log in logs] == [1, 1], "their directories say who they are"
    job.until(lambda: all(checkpoint(log)["samples"] != old["samples"] for log, old in zip(logs, kept, strict=True)))
    assert len({figures["run_id"] for figures in [*kept, *map(checkpoint, logs)]}) == 1, "the checkpoints' run goes on"
    goes_on(logs)
