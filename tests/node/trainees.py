"""Small models, helpers that compare them, what a node has logged, and a node in a process of its own."""

import json
import signal
import subprocess

import torch
from torch import nn

from tests.harness import warm

CHILD = """
import sys, time, torch
from torch import nn
from gossip.config import Config
from node import Metrics, Node
torch.set_num_threads(1)
model = nn.Linear(int(sys.argv[2]), 2)
seeds, state_dir = [s for s in sys.argv[1:2] if s], (sys.argv[3:] or [None])[0]
with Node(model, seeds=seeds, state_dir=state_dir, config=Config(mix_every_steps=2)) as node:
    print(node.id, flush=True)
    for _ in range(20_000):
        node.step(samples=4)
        time.sleep(0.005)
"""


def linear(seed=0, width=4):
    torch.manual_seed(seed)
    return nn.Linear(width, 2)


def filled(model, value):
    """Return a model after setting all its parameters to a number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def step_of(loss_of, *optimizers):
    """Return a training step: the gradients of ``loss_of()``, and a step of each optimizer. It returns the loss."""

    def work():
        loss = loss_of()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return work


def step_towards(model, optimizers, target):
    """Return a training step that pulls every parameter towards a number by these optimizers."""
    return step_of(lambda: sum(((p - target) ** 2).sum() for p in model.parameters()) / 2, *optimizers)


def towards(model, target, rate=0.1):
    return step_towards(model, [torch.optim.SGD(model.parameters(), lr=rate)], target)


def spread(*models):
    """Return the largest difference of any parameter between two models."""
    flat = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
    return max(float((a - b).abs().max()) for a in flat for b in flat)


def alive(trainee):
    return trainee.node.metrics().members_alive


def mixed(*trainees, times=5):
    """Return a check that each node completes ``times`` more exchanges from now on."""
    before = [t.node.metrics().exchanges_done for t in trainees]
    return lambda: all(t.node.metrics().exchanges_done >= b + times for t, b in zip(trainees, before, strict=True))


def sentences_in(log, kind):
    """Return the sentences of a kind in a node's log."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["sentence"] for row in rows if row["event"] == kind]


def heard_of(caplog, kind):
    """Return the sentences of a kind that logging has heard."""
    return [record.getMessage() for record in caplog.records if getattr(record, "kind", "") == kind]


def state_of(node, peer):
    return next((member.state for member in node.members if member.id == peer), None)


def children(code=CHILD):
    """Yield ``child(seed, width, state_dir)``, which starts a node in a process of its own: (process, first line)."""
    started = []

    def start(seed, width=4, *state_dir):
        process = warm.Python("-c", code, seed, width, *state_dir, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        process.stdout.close()


def pull(model, target):
    """Descend on |weights - target|^2, whose loss is 1 more than that."""

    def work():
        with torch.no_grad():
            loss = 1.0
            for weights in model.parameters():
                loss += float(((weights - target) ** 2).mean())
                weights += 0.05 * (target - weights)
        return loss

    return work
