"""A Slurm cluster of one machine: munged, slurmctld and slurmd over loopback, with their own files."""

import os
import shutil
import subprocess

from tests.engines.launched import PATIENCE_S, environment
from tests.harness.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """``sbatch``, ``scontrol`` and ``squeue`` of a cluster whose daemons are children of this process."""

    def __init__(self, folder, launch):
        self.folder = folder
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(parents=True, mode=0o755)
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(folder=folder, controller=free_port(), daemon=free_port()))
        # Slurm loads the plugin but does not use it, since a container may have no cgroups.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.variables = {"SLURM_CONF": str(config)}
        munge = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        options = [f"--{option}={folder}/munge/{name}" for option, name in munge.items()]
        self.daemons = [launch("munged", folder, shutil.which("munged"), "--foreground", "--force", *options)]
        self.daemons[0].until((folder / "munge" / "socket").exists)
        for name in ("slurmctld", "slurmd"):
            more = ["-N", "localhost"] if name == "slurmd" else []
            self.daemons.append(launch(name, folder, shutil.which(name), "-D", "-f", config, *more, **self.variables))
        self.daemons[-1].until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T"))

    def said(self):
        return "\n".join(daemon.said() for daemon in self.daemons)

    def run(self, *command, folder=None, check=False, **variables):
        done = subprocess.run(
            command, env=environment(**self.variables, **variables), cwd=folder, timeout=PATIENCE_S, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr
        return done.stdout
