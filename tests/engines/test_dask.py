"""Dask gives a task whose worker was killed to another worker, and the other tasks go on."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.engines.launched import ENDLESS, EXAMPLES, Log, goes_on, kill

pytestmark = pytest.mark.engines

# A worker that does not reach its scheduler within 30 s is given up for good, which a busy machine brings about.
PATIENT = {f"DASK_DISTRIBUTED__COMM__TIMEOUTS__{name}": "300s" for name in ("CONNECT", "TCP")}


def test_a_workers_process_is_killed_and_its_node_comes_back_in_another(launch, tmp_path):
    if importlib.util.find_spec("distributed") is None:
        pytest.skip("distributed is not here: make test-engines")
    logs = [Log(tmp_path / f"node-{number}" / "log.jsonl") for number in range(2)]
    job = launch(
        "job", tmp_path, sys.executable, EXAMPLES / "dask_digits.py", "--nodes", "2", "--states", tmp_path,
        "--samples", ENDLESS, "--step-delay", "0.005", **PATIENT,
    )  # fmt: skip
    job.until(lambda: all(log.mixed() for log in logs))
    kill(logs[0].pid)
    alone = logs[1].figure("steps")
    job.until(lambda: logs[1].figure("steps") > alone + 50)
    job.until(lambda: logs[0].lives == 2 and logs[0].mixed())
    assert len(set(logs[0].ids)) == 1, "its directory says who it is"
    assert logs[0].rows("joined"), "the swarm's weights"
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1]
    assert all(log.learned for log in logs)
