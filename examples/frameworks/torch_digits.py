"""Handwritten digits with PyTorch's own DataLoader. The lines that say `gossip` are all that training in a swarm adds.

On one machine:                 gossip local -n 3 examples/frameworks/torch_digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/frameworks/torch_digits.py --folder here
Ended by anything, and started again with the same --folder, it goes on where its last checkpoint was.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gossip import Node  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--folder", type=Path, help="keep checkpoints here, and go on from the last one")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
parser.add_argument("--alone", action="store_true", help="the same loop without a swarm, to compare")
args = parser.parse_args()

# 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)
train = TensorDataset(x_train, y_train)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
seen = steps = 0
with contextlib.nullcontext() if args.alone else Node(model, optimizer) as node:  # gossip 2: joins, or starts a swarm
    if node and args.folder and (args.folder / "run.safetensors").exists():
        node.load(args.folder / "run.safetensors")  # gossip 3: goes on with the run

    def done() -> bool:
        """Return True once the requested samples are trained on."""
        return node.finished or node.swarm_samples >= args.samples if node else seen >= args.samples

    loader = (
        DataLoader(train, batch_sampler=node.sampler(train, 16), num_workers=1)  # gossip 4: this node's share
        if node
        else DataLoader(train, batch_size=16, shuffle=True)
    )
    while not done():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen, steps = seen + len(x), steps + 1
            if node:
                node.step(loss=loss, samples=len(x))  # gossip 5: averaged weights land here; it never waits
                if args.folder and steps % 50 == 0:
                    node.save(args.folder / "run.safetensors")
            time.sleep(args.step_delay)
            if done():
                break
    if node:
        node.settle(3.0)  # mix without training until the nodes agree
        node.finish()  # a node that joins now gets these weights and trains nothing
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    result = {"accuracy": accuracy, "steps": steps}
    if node:
        result |= {"samples": node.metrics().samples, "swarm_samples": node.swarm_samples}
print(json.dumps(result), flush=True)
