"""The commands of docs/launching.md over several hosts, which are network namespaces with a folder each."""

import re

import pytest

from tests.engines.hosts import documented, together
from tests.engines.launched import ENDLESS, ROOT, Log, goes_on

pytestmark = pytest.mark.netns


def test_torchruns_ranks_on_three_hosts_are_one_swarm_and_host_0_comes_back_without_it(hosts):
    machines, command = hosts(3), documented("torchrun")
    for machine in machines:
        machine.add_nat()
    jobs = [machine.run(command, *ENDLESS, **{"-rank I": f"-rank {machine.number}"}) for machine in machines]
    together(machines, jobs)
    first, *others = machines
    jobs[0].end()  # SIGKILL for the agent, the store and the node.
    goes_on([machine.log for machine in others])
    enough = others[0].log.figure("swarm_samples") + 3_000
    again = first.run(documented("torchrun", 1), "--samples", enough, "--step-delay", "0.005")
    result = again.result()
    assert first.log.ids == [result["node"]] * 2
    assert first.log.rows("joined"), "the weights of the swarm"
    assert first.log.addresses[-1].startswith(f"{first.address}:")


def test_hosts_of_several_ranks_are_one_swarm(hosts):
    machines, command = hosts(2), documented("torchrun", 2)
    changes = {"--nproc-per-node gpu": "--nproc-per-node 2"}
    jobs = [machine.run(command, *ENDLESS, **changes) for machine in machines]
    together(machines, jobs)


def test_mpiruns_ranks_on_two_hosts_are_one_swarm(hosts, needs, launch, tmp_path):
    needs("mpirun", "apt-get install openmpi-bin")
    machines = hosts(2)
    agent = tmp_path / "agent"  # Replaces ssh, called as AGENT HOST COMMAND.
    spaces = " ".join(f"{machine.address}) space={machine.space};;" for machine in machines)
    agent.write_text(f'#!/bin/sh\ncase $1 in {spaces} esac\nshift\nexec ip netns exec $space sh -c "$*"\n')
    agent.chmod(0o755)
    first = machines[0]
    (first.folder / "HOSTS").write_text("".join(f"{machine.address} slots=1\n" for machine in machines))
    options = (
        f"mpirun --allow-run-as-root --mca plm_rsh_agent {agent} --mca btl self,tcp --mca orte_keep_fqdn_hostnames 1"
    )
    node = 'sh -c \'GOSSIP_LOG=$OMPI_COMM_WORLD_RANK.jsonl exec "$0" "$@"\' python'
    job = first.run(
        documented("mpirun"), *ENDLESS,
        **{"mpirun": options, "HOSTS": "./HOSTS", "python": node},
    )  # fmt: skip
    logs = [Log(first.folder / f"{rank}.jsonl") for rank in range(2)]
    for log, machine in zip(logs, machines, strict=True):
        job.until(lambda log=log: log.mixed(members=2))
        assert log.addresses[-1].startswith(f"{machine.address}:")


def test_tasks_of_slurms_script_on_two_hosts_are_one_swarm(hosts, tmp_path):
    """The batch script as Slurm starts it, in a folder that all share; Slurm itself is in test_slurm.py."""
    machines = hosts(2)
    script = documented("Slurm").splitlines()[1].partition(" ")[2]
    jobs = []
    for machine in machines:
        variables = (
            f"SLURM_SUBMIT_DIR={machines[0].folder} SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID={machine.number} "
            f"SWARM_HOST={machine.address}"
        )
        jobs.append(machine.run(f"{variables} bash {script}", *ENDLESS))
        machine.log = Log(machines[0].folder / "swarm-7" / f"task-{machine.number}" / "log.jsonl")
    together(machines, jobs)


def test_the_variables_of_docker_make_containers_on_two_hosts_one_swarm(hosts):
    """The image's entry point with the variables of the image and of the page, without a container around it."""
    machines = hosts(2)
    given = re.findall(r"-e (\S+)", documented("Docker"))
    image = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    given += re.findall(r"GOSSIP_\w+=[^\s\\]+", image.partition("\nENV ")[2].partition("\n\n")[0])
    assert any(text.startswith("GOSSIP_LISTEN=") for text in given)
    command = f"{' '.join(given)} gossip run examples/digits.py"
    words = {"=HOST:": f"={machines[0].address}:", "/secret": "swarm.secret"}
    jobs = []
    for machine in machines:
        local = {**words, "THIS_HOST": machine.address, "=/state": "=state"}
        jobs.append(machine.run(command, *ENDLESS, **local))
    together(machines, jobs)
