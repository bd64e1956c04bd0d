"""One rank of four that hold tensors divided in many ways: `python placements_child.py RANK FOLDER`.

Rank 0 reads, changes and puts back the flat vector, and every rank compares with what torch puts together. It does so
with memory that all ranks map, and again as if ranks 1 and 3 were on another host.
"""

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gossip.errors import LayoutError
from node.loop.live import Trained
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from node.ranks.channel import Channel
from node.ranks.part import ShardedPart
from node.ranks.ranks import Ranks
from node.ranks.sharded import operation
from node.ranks.sharded.memory import MappedVectors

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=60)
)
operation.PORTION_BYTES = 160  # Many portions, of which some cut a tensor.
is_apart, map_memory = False, MappedVectors.map


def map_if_near(memory, name):
    return map_memory(memory, replace(name, path="/nowhere") if is_apart and rank % 2 else name)


MappedVectors.map = map_if_near
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def layers(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3), nn.LayerNorm(3))


def divided(model, parallel=True):
    """FSDP over the first dimension of the mesh, tensor parallelism over the second."""
    if parallel:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["data"] if parallel else mesh)
    return fully_shard(model, mesh=mesh["data"] if parallel else mesh)


def follow(optimizers):
    """Set each optimizer's own copies of the weights to the bits of the weights, which moving them keeps but nearly."""
    for optimizer in optimizers:
        for parameter, held in optimizer.state.items():
            held["mine"].copy_(parameter.detach())


torch.manual_seed(5)
whole = torch.randn(8, 5)
ways = [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Shard(1))]
mapping = {str(way): distribute_tensor(whole * (1 + number), mesh, way) for number, way in enumerate(ways)}
cases = {
    "mapping": (mapping, {name: value.full_tensor() for name, value in mapping.items()}),
    "replicas": (divided(layers(7), parallel=False), layers(7)),
    "two dimensions": (divided(layers(8)), layers(8)),
}
for name, (model, same) in cases.items():
    print(name, file=sys.stderr)
    made = [] if isinstance(same, dict) else [torch.optim.SGD(one.parameters(), 0.01, 0.9) for one in (model, same)]
    for step in range(2 if made else 0):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for one, optimizer in zip((model, same), made, strict=True):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()
    for optimizer in made:
        for parameter, held in optimizer.state.items():
            held["mine"] = parameter.detach().clone()  # It follows its weight.
    ranks = Ranks(Channel(dist.group.WORLD))
    ranks.open()
    part = ShardedPart(Trained(model, Optimizers(made[0] if made else None)), ranks)
    state = part.state
    expected = ModelState(same, made[1] if made else None)
    assert state.layout == expected.layout
    state.work.begin()
    ranks.is_standing = True
    if rank:
        while (command := ranks.receive_command()).kind != "end":
            if command.kind == "apart":
                is_apart = True
                follow(made)
            else:
                part.obey(command)
    else:
        size = state.layout.size
        rng = np.random.default_rng(3)
        values = rng.standard_normal(size).astype(np.float32)
        at = np.sort(rng.choice(size, size // 3, replace=False))
        keys = expected.optimizer_keys
        assert state.optimizer_keys == keys
        changes = [
            ("add", (values,)), ("add_weighted", (values, 0.3)), ("add_at", (values[at], at)), ("merge", (values, 0.3)),
        ]  # fmt: skip
        vector = state.buffer(size)
        state.read(vector)
        first = vector.copy()
        seen = {"near": [], "apart": []}
        for way, found in seen.items():
            if way == "apart":
                state.write(first)
                expected.write(first)
                ranks.send_command("apart")
                follow(made)
            for call, given in [("sound", ()), *changes]:
                held = []
                for one in (state, expected):
                    arguments = [value.copy() if isinstance(value, np.ndarray) else value for value in given]
                    if call != "add_at" and given:
                        arguments[0] = one.buffer(size)
                        arguments[0][:] = values
                    getattr(one, call)(*arguments)
                    vector = one.buffer(size)
                    part, piece = np.empty(at.size, np.float32), np.empty(size // 2, np.float32)
                    one.read(vector)
                    one.begin_read_at(part, at)
                    one.begin_read_piece(piece, size // 5)
                    kept = np.empty(len(keys) * one.trained_elements, np.float32)
                    one.begin_read_optimizer(kept, size)
                    held.append(np.concatenate([vector, part, piece, kept]))
                assert np.allclose(*held, atol=1e-5)
                found.append(held[0])
            assert state.absent_ranks == ((1, 3) if way == "apart" else ())
        assert all(map(np.array_equal, *seen.values())), "bit for bit"
        state.read(vector := state.buffer(size))
        file = state.tensors()
        assert all(np.allclose(file[key], value.detach(), atol=1e-5) for key, value in expected.tensors().items())
        state.write(-vector)
        ranks.send_command("end")
    for tensor, other in zip(state.work.tensors.current(), expected.live_tensors.current(), strict=True):
        there = [tensor.full_tensor().detach()] if hasattr(tensor, "full_tensor") else [tensor.detach()]
        there.append(other.detach().clone())
        if rank == 0:
            other.data.neg_()
        dist.broadcast(other.data, 0)
        assert torch.allclose(there[0], other.detach(), atol=1e-5)
    is_apart = False
    ranks.leave(None)
uneven = divided(layers(6))  # Three rows for each of two processes, which FSDP cannot halve.
try:
    ShardedPart(Trained(uneven, Optimizers()), Ranks(Channel(dist.group.WORLD)))
except LayoutError as error:
    (folder / f"refused-{rank}").write_text(str(error))
(folder / f"done-{rank}").touch()
