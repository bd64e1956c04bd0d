"""torchrun and mpirun: the ranks need rank 0 until they have met, and no longer."""

import subprocess
import sys

import pytest

from tests.engines import launched
from tests.engines.launched import ENDLESS, EXAMPLES, Log, comes_back, goes_on, kill
from tests.harness.ports import free_port

pytestmark = pytest.mark.engines

EXAMPLE = EXAMPLES / "ranks_digits.py"
ALONE = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_oob_tcp_if_include": "lo"}  # Run Open MPI over loopback.
EARLY = 12_000  # Samples after which a swarm has learned most of the task.


def comes_back_alone(launch, folder, log, others):
    """Start rank 0 without its launcher: it keeps its id, takes the swarm's weights, and ends the run."""
    enough = str(others[0].figure("swarm_samples") + 10_000)
    again = launch(
        "again", folder, sys.executable, EXAMPLE, "--rank", "0", "--states", folder / "states", "--samples", enough,
        "--step-delay", "0.005", GOSSIP_LOG=str(log.path),
    )  # fmt: skip
    result = again.result()
    assert log.ids == [result["node"]] * 2, "its directory says who it is"
    assert log.rows("joined"), "the swarm's weights, and not its own"
    assert result["accuracy"] > 0.9


def test_torchruns_first_host_dies_with_its_store_and_the_others_go_on(launch, tmp_path):
    logs, port = [Log(tmp_path / f"{rank}.jsonl") for rank in range(3)], free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3", "--master-addr", "127.0.0.1"]
    hosts = [
        launch(
            f"host-{rank}", tmp_path, *torchrun, "--master-port", port, "--node-rank", rank,
            EXAMPLE, "--states", tmp_path / "states", *ENDLESS, GOSSIP_LOG=str(logs[rank].path),
        )
        for rank in range(3)
    ]  # fmt: skip
    for host, log in zip(hosts, logs, strict=True):
        host.until(lambda log=log: log.mixed(members=3) and log.figure("swarm_samples") > EARLY)
    hosts[0].end()  # SIGKILL for the agent, the store and the node.
    goes_on(logs[1:])
    comes_back_alone(launch, tmp_path, logs[0], logs[1:])
    goes_on(logs[1:])
    assert [log.lives for log in logs] == [2, 1, 1]
    assert all(host.process.poll() is None for host in hosts[1:])


def test_mpiruns_rank_0_dies_and_the_others_go_on(launch, tmp_path, needs):
    needs("mpirun", "apt-get install openmpi-bin")
    logs = [Log(tmp_path / f"{rank}.jsonl") for rank in range(3)]
    node = 'GOSSIP_LOG=$OMPI_COMM_WORLD_RANK.jsonl exec "$0" "$@"'
    mpirun = ["mpirun", "--enable-recovery", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]
    job = launch(
        "mpirun", tmp_path, *mpirun, "sh", "-c", node, sys.executable, EXAMPLE, "--states", tmp_path / "states",
        *ENDLESS, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **ALONE,
    )  # fmt: skip
    for log in logs:
        job.until(lambda log=log: log.mixed(members=3) and log.figure("swarm_samples") > EARLY)
    kill(logs[0].pid)
    goes_on(logs[1:])
    assert job.process.poll() is None
    comes_back_alone(launch, tmp_path, logs[0], logs[1:])
    goes_on(logs[1:])
    assert [log.lives for log in logs] == [2, 1, 1]


def test_without_recovery_mpirun_ends_all_when_one_dies_and_with_it_says_0(needs, tmp_path):
    needs("mpirun", "apt-get install openmpi-bin")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    rank = 'if [ $OMPI_COMM_WORLD_RANK = 0 ]; then kill -9 $$; fi; sleep 3; touch "$0-lived"'
    for name, options, lived, code in (("without", [], False, 137), ("with", ["--enable-recovery"], True, 0)):
        done = subprocess.run(
            [*mpirun, *options, "sh", "-c", rank, str(tmp_path / name)],
            env=launched.environment(**ALONE), capture_output=True, timeout=launched.PATIENCE_S, check=False,
        )  # fmt: skip
        assert (tmp_path / f"{name}-lived").exists() is lived
        assert done.returncode == code, "what the nodes say themselves is to be looked at, and not mpirun's code"


def test_a_host_of_two_ranks_is_started_again_as_who_it_was_and_the_other_host_goes_on(launch, tmp_path):
    """Two levels: DistributedDataParallel inside a host, whose ranks start again together, and a swarm of hosts."""
    logs = [Log(tmp_path / f"{name}.jsonl") for name in "ab"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    hosts = [
        launch(
            log.path.stem, tmp_path, *torchrun, "--max-restarts", "1", EXAMPLES.parent / "ddp_digits.py", *ENDLESS,
            GOSSIP_LOG=str(log.path), GOSSIP_SEEDS=f"@{tmp_path}/seeds", GOSSIP_STATE_DIR=str(tmp_path / log.path.stem),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # A shared store would give the second life addresses of the first.
        )
        for log in logs
    ]  # fmt: skip
    hosts[0].until(lambda: logs[0].addresses)
    (tmp_path / "seeds").write_text(logs[0].addresses[0])
    for host, log in zip(hosts, logs, strict=True):
        host.until(lambda log=log: log.mixed())
    (second,) = [pid for pid in launched.children(hosts[0].pid) if launched.variable_of(pid, "RANK") == "1"]
    kill(second)
    comes_back(hosts[0], logs[0])
    goes_on(logs)
    assert logs[1].lives == 1
    assert logs[0].learned
