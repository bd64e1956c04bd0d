"""The other hosts of a launch, according to the environment variables of torchrun, mpirun and Slurm's srun."""

from collections.abc import Mapping

from gossip.ids import Address
from node.transport.tcp import is_loopback

DEFAULT_PORT = 29500  # torchrun's default, used where MASTER_PORT is missing; the route depends on the host alone.
# The number of processes of the launch and on this host: torch.distributed, Open MPI, and MPICH's Hydra.
SIZES = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
)


def other_hosts(environment: Mapping[str, str]) -> Address | None:
    """Return an address on the way to the other hosts of a launch.

    Args:
        environment: The environment variables of this process.

    Returns:
        The launcher's coordinator, as a number or name. None where no launcher started this process, or where all of
        its processes are on this host.
    """
    master = environment.get("MASTER_ADDR", "")
    if master and not is_loopback(master):
        for size, local in SIZES:
            # Some launchers do not count the processes per host, so all may be on other hosts.
            if number_of(environment, size) > max(1, number_of(environment, local)):
                return Address(master, number_of(environment, "MASTER_PORT") or DEFAULT_PORT)
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if launcher and not is_loopback(launcher) and number_of(environment, "SLURM_STEP_NUM_NODES") > 1:
        return Address(launcher, DEFAULT_PORT)
    return None


def number_of(environment: Mapping[str, str], name: str) -> int:
    """Return the number in a variable, or 0 where it is missing or is no number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0
