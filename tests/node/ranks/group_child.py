"""One rank of a node: `python group_child.py RANK SIZE FOLDER [SEED...]` writes what it holds in the end to a file.

In the environment: NODES, the nodes that the processes form; SHARDED, a model that fully_shard divides; APART, the
ranks that do not find rank 0's memory, as on another host; WRONG, a mistake of the last rank.
"""

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gossip.config import Config
from node import Node
from node.ranks import channel
from node.ranks.sharded import operation
from node.ranks.sharded.memory import MappedVectors

rank, size, folder, seeds = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
nodes = int(os.environ.get("NODES", "1"))
sharded, wrong = "SHARDED" in os.environ, os.environ.get("WRONG", "") if rank == size - 1 else ""
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
group = dist.group.WORLD
if nodes > 1:  # Divide the ranks into nodes of equal size.
    each = size // nodes
    groups = [dist.new_group(list(range(first, first + each))) for first in range(0, size, each)]
    group = groups[rank // each]

generator = torch.Generator().manual_seed(5)
truth = torch.randn(20, 4, generator=generator)
x = torch.randn(4000, 20, generator=generator)
y = (x @ truth).argmax(1)
torch.manual_seed(0 if sharded else rank)  # Unsharded ranks begin with different models.
layers = nn.Sequential(nn.Linear(20, 33 if wrong == "layout" else 32), nn.ReLU(), nn.Linear(32, 4))
if not sharded:
    model = DistributedDataParallel(layers, process_group=group)
elif wrong == "whole":
    model = layers
else:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in layers[::2]:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(layers, mesh=mesh)
if os.environ.get("WRONG") == "group":
    group = dist.new_group([0])  # All ranks call this, but only rank 0 is a member.
    wrong = "others" if rank else ""
if "APART" in os.environ:
    operation.PORTION_BYTES = 1200
if str(rank) in os.environ.get("APART", "").split():
    map_memory = MappedVectors.map
    MappedVectors.map = lambda memory, name: map_memory(memory, replace(name, path="/nowhere"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


config = Config(mix_every_steps=4)

address = folder / "address"
if nodes > 1 and rank // each:
    dist.barrier()  # The first node has written its address.
    seeds = [address.read_text()]
if wrong == "others":
    sys.exit()
node = Node(model, optimizer, seeds=seeds, config=config, group=group)
if "OVER_DEVICE" in os.environ:  # Imitate NCCL, whose group carries vectors from device to device, in pieces.
    channel.PIECE_BYTES, channel.SMALL_BYTES = 1000, 600
    opened, side = channel.Channel.open, torch.device("cpu")
    channel.Channel.open = lambda self: (opened(self), setattr(self, "vector_device", side))
with node:
    if "LOAD" in os.environ:
        node.load(os.environ["LOAD"])
    began = node.swarm_samples
    if rank == 0:
        address.write_text(node.address)
    if nodes > 1 and not rank // each:
        dist.barrier()
    (folder / f"training-{rank}").touch()
    steps, limit = 0, None
    asked_to_stop = torch.zeros(1)
    while limit is None or node.swarm_samples < limit:
        for inputs, targets in node.shard((x, y), batch_size=16):
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(inputs))
            steps += 1
            if node.metrics()["exchanges_done"] > 3:
                (folder / f"mixed-{rank}").touch()
            if limit is None:
                asked_to_stop.fill_((folder.parent / "stop").exists())
                dist.all_reduce(asked_to_stop, group=group)
                if asked_to_stop.item():
                    limit = node.swarm_samples + 2000
            elif node.swarm_samples >= limit:
                break
    stopped_at = node.swarm_samples
    stopped = torch.cat([whole(value).reshape(-1) for value in model.parameters()]).tolist()
    node.settle(2.0)
    node.save(folder / "run")
    node.export(folder / "weights")
    held = [whole(value).tolist() for value in model.parameters()]
    momenta = [whole(optimizer.state[value]["momentum_buffer"]).tolist() for value in model.parameters()]
    done = node.metrics()["exchanges_done"]
    accuracy = (getattr(model, "module", model)(x).argmax(1) == y).float().mean().item()
    node.finish(0.0)
result = {
    "began": began, "limit": limit, "stopped_at": stopped_at, "steps": steps, "stopped": stopped, "held": held,
    "momenta": momenta, "done": done, "swarm_samples": node.swarm_samples, "finished": node.finished,
    "members": [member.id for member in node.members],
}  # fmt: skip
(folder / f"result-{rank}").write_text(json.dumps({"accuracy": accuracy, "same": result}))
