"""Handwritten digits with a small perceptron. The lines that say `gossip` are all that training in a swarm adds.

On one machine:                 gossip local -n 4 examples/digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/digits.py
"""

import argparse
import json
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

from gossip import Node  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
parser.add_argument("--settle", type=float, default=3.0, help="seconds to mix without training before evaluating")
args = parser.parse_args()

# 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)

torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

with Node(model, optimizer) as node:  # gossip 2: joins the swarm with its weights, or starts one
    while not node.finished and node.swarm_samples < args.samples:  # gossip 3: all stop about the same time
        for x, y in node.shard((x_train, y_train), batch_size=args.batch_size):  # gossip 4: this node's share
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))  # gossip 5: averaged weights land here; it never waits
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            time.sleep(args.step_delay)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle, wait_s=60)  # wait for the others, then mix without training until the nodes agree
    node.finish()  # a node that joins now gets these weights and trains nothing
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    metrics = node.metrics()
    result = {"node": str(node.id), "accuracy": accuracy, "steps": metrics.steps, "samples": metrics.samples}
print(json.dumps(result), flush=True)
