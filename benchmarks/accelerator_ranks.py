"""One rank of a node whose model lies on the GPU, with a whole node on the same GPU.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.accelerator_ranks nccl
    torchrun --standalone --nproc-per-node 2 -m benchmarks.accelerator_ranks gloo
    torchrun --standalone --nproc-per-node 1 -m benchmarks.accelerator_ranks nccl --sharded

Rank 0 prints a line of JSON: the exchanges, and whether all ranks hold the same finite weights. NCCL refuses two ranks
on one GPU. A simulated device has no NCCL and no tensors that gloo could send: then gloo sums copies on the host. With
``--sharded`` the rank's model is one of ``fully_shard``; without a GPU that runs over gloo on the host itself.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.accelerator_device import accelerator, say
from gossip.config import Config
from node import Node

WIDTH = 768  # Two layers have 4.7 MB: more than the smallest vector that NCCL carries.
EVERY, EXCHANGES = 4, 5
LIMIT_S = 60.0  # The most that training takes; also the timeout of the group.
CONFIG = Config(mix_every_steps=EVERY, join_timeout_s=10.0)


class WholeNode(threading.Thread):
    """The whole node, with a loop of its own in a thread of rank 0."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.device, self.address = device, ""
        self.ready, self.stopping = threading.Event(), threading.Event()

    def run(self) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(0)
        model, optimizer = trained(100, self.device)
        try:
            with Node(model, optimizer, config=CONFIG) as node:
                self.address = node.address
                self.ready.set()
                while not self.stopping.is_set():
                    gradients(model)
                    optimizer.step()
                    node.step()
                    time.sleep(0.005)
        finally:
            self.ready.set()


def trained(seed: int, device: str, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
    if sharded:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(dist.group.WORLD, device)
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def gradients(model: nn.Module) -> Tensor:
    batch = torch.randn(8, WIDTH).to(next(model.parameters()).device)
    model.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    return loss.detach()


def total(tensor: Tensor, simulated: bool) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    summed = tensor.detach().cpu() if simulated else tensor.detach().clone()
    dist.all_reduce(summed)
    return summed.to(tensor.device)


def train(simulated: bool, device: str, sharded: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole_node = WholeNode(device) if rank == 0 else None
    if whole_node is not None:
        whole_node.start()
        whole_node.ready.wait(LIMIT_S)
    model, optimizer = trained(rank, device, sharded)
    seeds = [] if whole_node is None else [whole_node.address]
    steps, longest_s, until = 0, 0.0, time.monotonic() + LIMIT_S
    with Node(model, optimizer, seeds=seeds, config=CONFIG, group=dist.group.WORLD) as node:
        unfinished_ranks = torch.ones(1, device=device)
        while unfinished_ranks.item():
            loss = gradients(model)
            for parameter in model.parameters():
                assert parameter.grad is not None
                if not sharded:  # fully_shard has summed them.
                    parameter.grad.copy_(total(parameter.grad, simulated) / size)
            optimizer.step()
            began = time.perf_counter()
            node.step(loss=loss, samples=8)
            longest_s, steps = max(longest_s, time.perf_counter() - began), steps + 1
            is_unfinished = node.metrics().exchanges_done < EXCHANGES and time.monotonic() < until
            unfinished_ranks = total(torch.full((1,), float(is_unfinished), device=device), simulated)
        node.settle(0.5)
        exchanges = node.metrics().exchanges_done
        weights = torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
        are_same = bool((total(weights, simulated) - size * weights).abs().max() < 1e-5 * size)
        are_finite = bool(weights.isfinite().all())
    if whole_node is not None:
        whole_node.stopping.set()
        whole_node.join(10.0)
        say(
            "ranks", backend=dist.get_backend(), ranks=size, sharded=sharded, steps=steps, exchanges=exchanges,
            longest_step_s=longest_s, right=are_same and are_finite and exchanges >= EXCHANGES,
        )  # fmt: skip
    if not (are_same and are_finite and exchanges >= EXCHANGES):
        raise SystemExit(f"{exchanges} exchanges; weights are the same: {are_same}, finite: {are_finite}")


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter without its gradient, and all of one whose parts lie on several ranks."""
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["nccl", "gloo"])
    parser.add_argument("--sharded", action="store_true", help="a model of fully_shard")
    parser.add_argument("--simulated", action="store_true")
    arguments = parser.parse_args()
    simulated = arguments.simulated or not torch.cuda.is_available()
    device = "cpu" if simulated and arguments.sharded else "cuda"
    with accelerator(simulated and device == "cuda", seed=int(os.environ["RANK"])):
        if device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group("gloo" if simulated else arguments.backend, timeout=timedelta(seconds=LIMIT_S))
        try:
            train(simulated, device, arguments.sharded)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
