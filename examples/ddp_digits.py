"""Handwritten digits by DistributedDataParallel: all processes of one torchrun are one node of the swarm, and a step's
batch is the sum of theirs. The lines that say `gossip` are all that training in a swarm adds.

One node of two processes:    torchrun --nproc-per-node 2 examples/ddp_digits.py
Another one, that joins it:   GOSSIP_SEEDS=HOST:PORT torchrun --master-port 29501 ... (as above)
On each of several hosts, started again when a process of it dies, without the others noticing more than that:
    GOSSIP_LISTEN=0.0.0.0:7700 GOSSIP_SECRET_FILE=swarm.secret GOSSIP_SEEDS=HOST0:7700 GOSSIP_STATE_DIR=state \\
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --standalone --nproc-per-node gpu --max-restarts 10 examples/ddp_digits.py
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gossip import Node  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--batch-size", type=int, default=8, help="of one process")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
parser.add_argument("--settle", type=float, default=3.0, help="seconds to mix without training before evaluating")
args = parser.parse_args()

dist.init_process_group()  # gloo for the host, and NCCL where there is CUDA
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

# 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (torch.from_numpy(part).float().to(device) for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (torch.from_numpy(part).long().to(device) for part in parts[2:])  # (1437,), (360,)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)  # 4,810 parameters
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

with Node(model, optimizer, group=dist.group.WORLD) as node:  # gossip 2: the first process speaks for all
    while not node.finished and node.swarm_samples < args.samples:  # gossip 3: all processes stop at the same step
        for x, y in node.shard((x_train, y_train), batch_size=args.batch_size):  # gossip 4: this process' part
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # the mean of all processes' gradients
            optimizer.step()
            node.step(loss=loss, samples=len(x))  # gossip 5: all make the same change; samples are summed
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            time.sleep(args.step_delay)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle)  # mix without training until the nodes agree
    node.finish()
    metrics = node.metrics()
    with torch.no_grad():
        accuracy = (model.module(x_test).argmax(1) == y_test).float().mean().item()
if dist.get_rank() == 0:
    print(
        json.dumps({"node": node.id, "accuracy": accuracy, "steps": metrics.steps, "samples": metrics.samples}),
        flush=True,
    )
dist.destroy_process_group()
