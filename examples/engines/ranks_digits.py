"""Handwritten digits where torchrun or mpirun starts one process a node. Every rank says in torch's store where it is,
and reads there where the others are until it has met one; after that neither the store nor rank 0 is needed.

On host I of 3:     GOSSIP_SECRET_FILE=swarm.secret torchrun --nnodes 3 --node-rank I --master-addr HOST0 \\
                        examples/engines/ranks_digits.py --states DIR
From one host:      mpirun --enable-recovery --hostfile HOSTS -x MASTER_ADDR=HOST0 -x MASTER_PORT=29500 \\
                        -x GOSSIP_SECRET_FILE=swarm.secret python examples/engines/ranks_digits.py --states DIR
What died of it:    GOSSIP_LISTEN=0.0.0.0:0 GOSSIP_SECRET_FILE=swarm.secret \\
                        python examples/engines/ranks_digits.py --rank 0 --states DIR
"""

import argparse
import functools
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed import TCPStore
from torch.nn import functional as F

from gossip import Node

environment = os.environ
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rank", type=int, help="go on as this rank, without a launcher")
parser.add_argument("--states", type=Path, required=True, help="each rank keeps its identity in a directory here")
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
args = parser.parse_args()

launched = args.rank is None
rank, world = args.rank, 1
if launched:
    rank = int(environment["RANK"] if "RANK" in environment else environment["OMPI_COMM_WORLD_RANK"])
    world = int(environment["WORLD_SIZE"] if "WORLD_SIZE" in environment else environment["OMPI_COMM_WORLD_SIZE"])


@functools.cache
def store():
    """Return torch's store; torchrun's agent on the first host serves it, and without an agent rank 0 does."""
    return TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timeout=timedelta(seconds=60),
        wait_for_workers=False, is_master=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )  # fmt: skip


def publish_address(event):
    """Called when this node listens, before it looks for others."""
    store().set(f"gossip/{rank}", node.address)


def addresses_of_others():
    """Called again and again while no other node is known. If the store is gone it raises: the last answer holds."""
    keys = [f"gossip/{other}" for other in range(world) if other != rank]
    return [store().get(key).decode() for key in keys if store().check([key])]


# 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
options = {"seeds": addresses_of_others, "wait_for": world} if launched else {}  # else its directory knows the others
node = Node(model, optimizer, state_dir=args.states / f"rank-{rank}", **options)
if launched:
    store()
    node.on("listening", publish_address)

with node:
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
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
print(json.dumps({"node": node.id, "accuracy": accuracy, "samples": node.metrics().samples}), flush=True)
