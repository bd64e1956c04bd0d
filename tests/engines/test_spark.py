"""Spark's barrier stage: one task fails, and all start again as who they were, where the last checkpoint was."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest

from tests.engines.launched import ENDLESS, EXAMPLES, Log, goes_on, kill

pytestmark = pytest.mark.engines


def test_a_task_is_killed_and_all_start_again_where_their_checkpoints_were(launch, tmp_path, needs):
    needs("java", "apt-get install openjdk-17-jre-headless")
    if importlib.util.find_spec("pyspark") is None:
        pytest.skip("pyspark is not here: make test-engines")
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(2)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "spark_digits.py", "--nodes", "2", "--master", "local[2,4]",
        "--states", tmp_path, "--samples", ENDLESS, "--step-delay", "0.005",
        SPARK_LOCAL_IP="127.0.0.1", SPARK_SUBMIT_OPTS="-Dspark.ui.enabled=false", PYSPARK_PYTHON=sys.executable,
    )  # fmt: skip
    job.until(lambda: all(log.mixed() for log in logs))
    job.until(lambda: all((log.path.parent / "run.safetensors").exists() for log in logs))
    kept = [json.loads((log.path.parent / "run.json").read_text())["meta"]["swarm_samples"] for log in logs]
    kill(logs[0].pid)
    job.until(lambda: all(log.lives == 2 and log.mixed() for log in logs))
    assert [len(set(log.ids)) for log in logs] == [1, 1], "their directories say who they are"
    runs = {re.search("run ([0-9a-f]{8})", row["sentence"])[1] for log in logs for row in log.rows("joined")}
    assert sum(len(log.rows("joined")) for log in logs) >= 2, "one of them in each life: the other is who begins"
    assert len(runs) == 1, "the run of the checkpoints goes on, and no other is begun"
    last = [log.rows("progress")[-1] for log in logs]
    assert all(row["swarm_samples"] > row["samples"] + min(kept) / 2 for row in last), "with its count, about"
    goes_on(logs)
    assert all(log.learned for log in logs)
