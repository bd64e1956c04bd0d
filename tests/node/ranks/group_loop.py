"""One rank of a node of two that trains until it is told to stop: `python group_loop.py RANK PORT FOLDER [SEED...]`.

Both ranks look at everything that a loop can look at, write down what they see, and end with what they hold.
"""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gossip.config import Config
from node import Node

rank, port, folder, seeds = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
patience = timedelta(seconds=float(os.environ.get("PATIENCE_S", "20")))
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=patience)
torch.manual_seed(rank)
model = nn.Linear(6, 3)
config = Config(mix_every_steps=4, join_timeout_s=3.0)


def written(name, value):
    """Replace a file whole, so that a reader never sees a part."""
    path = folder / f"{name}-{rank}"
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


def digest_of(node, figures):
    members = [(one.id, one.address, one.state, one.steps, one.samples, one.loss) for one in node.members]
    row = [node.swarm_samples, node.finished, members, dict(node.metrics()), figures]
    weights = torch.cat([value.detach().reshape(-1) for value in model.parameters()])
    return hashlib.sha256(repr(row).encode() + weights.numpy().tobytes()).hexdigest()


with Node(model, seeds=seeds, config=config, group=dist.group.WORLD) as node:
    figures, steps, digests = {}, 0, []
    asked_to_stop = torch.zeros(1)
    while not asked_to_stop.item():
        node.step(loss=1.0, samples=4)
        steps += 1
        time.sleep(0.002)
        if steps % 20 == 0:
            asked_to_stop.fill_((folder / "stop").exists())
            dist.all_reduce(asked_to_stop)
            written("seen", {"steps": steps})
        if steps % 200 == 0:
            figures = node.reduce({"loss": 1.0, "accuracy": 0.5})
            digests.append(digest_of(node, figures))
    node.settle(0.5)
    digests.append(digest_of(node, figures))
written("ended", {"digests": digests})
