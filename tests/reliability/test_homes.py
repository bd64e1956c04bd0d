"""Nodes at homes mix with each other, also after the last machine that they could dial was killed."""

import subprocess
import sys
import time

import pytest

from tests.engines.launched import ROOT, environment, until
from tests.reliability.home_nodes import are_met, distance, started
from tests.reliability.namespaces import homes
from tests.reliability.street import cells, street


@pytest.mark.netns
def test_two_homes_mix_with_each_other_before_and_after_the_only_public_node_is_killed(tmp_path):
    with homes(1, [2, 2]) as made, started(made, tmp_path) as (public, *inside):
        until(lambda: are_met(inside))
        public.process.end()
        killed_at = time.time() + 5.0  # Exchanges that were in progress are no evidence.
        first, second = inside[:2], inside[2:]
        until(lambda: sum(node.exchanges_with(second, killed_at) for node in first) >= 40)


@pytest.mark.netns
def test_homes_whose_routers_map_each_destination_anew_mix_through_a_relay(tmp_path):
    with (
        homes(2, [1, 1], nat="masquerade fully-random") as made,
        started(made, tmp_path) as (first, _second, one, other),
    ):
        until(lambda: are_met([one, other]))
        first.process.end()
        killed_at = time.time() + 5.0
        until(lambda: one.exchanges_with([other], killed_at) >= 40)


@pytest.mark.netns
def test_machines_with_ipv6_and_firewalls_mix_on_without_the_public_one(tmp_path):
    with homes(0, []) as made:
        for number, has_firewall in enumerate((False, True, True)):
            made.public(number, has_firewall, is_v6=True)
        with started(made, tmp_path) as (public, one, other):
            until(lambda: are_met([one, other]))
            assert {path for _, _, path in one.mixes([other])} <= {"punched", "-"}
            public.process.end()
            killed_at = time.time() + 5.0
            until(lambda: one.exchanges_with([other], killed_at) >= 20)


@pytest.mark.netns
def test_six_homes_stay_one_swarm_without_a_public_node(tmp_path):
    with homes(2, [1] * 6) as made, started(made, tmp_path) as (first, second, *inside):
        until(lambda: are_met(inside))
        time.sleep(20.0)
        ended_at = time.time()
        for public in (first, second):
            public.process.end()
        killed_at = time.time() + 5.0
        time.sleep(25.0)
        for node in inside:
            others = [other for other in inside if other is not node]
            until(lambda node=node, others=others: node.exchanges_with(others, killed_at) >= 20)
        before, after = (distance(inside, since, since + 20.0) for since in (ended_at - 20.0, killed_at))
        print(f"consensus distance: {before:.3g} before, {after:.3g} after")
        assert after <= 1.5 * before


@pytest.mark.netns
def test_a_router_that_opens_ports_makes_its_nodes_dialable_until_they_end(tmp_path):
    """Both nodes of the home listen on one port, of which the router has one. It does not turn connections round."""
    with homes(1, [2, 1], opens_ports=[0]) as made, started(made, tmp_path) as (public, *inside):
        until(lambda: all(home.log.rows("mapped") for home in inside[:2]), public.process.said)
        opened = {home.log.rows("mapped")[0]["sentence"].split()[3] for home in inside[:2]}
        assert len(opened) == 2
        assert all(address.startswith("192.79.0.100:") for address in opened)
        assert made.opened_ports(0) == {int(address.partition(":")[2]) for address in opened}
        until(lambda: are_met(inside))
        public.process.end()
        killed_at = time.time() + 5.0
        until(lambda: all(home.exchanges_with([inside[2]], killed_at) >= 10 for home in inside[:2]))
        until(lambda: inside[0].exchanges_with([inside[1]], killed_at) >= 10)
        for home in inside[:2]:
            home.process.process.terminate()
        until(lambda: made.opened_ports(0) == set())


@pytest.mark.netns
@pytest.mark.parametrize("way", ["by_pcp", "by_pmp", "by_upnp"])
def test_each_protocol_opens_a_port_renews_it_and_gives_it_back(way):
    with homes(0, [1], opens_ports=[0]) as made:
        gateway, nonce = ("", "") if way == "by_upnp" else ("'192.168.0.1', ", ", b'0123456789ab'")
        (space,) = made.machines.values()
        for lease_s, ports in ((600, {7701}), (600, {7701}), (0, set())):
            program = (
                "import trio\nfrom node.transport import router\nasync def main():\n"
                f" print(await router.{way}({gateway}7700, 7701, {lease_s}{nonce}))\ntrio.run(main)"
            )
            ran = subprocess.run(
                ["ip", "netns", "exec", space, sys.executable, "-c", program],
                env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
            assert not lease_s or "host='192.79.0.100', port=7701), port=7700, lasts_s=600.0" in ran.stdout
            assert made.opened_ports(0) == ports


@pytest.mark.netns
def test_members_of_all_kinds_of_homes_mix_with_each_other_in_the_way_that_their_routers_leave(tmp_path):
    with street() as (made, kinds):
        found = cells(made, kinds, tmp_path)
    for (one, other), cell in found.items():
        ways = {"direct"} if {"public", "opens ports"} & {one, other} else {"punched"}
        if "port anew" in (one, other) and ways == {"punched"}:
            ways = {"relay"}
        assert {path.split()[0] for path in cell.paths} == ways, (one, other)
        assert cell.first_s < 60.0, (one, other)


@pytest.mark.netns
def test_a_home_whose_router_has_another_address_mixes_again(tmp_path):
    """The routers drop what belongs to forgotten connections, so that only their silence tells of it."""
    with homes(1, [1, 1]) as made, started(made, tmp_path) as (public, one, other):
        until(lambda: are_met([one, other]))
        made.restart_router(0)
        restarted_at = time.time() + 5.0  # Exchanges that were in progress are no evidence.
        until(lambda: all(one.exchanges_with([node], restarted_at) for node in (public, other)))
        assert time.time() < restarted_at + 60.0


@pytest.mark.netns
@pytest.mark.parametrize(
    ("home", "found"),
    [
        ({}, ("Endpoint-Independent Mapping", "No router opens ports", "To be dialled, turn on")),
        ({"nat": "masquerade fully-random"}, ("Address and Port-Dependent, Mapping", "go through slower relays")),
        ({"opens_ports": True}, ("opens ports, as 192.79.0.100:", "To change: Nothing")),
    ],
    ids=["port kept", "port anew", "opens ports"],
)
def test_the_doctor_knows_the_router(tmp_path, home, found):
    with homes(2, []) as made, started(made, tmp_path) as (public, _other):
        (address,) = made.home(0, **home)
        until(lambda: public.log.rows("member"))
        options = ("192.79.0.10:7700", "--secret-file", tmp_path / "secret")
        ran = subprocess.run(
            ["ip", "netns", "exec", made.machines[address], sys.executable, "-m", "gossip", "doctor", *options],
            env=environment(PYTHONPATH=str(ROOT), COLUMNS="200"), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        for said in found:
            assert said in ran.stdout
