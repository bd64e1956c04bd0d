"""Nodes at homes mix with each other, also after the last machine that they could dial was killed."""

import subprocess
import sys
import time

import pytest

from tests.engines.launched import ROOT, Launched, Log, environment, until
from tests.reliability.namespaces import homes

SCRIPT = """
import os, time, torch
from gossip import Node
from gossip.config import Config

model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mixes = open(os.environ["GOSSIP_LOG"] + ".mixes", "a", buffering=1)
with Node(model, optimizer, config=Config(mix_every_steps=4)) as node:
    paths = {}

    def note(event):
        (partner,) = event.partners
        if partner not in paths:
            paths.update((member.id, member.link) for member in node.members)
        print(time.time(), partner, paths.get(partner) or "-", file=mixes)

    node.on("exchange.done", note)
    while True:
        time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        node.step(loss=0.5, samples=8)
"""


class Home:
    """A node in a namespace, with its log."""

    def __init__(self, space, address, folder, secret, seed):
        self.log = Log(folder / f"{address}.jsonl")
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        options = ("--listen", "0.0.0.0:7700", "--secret-file", secret, "--state-dir", f"{address}.state", "--quiet")
        found = ("--seed", f"{seed}:7700") if seed else ()
        command = (sys.executable, "-m", "gossip", "run", "--log", self.log.path, *options, *found, "train.py")
        self.process = Launched(address, folder, "ip", "netns", "exec", space, *command, PYTHONPATH=str(ROOT))

    def exchanges_with(self, others, since=0.0):
        """Return the number of finished exchanges with these nodes that ended after ``since`` (time.time)."""
        return len(self.mixes(others, since))

    def mixes(self, others, since=0.0):
        """Return the time of each such exchange, and how the other was linked when we first mixed with it."""
        ids = {one for other in others for one in other.log.ids}
        mixes = self.log.path.with_suffix(".jsonl.mixes")
        text = mixes.read_text() if mixes.exists() else ""
        rows = [line.split(maxsplit=2) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [
            (float(ended_at), path) for ended_at, partner, path in rows if partner in ids and float(ended_at) >= since
        ]


@pytest.fixture
def world(tmp_path):
    """Return a function that starts a node on each machine, and ends all at the end."""
    started = []

    def start(made):
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        command = [sys.executable, "-m", "gossip", "secret"]

        text = subprocess.run(
            command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True
        )
        secret.write_text(text.stdout)
        seed = None
        for address, space in made.machines.items():
            started.append(Home(space, address, tmp_path / "run", secret, seed))
            if seed is None:
                until(lambda: started[0].log.addresses, started[0].process.said)
                seed = address
        return started

    yield start
    for node in started:
        node.process.end()


def are_met(nodes):
    """Return True if each of the nodes has mixed with each other one."""
    return all(one.exchanges_with([other]) for one in nodes for other in nodes if other is not one)


@pytest.mark.netns
def test_two_homes_mix_with_each_other_before_and_after_the_only_public_node_is_killed(world):
    with homes(1, [2, 2]) as made:
        public, *inside = world(made)
        until(lambda: are_met(inside))
        public.process.end()
        killed_at = time.time() + 5.0  # Exchanges that were in progress are no evidence.
        first, second = inside[:2], inside[2:]
        until(lambda: sum(node.exchanges_with(second, killed_at) for node in first) >= 40)


@pytest.mark.netns
def test_homes_whose_routers_map_each_destination_anew_mix_through_a_relay(world):
    with homes(2, [1, 1], nat="masquerade fully-random") as made:
        first, _second, one, other = world(made)
        until(lambda: are_met([one, other]))
        first.process.end()
        killed_at = time.time() + 5.0
        until(lambda: one.exchanges_with([other], killed_at) >= 40)


@pytest.mark.netns
def test_six_homes_stay_one_swarm_without_a_public_node(world):
    with homes(2, [1] * 6) as made:
        first, second, *inside = world(made)
        until(lambda: are_met(inside))
        for public in (first, second):
            public.process.end()
        killed_at = time.time() + 5.0
        for node in inside:
            others = [other for other in inside if other is not node]
            until(lambda node=node, others=others: node.exchanges_with(others, killed_at) >= 20)


@pytest.mark.netns
def test_a_router_that_opens_ports_makes_its_nodes_dialable_until_they_end(world):
    """Both nodes of the home listen on one port, of which the router has one. It does not turn connections round."""
    with homes(1, [2, 1], opens_ports=[0]) as made:
        public, *inside = world(made)
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
            assert not lease_s or "host='192.79.0.100', port=7701), lasts_s=600.0" in ran.stdout
            assert made.opened_ports(0) == ports
