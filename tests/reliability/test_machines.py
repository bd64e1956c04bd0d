"""Three machines set up as in the README, with a secret, invites and state directories; then all restart elsewhere.

Each is a network namespace with an IPv4 and an IPv6 address, on a switch in a fourth.
"""

import json
import subprocess
import sys

import pytest

from tests.engines.launched import PATIENCE_S, ROOT, Launched, Log, environment
from tests.reliability.namespaces import lab, switched

SCRIPT = """
import os, time, torch
from gossip import Node
from gossip.config import Config

model = torch.nn.Linear(8, 3)
with Node(model, torch.optim.SGD(model.parameters(), lr=0.1), config=Config(mix_every_steps=4)) as node:
    if os.path.exists("last.safetensors"):
        node.load("last.safetensors")
    while True:
        time.sleep(0.02)
        node.step(loss=0.5, samples=8)
        if node.metrics().steps % 50 == 0:
            node.save("last")
"""


class Machine:
    """A machine; ``run`` starts its node in its own home, and ``log`` is the node's log of this life."""

    def __init__(self, space, home):
        self.space, self.home, self.lives = space, home, []
        home.mkdir()
        (home / "train.py").write_text(SCRIPT)

    def command(self, *words):
        return ["ip", "netns", "exec", self.space, sys.executable, "-m", "gossip", *words]

    def ask(self, *words):
        return subprocess.run(
            self.command(*words), cwd=self.home, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
            check=True, timeout=PATIENCE_S,
        ).stdout.strip()  # fmt: skip

    def run(self, *options):
        self.log = Log(self.home / f"{len(self.lives)}.jsonl")
        command = self.command("run", "--state-dir", "state", "--log", self.log.path, "--quiet", *options, "train.py")
        self.lives.append(Launched(f"life-{len(self.lives)}", self.home, *command, PYTHONPATH=str(ROOT)))

    def until(self, what):
        return self.lives[-1].until(what)

    def mixes_with_all(self):
        return self.log.mixed(more=3, members=3)

    def kill(self):
        self.lives[-1].end()

    def moves(self, old, new):
        lab.run("ip", "-n", self.space, "address", "del", f"{old}/24", "dev", "eth0")
        lab.run("ip", "-n", self.space, "address", "add", f"{new}/24", "dev", "eth0")


@pytest.fixture
def machines(tmp_path):
    with switched(3) as spaces:
        found = [Machine(space, tmp_path / str(number)) for number, space in enumerate(spaces)]
        try:
            yield found
        finally:
            for machine in found:
                if machine.lives:
                    machine.kill()


@pytest.mark.netns
def test_three_machines_become_one_swarm_and_again_after_all_were_killed_and_two_have_moved(machines):
    first, second, third = machines
    secret = first.home / "swarm.secret"
    secret.touch(mode=0o600)
    secret.write_text(first.ask("secret"))
    first.run("--listen", "[::]:7700", "--secret-file", "swarm.secret")
    first.until(lambda: first.log.addresses)
    over_six, over_four = (
        first.ask("invite", "--secret-file", "swarm.secret", address)
        for address in ("[fd79::1]:7700", "10.79.0.1:7700")
    )
    second.run("--listen", "[::]:7700", "--seed", over_six)
    third.run("--listen", "0.0.0.0:7700", "--seed", over_four)
    for machine in machines:
        machine.until(machine.mixes_with_all)
        machine.until((machine.home / "last.safetensors").exists)
    for machine in machines:
        machine.kill()
    behind = min(json.loads((machine.home / "last.json").read_text())["meta"]["swarm_samples"] for machine in machines)
    second.moves("10.79.0.2", "10.79.0.12")
    third.moves("10.79.0.3", "10.79.0.13")
    for machine in machines:  # No seeds and no invites; only the first needs the secret, which invites gave the others.
        machine.run("--listen", "0.0.0.0:7700", *(["--secret-file", "swarm.secret"] if machine is first else []))
    for machine in machines:
        machine.until(machine.mixes_with_all)
    for machine in machines:  # Members that mix are of one run. It is the old one, since no count restarts at 0.
        assert machine.log.figure("swarm_samples") > behind > 0
