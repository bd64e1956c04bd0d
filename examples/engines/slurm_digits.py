"""Handwritten digits in turns: a node that is asked to leave saves a checkpoint, and goes on from there the next time.

With Slurm:     sbatch deploy/slurm/swarm.sbatch examples/engines/slurm_digits.py
Anywhere else:  gossip run [--seed HOST:PORT] --state-dir here examples/engines/slurm_digits.py --folder here
"""

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

from gossip import Node

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--folder", type=Path, required=True, help="keep the checkpoint here")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
args = parser.parse_args()
checkpoint = args.folder / "run.safetensors"

# 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

with Node(model, optimizer) as node:
    if checkpoint.exists() and not node.finished:
        node.load(checkpoint)  # a swarm that is alive is ahead of any file, and keeps its weights
    try:
        while not node.finished and node.swarm_samples < args.samples:
            for x, y in node.shard((x_train, y_train), batch_size=16):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss=loss, samples=len(x))
                optimizer.param_groups[0]["lr"] = 0.1 * max(0.0, 1 - node.swarm_samples / args.samples)
                time.sleep(args.step_delay)
                if node.finished or node.swarm_samples >= args.samples:
                    break
        node.settle(3)
        node.finish()
    finally:  # SIGTERM raises SystemExit in this block
        node.save(checkpoint)
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
print(json.dumps({"node": node.id, "accuracy": accuracy, "swarm_samples": node.swarm_samples}), flush=True)
