"""A small byte model on text files that are read as a stream. The lines that say `gossip` are all that a swarm adds.

On one machine:                 gossip local -n 4 examples/text_files.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/text_files.py FILE...

Without FILE it reads the modules of Python's standard library, which every machine has.
"""

import argparse
import json
import os
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from gossip import Node  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("files", nargs="*", type=Path)
parser.add_argument("--samples", type=int, default=400_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--batch-size", type=int, default=128)
args = parser.parse_args()
CONTEXT = 8  # Bytes that the model sees.
VALIDATION_STRIDE = 8  # Every eighth file is for validation.
NATS_PER_BIT = 0.6931  # The natural logarithm of 2.

names = sorted(map(str, args.files or Path(os.__file__).parent.glob("*.py")))
validation_files = names[::VALIDATION_STRIDE]
train_files = [name for number, name in enumerate(names) if number % VALIDATION_STRIDE]


def windows(name):
    """Yield the file's windows of CONTEXT + 1 bytes, in random order."""
    text = torch.frombuffer(bytearray(Path(name).read_bytes()), dtype=torch.uint8).long()
    starts = range(0, len(text) - CONTEXT, CONTEXT)
    for start in random.sample(starts, len(starts)):
        yield text[start : start + CONTEXT + 1]


class Stream(IterableDataset):
    """Windows of the files of this node's share, one file after another."""

    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        for name in self.shards:
            yield from windows(name)


torch.manual_seed(0)
model = nn.Sequential(  # 28,992 parameters
    nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 64), nn.ReLU(), nn.Linear(64, 256)
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with Node(model, optimizer) as node:  # gossip 2: joins the swarm with its weights, or starts one
    stream = Stream(node.shards(train_files))  # gossip 3: this node's files, without end
    for batch in DataLoader(stream, batch_size=args.batch_size):
        loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        node.step(loss=loss, samples=len(batch))  # gossip 4: weights that were averaged land here
        if node.finished or node.swarm_samples >= args.samples:  # gossip 5: all stop about the same time
            break
    node.settle(3.0, wait_s=60)
    node.finish()
    with torch.no_grad():
        held_out = torch.stack([window for name in validation_files for window in windows(name)])
        bits = F.cross_entropy(model(held_out[:, :-1]), held_out[:, -1]).item() / NATS_PER_BIT
    metrics = node.metrics()
    result = {"node": node.id, "bits_per_byte": round(bits, 3), "steps": metrics.steps, "samples": metrics.samples}
print(json.dumps(result), flush=True)
