"""Launches over several hosts: the address to listen at, the required secret, and the members to wait for."""

import pytest
from torch import nn

from gossip.errors import ConfigError, LocalError
from gossip.ids import Address
from node import Node
from node.options import NodeOptions
from node.settings import Settings, advertised_address
from node.transport.launch import other_hosts
from tests.node.conftest import QUICK

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
TORCHRUN = {**MASTER, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "RANK": "1"}


SRUN = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_STEP_NUM_NODES": "2"}
COORDINATOR = Address("10.0.0.1", 29501)


@pytest.mark.parametrize(
    ("environment", "coordinator"),
    [
        (TORCHRUN, COORDINATOR),
        ({**MASTER, "WORLD_SIZE": "2", "RANK": "0"}, COORDINATOR),  # The variables of Kubernetes' training operators.
        ({**MASTER, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, COORDINATOR),
        (SRUN, Address("10.0.0.9", 29500)),
        ({}, None),
        ({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}, None),
        ({**TORCHRUN, "MASTER_ADDR": "localhost"}, None),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, None),
        ({**MASTER, "WORLD_SIZE": "1"}, None),
        ({**MASTER, "WORLD_SIZE": "many"}, None),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}, None),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, None),
    ],
)
def test_a_launch_over_several_hosts_is_known_by_its_sizes_and_one_on_one_host_names_none(environment, coordinator):
    assert other_hosts(environment) == coordinator


# -- settings ----------------------------------------------------------------------------------------------------------
def gathered(environment, **given):
    return Settings.gather(NodeOptions(**given), environment, launched=True)


@pytest.fixture
def routes(monkeypatch):
    """Give this machine the address 10.0.0.2 towards the coordinator, and 192.168.7.5 towards all others."""
    known = {"10.0.0.1": "10.0.0.2", "host0": "127.0.0.1"}
    monkeypatch.setattr("node.settings.routed", lambda target, _v6: known.get(target.host, "192.168.7.5"))


INSECURE = {**TORCHRUN, "GOSSIP_INSECURE": "1"}


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize(
    ("environment", "listen"),
    [
        (INSECURE, Address("10.0.0.2", 0)),
        ({**INSECURE, "MASTER_ADDR": "host0"}, Address("192.168.7.5", 0)),  # A name that is loopback here.
        ({**TORCHRUN, "GOSSIP_LISTEN": "127.0.0.1:0"}, Address("127.0.0.1", 0)),
        ({**TORCHRUN, "GOSSIP_LISTEN": "none"}, None),
        ({}, Address("127.0.0.1", 0)),
    ],
)
def test_a_node_listens_where_it_is_told_or_else_where_the_other_hosts_of_its_launch_reach_it(environment, listen):
    assert gathered(environment).listen == listen


@pytest.mark.usefixtures("routes")
def test_a_launched_node_with_a_secret_shows_its_address_on_the_way_to_the_other_hosts(secret):
    launched = {**TORCHRUN, "GOSSIP_SECRET_FILE": str(secret)}
    assert gathered(launched).listen == Address("10.0.0.2", 0)
    everywhere = gathered({**launched, "GOSSIP_LISTEN": "0.0.0.0:7700"})
    assert advertised_address(everywhere, everywhere.listen) == Address("10.0.0.2", 7700)


@pytest.mark.usefixtures("routes")
def test_a_node_that_returns_without_its_launcher_shows_its_address_on_the_way_to_members_that_it_knew(secret):
    """Its machine's default route may lead into another network, where no member reaches it."""
    settings, anywhere = gathered({"GOSSIP_SECRET_FILE": str(secret)}), Address("0.0.0.0", 7700)
    known = [Address("127.0.0.1", 7701), Address("10.0.0.1", 7700)]
    assert advertised_address(settings, anywhere, known) == Address("10.0.0.2", 7700)
    assert advertised_address(settings, anywhere, known[:1]) == Address("192.168.7.5", 7700), (
        "nothing is learned from loopback"
    )
    seeded = gathered({"GOSSIP_SECRET_FILE": str(secret), "GOSSIP_SEEDS": "10.9.9.9:7700"})
    assert advertised_address(seeded, anywhere, known) == Address("192.168.7.5", 7700), (
        "a seed is said, and counts first"
    )


@pytest.mark.usefixtures("routes")
def test_without_a_secret_a_launch_over_several_hosts_is_refused_with_how_to_give_one():
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:29501 is one of them.*GOSSIP_SECRET_FILE"):
        gathered(TORCHRUN)


# -- whom it waits for -------------------------------------------------------------------------------------------------
def test_a_node_whose_launched_companions_never_come_fails_instead_of_training_alone(monkeypatch):
    for name, value in {**TORCHRUN, "GOSSIP_LISTEN": "127.0.0.1:0"}.items():
        monkeypatch.setenv(name, value)
    node = Node(nn.Linear(4, 2), config=QUICK, wait_for=3, wait_s=0.3)
    with pytest.raises(
        LocalError, match=r"Waited 0\.3 s for 3 members .* none of the others came .* does not train alone"
    ):
        node.start()
