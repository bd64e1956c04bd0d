"""Fashion-MNIST with a small CNN, the data shared by the swarm or private to each node.

IID, each node training on its share of the 60,000:   gossip local -n 4 examples/fashion_mnist.py
Non-IID, each node keeping data nobody else sees:     gossip run examples/fashion_mnist.py --alpha 0.1 --part 0

The lines that say `gossip` are all that training in a swarm adds.
"""

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gossip import Node  # gossip 1: one import

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
if args.alpha is not None and not args.alpha > 0:
    parser.error("--alpha must be above 0: 0.1 is very uneven, 100 nearly even")

# -- data: H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747 ----------------------------------------
folder = Path(os.environ.get("GOSSIP_FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
if not (folder / "train-images-idx3-ubyte.gz").exists():
    sys.exit(
        "Fashion-MNIST is not here: on Debian, apt-get install dataset-fashion-mnist, "
        "or set GOSSIP_FASHION_MNIST to the folder that holds its four *-ubyte.gz files."
    )


def pictures(name: str) -> torch.Tensor:
    """Read pictures, float32 (samples, 1, 28, 28), mean 0, deviation 1; in the file 16 header bytes, a byte a pixel."""
    raw = np.frombuffer(gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    return torch.from_numpy(raw.astype(np.float32)).view(-1, 1, 28, 28).div_(255).sub_(0.2860).div_(0.3530)


def classes(name: str) -> torch.Tensor:
    """Read classes, int64 (samples,), 0 to 9; the file: 8 header bytes, then a byte a label."""
    raw = np.frombuffer(gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return torch.from_numpy(raw.astype(np.int64))


x_train, y_train = pictures("train"), classes("train")  # (60000, 1, 28, 28), (60000,)
x_test, y_test = pictures("t10k"), classes("t10k")  # (10000, 1, 28, 28), (10000,)

if args.alpha is not None:
    # The samples of every class are dealt to the parts in shares from a symmetric Dirichlet (arXiv:1909.06335). Every
    # node draws the same split from the same seed, so the parts never overlap.
    random = np.random.default_rng(args.seed)
    dealt = []
    for label in range(10):
        rows = random.permutation(np.flatnonzero(y_train.numpy() == label))
        cuts = np.cumsum(random.dirichlet(np.full(args.parts, args.alpha)))[:-1] * len(rows)
        dealt.append(np.split(rows, np.round(cuts).astype(int))[args.part])
    mine = torch.from_numpy(np.sort(np.concatenate(dealt)))  # rows of x_train
    if len(mine) < args.batch_size:
        parser.error(f"part {args.part} holds {len(mine)} samples, less than a batch: take a larger --alpha")

# -- model: 105,866 parameters -----------------------------------------------------------------------------------------
# No BatchNorm: its statistics are the first thing to go wrong on non-IID data (arXiv:1910.00189).
torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),  # (batch, 16, 28, 28)
    nn.MaxPool2d(2),  # (batch, 16, 14, 14); before the ReLU, which is the same and four times less work
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),  # (batch, 32, 14, 14)
    nn.MaxPool2d(2),  # (batch, 32, 7, 7)
    nn.ReLU(),
    nn.Flatten(),  # (batch, 1568)
    nn.Linear(1568, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def private_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of one pass over this node's own part, in a new order each time."""
    for rows in mine[torch.randperm(len(mine))].split(args.batch_size):
        yield x_train[rows], y_train[rows]


# -- training ----------------------------------------------------------------------------------------------------------
with Node(model, optimizer) as node:  # gossip 2: joins the swarm and takes its weights, or starts one
    if args.alpha is not None:
        torch.manual_seed(args.seed + 1 + args.part)  # equal weights at the start, but an order of its own
    while not node.finished and node.swarm_samples < args.samples:  # gossip 3: all stop about the same time
        shared = args.alpha is None
        batches = node.shard((x_train, y_train), args.batch_size) if shared else private_batches()  # gossip 4: a share
        for x, y in batches:
            x, y = x.to(args.device), y.to(args.device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))  # gossip 5: averaged weights land here; it never waits
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle, wait_s=60)  # wait for the others, then mix without training until the nodes agree
    node.finish()  # a node that joins now gets these weights and trains nothing
    with torch.no_grad():
        guesses = torch.cat([model(x.to(args.device)).argmax(1).cpu() for x in x_test.split(500)])  # (10000,)
    accuracy = (guesses == y_test).float().mean().item()
    metrics = node.metrics()
    result = {"node": str(node.id), "accuracy": accuracy, "steps": metrics.steps, "samples": metrics.samples}
print(json.dumps(result), flush=True)
