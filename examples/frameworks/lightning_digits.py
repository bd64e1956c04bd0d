"""Handwritten digits with Lightning. The lines that say `gossip` are all that training in a swarm adds.

On one machine:                 gossip local -n 3 examples/frameworks/lightning_digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/frameworks/lightning_digits.py --folder here
Ended by anything, and started again with the same --folder, it goes on where its last checkpoint was.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from node.adapters.lightning import LightningGossip  # gossip 1: one import

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
train, test = TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


class Digits(LightningModule):
    """A small perceptron of 4,810 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, number):
        x, y = batch
        time.sleep(args.step_delay)
        return F.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


torch.manual_seed(0)
model = Digits()
if args.alone:
    loader, callbacks = DataLoader(train, batch_size=16, shuffle=True), []
else:
    # gossip 2: joins the swarm when training begins; all stop together, and agree for a second before each checkpoint
    gossip = LightningGossip(samples=args.samples, settle_s=1.0)
    loader = DataLoader(train, batch_size=16, sampler=gossip.sampler(train))  # gossip 3: this node's share
    callbacks = [gossip]  # gossip 4: averaged weights land after each step; it never waits
if args.folder:
    callbacks.append(ModelCheckpoint(args.folder, save_last=True, every_n_train_steps=50, enable_version_counter=False))
last = args.folder / "last.ckpt" if args.folder else None
trainer = Trainer(
    max_steps=args.samples // 16 if args.alone else -1, max_epochs=-1, accelerator="cpu", devices=1,
    callbacks=callbacks, logger=False,
    enable_checkpointing=bool(args.folder), enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=last if last and last.exists() else None)
(figures,) = trainer.validate(model, DataLoader(test, batch_size=len(test)), verbose=False)
result = {"accuracy": figures["accuracy"], "steps": trainer.global_step}
if not args.alone:
    result |= {"samples": gossip.node.metrics().samples, "swarm_samples": gossip.node.swarm_samples}
print(json.dumps(result), flush=True)
