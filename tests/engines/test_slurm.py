"""Slurm's own daemons: an array of nodes, a task killed and requeued, one that is out of time, and all to the end."""

from __future__ import annotations

import os
import shutil

import pytest

from node.identity.keys import new_secret
from tests.engines.launched import ENDLESS, EXAMPLES, ROOT, Log, goes_on, kill, until
from tests.engines.slurm import PROGRAMS, Slurm

pytestmark = pytest.mark.engines


@pytest.fixture
def slurm(launch, tmp_path):
    if os.geteuid():
        pytest.skip("Slurm's daemons start jobs as root alone")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not here: apt-get install slurm-wlm munge")
    made = Slurm(tmp_path / "slurm", launch)
    yield made
    made.run("scancel", "--signal=KILL", "--full", "--user=root")
    made.run("scancel", "--user=root")
    until(lambda: not made.run("squeue", "-h"), made.said)


def test_a_task_that_is_killed_comes_back_as_who_it_was_and_one_out_of_time_saves_and_leaves(slurm, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    secret = work / "swarm.secret"
    secret.touch(mode=0o600)
    secret.write_text(new_secret())
    out = slurm.run(
        "sbatch", "--parsable", "--array=0-2", ROOT / "deploy" / "slurm" / "swarm.sbatch", EXAMPLES / "slurm_digits.py",
        "--samples", ENDLESS, "--step-delay", "0.005", folder=work, check=True, SWARM_HOST="127.0.0.1",
    )  # fmt: skip
    job = out.strip()
    logs = [Log(work / f"swarm-{job}" / f"task-{task}" / "log.jsonl") for task in range(3)]

    def said():
        return "\n".join([slurm.said(), *(path.read_text()[-2000:] for path in work.glob("*.out"))])

    until(lambda: all(log.mixed(members=3) for log in logs), said)

    kill(logs[0].pid)
    goes_on(logs[1:])
    until(lambda: logs[0].lives == 2 and logs[0].mixed(members=3), said)
    assert logs[0].rows("joined"), "the swarm's weights: there was no time to save its own"

    # As Slurm does it --signal seconds before the time limit, which is a minute at least.
    slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_1", check=True)
    checkpoint = logs[1].path.parent / "run.safetensors"
    until(checkpoint.exists, said)
    until(lambda: logs[1].rows("final"), said)
    until(lambda: logs[1].lives == 2 and logs[1].mixed(members=3), said)
    assert [len(set(log.ids)) for log in logs] == [1, 1, 1], "their directories say who they are"
    assert [log.lives for log in logs] == [2, 2, 1], "who was not asked to leave did not"
    assert "is not loaded" in logs[1].rows("load")[0]["sentence"], "the swarm is ahead of what it saved"
