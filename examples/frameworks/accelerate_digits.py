"""Handwritten digits with Accelerate. The lines that say `gossip` are all that training in a swarm adds.

On one machine:                 gossip local -n 3 examples/frameworks/accelerate_digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/frameworks/accelerate_digits.py --folder here
Ended by anything, and started again with the same --folder, it goes on where its last checkpoint was.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from accelerate import Accelerator
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
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
node = None
if not args.alone:
    node = Node(model, optimizer)  # gossip 2
    accelerator.register_for_checkpointing(node)  # gossip 3: Accelerate's checkpoints hold the run
last_checkpoint = args.folder / "last" if args.folder else None
if last_checkpoint and last_checkpoint.exists():
    accelerator.load_state(last_checkpoint)


def save_checkpoint(folder: Path) -> None:
    """Save the last checkpoint; it is replaced as a whole."""
    accelerator.save_state(folder / "next")
    shutil.rmtree(folder / "last", ignore_errors=True)
    (folder / "next").rename(folder / "last")


def batches():
    """Yield batches of 8 without end."""
    order = node.sampler(len(train)) if node else torch.utils.data.RandomSampler(train)  # gossip 4: this node's share
    loader = accelerator.prepare(DataLoader(train, batch_size=8, sampler=order))
    while True:
        yield from loader


def done() -> bool:
    """Return True once the requested samples are trained on."""
    return node.finished or node.swarm_samples >= args.samples if node else seen >= args.samples


seen = steps = reported = 0  # samples, optimizer steps, samples that node.step() was told of
if node:
    node.start()  # gossip 5: joins the swarm and takes its weights, or starts one; `with node:` does the same
for x, y in batches():
    if done():
        break
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    seen += len(x)
    if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
        steps += 1
        if node:
            node.step(loss=loss, samples=seen - reported)  # gossip 6: weights that were averaged land here
            reported = seen
        if args.folder and steps % 50 == 0:
            save_checkpoint(args.folder)
    time.sleep(args.step_delay)
if node:
    node.settle(3.0)  # mix without training until the nodes agree
    node.finish()  # a node that joins now gets these weights and trains nothing
with torch.no_grad():
    accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
result = {"accuracy": accuracy, "steps": steps}
if node:
    result |= {"samples": node.metrics().samples, "swarm_samples": node.swarm_samples}
    node.close()
print(json.dumps(result), flush=True)
