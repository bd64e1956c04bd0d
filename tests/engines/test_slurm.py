"""Slurm's own daemons: an array of nodes, a task killed and requeued, one that is out of time, and all to the end."""

import os
import shutil
import signal

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
        *ENDLESS, folder=work, check=True, SWARM_HOST="127.0.0.1",
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

    # Slurm does the same --signal seconds before the time limit, which is at least a minute.
    slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_1", check=True)
    checkpoint = logs[1].path.parent / "run.safetensors"
    until(checkpoint.exists, said)
    until(lambda: logs[1].rows("final"), said)
    until(lambda: logs[1].lives == 2 and logs[1].mixed(members=3), said)
    assert [len(set(log.ids)) for log in logs] == [1, 1, 1], "their directories say who they are"
    assert [log.lives for log in logs] == [2, 2, 1], "who was not asked to leave did not"
    assert "is not loaded" in logs[1].rows("load")[0]["sentence"], "the swarm is ahead of what it saved"


@pytest.fixture
def turn(launch, tmp_path):
    """``turn(node)`` runs swarm.sbatch as Slurm would, with a shell command as the node; it notes calls of scontrol."""
    programs = tmp_path / "programs"
    programs.mkdir()

    def start(node):
        for name, command in (("gossip", node), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
            (programs / name).write_text(f"#!/bin/sh\n{command}\n")
            (programs / name).chmod(0o755)
        return launch(
            "turn", tmp_path, "bash", ROOT / "deploy" / "slurm" / "swarm.sbatch", "train.py",
            PATH=f"{programs}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(tmp_path), SLURM_ARRAY_JOB_ID="7",
            SLURM_ARRAY_TASK_ID="2", SWARM_HOST="127.0.0.1",
        )  # fmt: skip

    return start


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, False), (2, False), (143, False), (3, True), (137, True), (139, True)]
)
def test_another_turn_is_asked_for_where_it_is_worth_one(turn, tmp_path, code, again):
    assert turn(f"exit {code}").process.wait(60) == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7_2\n" if again else "")
    assert (tmp_path / "swarm-7" / "seeds").read_text() == "127.0.0.1:7702\n"


@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_node_that_is_asked_to_leave_is_waited_for(turn, tmp_path, number, again):
    """The script waits for its node after either signal. It requeues the job at the time limit, not after scancel."""
    saves = (
        f"trap 'sleep 1; touch {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    )
    job = turn(saves)
    job.until((tmp_path / "ready").exists)
    kill(job.pid, number)
    assert job.process.wait(60) == 143
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "asked").exists() is again
