"""Three machines set up as in the README, with a secret, invites and state directories; then all restart elsewhere.

Each is a network namespace with an IPv4 and an IPv6 address, on a switch in a fourth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reliability.namespaces import lab, switched

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0  # The timeout of every wait: a node loads torch in seconds, or in a minute on a busy machine.
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
    """A machine; ``run`` starts its node in its own home, and ``rows`` reads the node's log of this life."""

    def __init__(self, space, number, home):
        self.space, self.number, self.home, self.lives = space, number, home, 0
        home.mkdir()
        (home / "train.py").write_text(SCRIPT)

    def gossip(self, *words):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
        command = ["ip", "netns", "exec", self.space, sys.executable, "-m", "gossip", *words]
        return command, {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def ask(self, *words):
        command, environment = self.gossip(*words)
        return subprocess.run(
            command, cwd=self.home, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        ).stdout.strip()

    def run(self, *options):
        self.lives += 1
        self.log = self.home / f"{self.lives}.jsonl"
        command, environment = self.gossip(
            "run", "--state-dir", "state", "--log", str(self.log), "--quiet", *options, "train.py"
        )
        with (self.home / f"{self.lives}.txt").open("wb") as said:
            self.process = subprocess.Popen(command, cwd=self.home, env=environment, stdout=said, stderr=said)

    def rows(self, event):
        text = self.log.read_text() if self.log.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [row for row in rows if row["event"] == event]

    def until(self, what):
        end = time.monotonic() + PATIENCE_S
        while not (found := what()):
            said = (self.home / f"{self.lives}.txt").read_text()[-2000:]
            assert self.process.poll() is None, said
            assert time.monotonic() < end, f"machine {self.number} waited {PATIENCE_S:g} s in vain: {said}"
            time.sleep(0.1)
        return found

    def mixes_with_all(self):
        return [row for row in self.rows("progress") if row["members_alive"] == 3 and row["exchanges_done"] > 3]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def moves(self, old, new):
        lab.run("ip", "-n", self.space, "address", "del", f"{old}/24", "dev", "eth0")
        lab.run("ip", "-n", self.space, "address", "add", f"{new}/24", "dev", "eth0")


@pytest.fixture
def machines(tmp_path):
    with switched(3) as spaces:
        found = [Machine(space, number, tmp_path / str(number)) for number, space in enumerate(spaces)]
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
    first.until(lambda: first.rows("listening"))
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
        assert machine.rows("progress")[-1]["swarm_samples"] > behind > 0
