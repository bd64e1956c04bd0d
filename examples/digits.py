"""Handwritten digits with a small perceptron: what `gossip demo` runs in every process.

On one machine:                 gossip local -n 4 examples/digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/digits.py
"""

import argparse
import json
import time

import torch
from torch.nn import functional as F

from node import Node
from sim.data import digits
from sim.models import digits_mlp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
parser.add_argument("--settle", type=float, default=3.0, help="seconds to mix without training before evaluating")
args = parser.parse_args()

torch.manual_seed(args.seed)
x_train, y_train, x_test, y_test = digits()
model = digits_mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

with Node(model, optimizer) as node:
    while not node.finished and node.swarm_samples < args.samples:
        for x, y in node.shard((x_train, y_train), batch_size=args.batch_size):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            time.sleep(args.step_delay)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle)
    node.finish()  # whoever comes now gets these weights, and trains nothing
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    done = node.metrics()
    result = {"node": str(node.id), "accuracy": accuracy, "steps": done.steps, "samples": done.samples}
print(json.dumps(result), flush=True)
