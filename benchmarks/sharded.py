"""Nodes whose model is sharded over two processes, compared with nodes that hold it whole.

    python benchmarks/sharded.py [--steps 600] [--seeds 3]     what two nodes of a small GPT learn
    python benchmarks/sharded.py --memory 100000000            what a node of so many parameters takes of its host

"whole": two nodes of one process each. "sharded": two nodes of two processes each, four in all, by fully_shard over
gloo. For one seed, a node of either kind takes as many steps on the same batches of 16 windows, with AdamW and a rate
that rises and falls. max_version_gap is 0: a node waits for its mixes. The loss is in nats a byte, on 1,024 windows
that no node trained on, of the weights on which the nodes have settled.

The memory is the proportional set size (PSS) of a node's processes, as /proc has it, after mixes with another node and
less that before the Node was made: the model itself is not in it. "ranks" are two processes that each hold the whole.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from children import Child, free_port, say
from torch import nn
from torch.nn import functional as F

from gossip.config import Config
from node import Node

RATE, WARMUP, BATCH = 0.004, 0.05, 16
KINDS = "whole", "sharded"
MIXES = 6  # before memory is measured


# -- a process ---------------------------------------------------------------------------------------------------------
def group_of(folder: Path, rank: int, size: int) -> Any:
    if size == 1:
        return None
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    return dist.group.WORLD


def options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the two nodes need to wait for each other."""
    address = f"127.0.0.1:{args.port}"
    role = {"listen": address} if folder.name == "0" else {"seeds": [address]}
    return role | {"wait_for": 2, "wait_s": 600.0}


def learn(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from language import gpt, plays

    group = group_of(folder, args.rank, args.size)
    torch.manual_seed(args.seed)
    model = gpt()
    if group is not None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    x, y, x_test, y_test, _ = plays()
    config = Config(mix_every_steps=8, max_version_gap=0.0, join_timeout_s=30.0)
    drawn = torch.Generator().manual_seed(1000 * args.seed + int(folder.name))
    with Node(model, optimizer, config=config, group=group, **options(args, folder)) as node:
        figures = mixes(node)
        for step in range(args.steps):
            batch = torch.randint(len(x), (BATCH,), generator=drawn)[args.rank :: args.size]
            inputs, targets, done = x[batch], y[batch], step / args.steps
            for part in optimizer.param_groups:
                part["lr"] = RATE * min(1.0, done / WARMUP + 0.01) * (1.0 - done)
            loss = F.cross_entropy(model(inputs.long()).flatten(0, 1), targets.long().flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            node.step(loss=loss, samples=len(inputs))
            if step % 20 == 0:
                figures = mixes(node)  # The ranks of a node know it as of the last second. Settling makes more.
        node.settle(10.0, wait_s=600.0)
        with torch.no_grad():
            losses = [F.cross_entropy(model(inputs.long()).flatten(0, 1), targets.long().flatten()).item()
                      for inputs, targets in zip(x_test.split(256), y_test.split(256), strict=True)]  # fmt: skip
        figures["loss"] = statistics.fmean(losses)
        node.finish(0.0)
    return figures


def hold(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    group = group_of(folder, args.rank, args.size)
    weights = torch.full((args.memory // 1000, 1000), 1.0)
    if args.kind == "sharded":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        weights = distribute_tensor(weights, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    before = memory_bytes()
    config = Config(mix_every_steps=4, join_timeout_s=30.0)
    with Node({"weights": weights}, config=config, group=group, **options(args, folder)) as node:
        while node.metrics()["exchanges_done"] < MIXES and not node.finished:
            node.step(samples=1)
            time.sleep(0.05)
        if not node.finished:
            node.finish(0.0)
        figures = {"bytes": memory_bytes() - before, **mixes(node)}
    return figures


def mixes(node: Node) -> dict[str, Any]:
    return {"mixes": node.metrics()["exchanges_done"]}


def memory_bytes() -> int:
    match = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


# -- all of them -------------------------------------------------------------------------------------------------------
def play(args: argparse.Namespace, kinds: tuple[str, ...], seed: int) -> list[list[dict[str, Any]]]:
    """Run one node of each kind together; return what each process of each node found."""
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        common = {"seed": seed, "steps": args.steps, "memory": args.memory, "port": free_port()}
        nodes: list[list[Child]] = []
        for number, kind in enumerate(kinds):
            folder = Path(parent) / str(number)
            folder.mkdir()
            size = 1 if kind == "whole" else 2
            jobs = [common | {"folder": str(folder), "kind": kind, "rank": rank, "size": size} for rank in range(size)]
            nodes.append([stack.enter_context(Child(__file__, "--job", json.dumps(job))) for job in jobs])
        return [[process.answer() for process in ranks] for ranks in nodes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of each node")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=0, help="measure the memory at so many parameters")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        torch.set_num_threads(1)
        job = argparse.Namespace(**args.job)
        say((hold if job.memory else learn)(job, Path(job.folder)))
    elif args.memory:
        print("| nodes | bytes a parameter, of a node and its host | of one process |\n|---|---|---|")
        for kind in ("whole", "ranks", "sharded"):
            nodes = [[rank["bytes"] / args.memory for rank in ranks] for ranks in play(args, (kind, kind), 0)]
            rows = [" + ".join(f"{taken:.1f}" for taken in ranks) for ranks in nodes]
            print(f"| {kind} | {', '.join(f'{sum(ranks):.1f}' for ranks in nodes)} | {', '.join(rows)} |", flush=True)
    else:
        print("| nodes | loss of each, by seed | mean | mixes of a node while it trained |\n|---|---|---|---|")
        for name in KINDS:
            runs = [[ranks[0] for ranks in play(args, (name, name), seed)] for seed in range(args.seeds)]
            losses = ["/".join(f"{node['loss']:.4f}" for node in run) for run in runs]
            mean = statistics.fmean(node["loss"] for run in runs for node in run)
            counts = [node["mixes"] for run in runs for node in run]
            print(f"| {name} | {', '.join(losses)} | {mean:.4f} | {min(counts)} to {max(counts)} |", flush=True)


if __name__ == "__main__":
    main()
