"""One process of benchmarks/convergence.py: train until the swarm has seen its samples, and print one JSON line."""

import argparse
import json
import time

import torch
from torch.nn import functional as F

from node import Node
from sim.learning.corpora import digits, dirichlet_split, fashion_mnist
from sim.learning.models import cnn, mlp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("dataset", choices=["digits", "fashion-mnist"])
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--weight-decay", type=float, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--alpha", type=float, default=0.0, help="0: IID shares of the whole; else Dirichlet private parts")
parser.add_argument("--part", type=int, required=True)
parser.add_argument("--parts", type=int, required=True)
parser.add_argument("--step-s", type=float, required=True, help="the least a step takes, so that steps are comparable")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(args.seed)
x_train, y_train, x_test, y_test = digits() if args.dataset == "digits" else fashion_mnist()
model = mlp(64, 64, 10) if args.dataset == "digits" else cnn((1, 28, 28), 10)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=args.weight_decay)
mine = None
if args.alpha:
    mine = dirichlet_split(y_train, args.parts, args.alpha, args.seed)[args.part]


def batches(node):
    if mine is None:
        yield from node.shard((x_train, y_train), args.batch_size)
        return
    for rows in mine[torch.randperm(len(mine))].split(args.batch_size):
        yield x_train[rows], y_train[rows]


with Node(model, optimizer) as node:
    torch.manual_seed(1000 * args.seed + args.part)
    while len(node.members) < args.parts:  # all nodes start together, for a fair comparison
        time.sleep(0.05)
        node._training.visit()
    while node.swarm_samples < args.samples:
        for x, y in batches(node):
            begin = time.perf_counter()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            time.sleep(max(0.0, args.step_s - (time.perf_counter() - begin)))
            if node.swarm_samples >= args.samples:
                break
    distance = node.settle(4.0)
    total = node.swarm_samples
    with torch.no_grad():
        guesses = torch.cat([model(x).argmax(1) for x in x_test.split(500)])
    accuracy = (guesses == y_test).float().mean().item()
    metrics = node.metrics()
    if args.parts > 1:
        time.sleep(1.0)  # members that settle slightly later still find this node
row = {
    "accuracy": accuracy, "steps": metrics.steps, "samples": metrics.samples, "swarm_samples": total,
    "exchanges": metrics.exchanges_done, "failed": metrics.exchanges_failed, "consensus_distance": distance,
}  # fmt: skip
print(json.dumps(row))
