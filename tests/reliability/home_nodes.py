"""Nodes on the machines of namespaces, and what they wrote of their exchanges."""

import contextlib
import subprocess
import sys

import numpy as np

from tests.engines.launched import ROOT, Launched, Log, environment, until

SCRIPT = """
import itertools, os, time, torch
from gossip import Node
from gossip.config import Config

width = int(os.environ.get("WIDTH", 8))
model = torch.nn.Linear(width, width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mixes, weights = (open(os.environ["GOSSIP_LOG"] + end, "a", buffering=1) for end in (".mixes", ".weights"))
with Node(model, optimizer, config=Config(mix_every_steps=4)) as node:
    paths = {}

    def note(event):
        (partner,) = event.partners
        if paths.get(partner) is None:  # A listing may be a quarter of a second old.
            paths.update((member.id, member.link) for member in node.members)
        print(time.time(), partner, event.seconds, paths.get(partner) or "-", file=mixes)

    node.on("exchange.done", note)
    for step in itertools.count():
        time.sleep(float(os.environ.get("STEP_S", 0.02)))
        optimizer.zero_grad()
        (model(torch.randn(8, width)) - torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        if step % 25 == 0:
            print(time.time(), *model.weight.detach().flatten()[:64].tolist(), file=weights)
        node.step(loss=0.5, samples=8)
"""


class Home:
    """A node in a namespace, with its log."""

    def __init__(self, space, address, folder, secret, seed, **variables):
        self.log = Log(folder / f"{address}.jsonl")
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        every, seed = ("[::]", f"[{seed}]" if seed else None) if ":" in address else ("0.0.0.0", seed)
        options = ("--listen", f"{every}:7700", "--secret-file", secret, "--state-dir", f"{address}.state", "--quiet")
        found = ("--seed", f"{seed}:7700") if seed else ()
        command = (sys.executable, "-m", "gossip", "run", "--log", self.log.path, *options, *found, "train.py")
        command = ("ip", "netns", "exec", space, *command)
        self.process = Launched(address, folder, *command, PYTHONPATH=str(ROOT), **variables)

    @property
    def began_at(self):
        """The time at which it listened."""
        return self.log.rows("listening")[0]["t"]

    def exchanges_with(self, others, since=0.0):
        """Return the number of finished exchanges with these nodes that ended after ``since`` (time.time)."""
        return len(self.mixes(others, since))

    def mixes(self, others, since=0.0):
        """Return of each such exchange its end, its seconds, and how the other was linked."""
        ids = {one for other in others for one in other.log.ids}
        mixes = self.log.path.with_suffix(".jsonl.mixes")
        text = mixes.read_text() if mixes.exists() else ""
        rows = (line.split(maxsplit=3) for line in text[: text.rfind("\n") + 1].splitlines())
        known = ((float(ended_at), partner, float(seconds), path) for ended_at, partner, seconds, path in rows)
        return [(end, seconds, path) for end, partner, seconds, path in known if partner in ids and end >= since]


def distance(nodes, since, until):
    """Return the consensus distance of the nodes between two moments (time.time): rms over nodes, weights and times."""
    found = []
    for node in nodes:
        rows = np.loadtxt(node.log.path.with_suffix(".jsonl.weights"), ndmin=2)
        found.append(rows[(rows[:, 0] >= since) & (rows[:, 0] < until), 1:])
    shortest = min(map(len, found))
    stacked = np.stack([rows[:shortest] for rows in found])
    return float(np.sqrt(np.square(stacked - stacked.mean(0)).mean()))


@contextlib.contextmanager
def started(made, folder, of=None, **variables):
    """Start a node on each machine, the first as the seed of all; yield the nodes, and end them.

    ``of`` has further variables by the address of a machine.
    """
    nodes, secret, seed = [], folder / "secret", None
    secret.touch(mode=0o600)
    command = [sys.executable, "-m", "gossip", "secret"]
    text = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True)
    secret.write_text(text.stdout)
    try:
        for address, space in made.machines.items():
            nodes.append(Home(space, address, folder / "run", secret, seed, **variables, **(of or {}).get(address, {})))
            if seed is None:
                until(lambda: nodes[0].log.addresses, nodes[0].process.said)
                seed = address
        yield nodes
    finally:
        for node in nodes:
            node.process.end()


def are_met(nodes):
    """Return True if each of the nodes has mixed with each other one."""
    return all(one.exchanges_with([other]) for one in nodes for other in nodes if other is not one)
