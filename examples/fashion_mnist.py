"""Fashion-MNIST with a small CNN, the data shared by the swarm or private to each node.

IID, each node training on its share of the 60,000:   gossip local -n 4 examples/fashion_mnist.py
Non-IID, each node keeping data nobody else sees:     gossip run examples/fashion_mnist.py --alpha 0.1 --part 0
"""

import argparse
import json
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from node import Node
from sim.data import dirichlet_split, fashion_mnist
from sim.models import fashion_cnn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=300_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
parser.add_argument(
    "--alpha", type=float, help="private data: Dirichlet concentration of its classes, 0.1 is very uneven"
)
parser.add_argument("--part", type=int, default=0, help="private data: which part is this node's, 0 .. parts - 1")
parser.add_argument("--parts", type=int, default=4, help="private data: how many parts there are")
parser.add_argument("--settle", type=float, default=5.0, help="seconds to mix without training before evaluating")
args = parser.parse_args()
if not 0 <= args.part < args.parts:
    parser.error(f"--part must be 0 to {args.parts - 1}, one less than --parts")

torch.manual_seed(args.seed)
x_train, y_train, x_test, y_test = fashion_mnist()  # (60000, 1, 28, 28), (60000,), (10000, 1, 28, 28), (10000,)
model = fashion_cnn().to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def private_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over this node's own part, in a new order each time."""
    for rows in mine[torch.randperm(len(mine))].split(args.batch_size):
        yield x_train[rows], y_train[rows]


with Node(model, optimizer) as node:
    if args.alpha is not None:
        # Every node draws the same split, so the parts never overlap.
        mine = dirichlet_split(y_train, args.parts, args.alpha, args.seed)[args.part]
        torch.manual_seed(args.seed + 1 + args.part)  # equal weights at the start, but an order of its own
    while not node.finished and node.swarm_samples < args.samples:
        batches = private_batches() if args.alpha is not None else node.shard((x_train, y_train), args.batch_size)
        for x, y in batches:
            x, y = x.to(args.device), y.to(args.device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle)
    node.finish()  # whoever comes now gets these weights, and trains nothing
    with torch.no_grad():
        guesses = torch.cat([model(x.to(args.device)).argmax(1).cpu() for x in x_test.split(500)])  # (10000,)
    accuracy = (guesses == y_test).float().mean().item()
    done = node.metrics()
    result = {"node": str(node.id), "accuracy": accuracy, "steps": done.steps, "samples": done.samples}
print(json.dumps(result), flush=True)
