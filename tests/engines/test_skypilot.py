"""SkyPilot's tasks as its own shell script starts them, on machines that are namespaces, without a cloud."""

import json
import re
import subprocess
import sys

import pytest

from node.identity.keys import new_secret
from tests.engines.hosts import documented, together
from tests.engines.launched import ENDLESS, ROOT, environment, goes_on, needs_package, trains_on
from tests.reliability.namespaces import lab

pytestmark = [pytest.mark.engines, pytest.mark.netns, needs_package("sky")]

SCRIPT = """
import json, sys, yaml
from sky.skylet.log_lib import make_task_bash_script
task = yaml.safe_load(open(sys.argv[1]))
print(make_task_bash_script(task["run"].rstrip() + sys.argv[2], json.loads(sys.argv[3])))
"""
PUBLIC = "198.51.100.{}"


@pytest.fixture
def start(tmp_path):
    """``start(machine, "swarm", **variables)`` runs a task of that file there, with these variables."""

    def run(machine, name, **variables):
        (machine.folder / "gossip").symlink_to(sys.prefix)  # The task's `setup` installs to this folder.
        (machine.folder / "sky_workdir").symlink_to(ROOT)
        file = ROOT / "deploy" / "skypilot" / f"{name}.yaml"
        more = " ".join(["", *ENDLESS])
        script = subprocess.run(
            [sys.executable, "-c", SCRIPT, file, more, json.dumps(variables)], check=True, text=True,
            env=environment(HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1"), stdout=subprocess.PIPE,
        ).stdout  # fmt: skip
        (machine.folder / "task.sh").write_text(script)
        return machine.run("bash task.sh")

    return run


def test_machines_of_a_cluster_and_a_spot_machine_that_reaches_their_public_addresses_are_one_swarm(hosts, start):
    machines = hosts(3)
    for number, machine in enumerate(machines):
        machine.add_nat()
        lab.run("ip", "-n", machine.space, "address", "add", f"{PUBLIC.format(number + 1)}/24", "dev", "eth0")
    *cluster, spot = machines
    lab.run("ip", "-n", spot.space, "address", "del", f"{spot.address}/24", "dev", "eth0")
    secret = new_secret()
    shared = {
        "GOSSIP_SECRET": secret, "SKYPILOT_NODE_IPS": "\n".join(machine.address for machine in cluster),
        "SKYPILOT_NUM_NODES": len(cluster), "SKYPILOT_NUM_GPUS_PER_NODE": 0,
    }  # fmt: skip
    jobs = [start(machine, "swarm", SKYPILOT_NODE_RANK=machine.number, **shared) for machine in cluster]
    together(cluster, jobs)
    seeds = re.search(r"GOSSIP_SEEDS=(\S+)", documented("SkyPilot"))[1].split(",")[: len(cluster)]  # IP0:7700, IP1:7700
    dialled = ",".join(text.replace(f"IP{number}", PUBLIC.format(number + 1)) for number, text in enumerate(seeds))
    job = start(spot, "spot", GOSSIP_SECRET=secret, GOSSIP_SEEDS=dialled)
    job.until(lambda: spot.log.mixed(members=3))
    assert spot.log.rows("joined"), "the swarm's weights"
    job.until(lambda: all(machine.log.mixed(members=3) for machine in machines))

    cluster[0].off()  # The first address in the list of seeds.
    goes_on([cluster[1].log, spot.log])
    job.until(lambda: spot.log.figure("members_alive") == 2)
    spot.off()
    trains_on(jobs[1], cluster[1].log)
