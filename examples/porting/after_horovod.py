"""The same as a swarm. Killed and started again it continues, with its swarm or from its file."""

from pathlib import Path

import torch
from task import SAMPLES, net, right, x_test, x_train, y_train
from torch.nn import functional as F

from gossip import Node

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = Path("state/run.safetensors")

with Node(model, optimizer, state_dir="state") as node:  # Each node of a machine needs its own directory.
    if saved.exists():
        node.load(saved)  # a living swarm is ahead of any file, and its weights stay
    steps = 0
    while not node.finished and node.swarm_samples < SAMPLES:
        for x, y in node.shard((x_train, y_train), batch_size=16):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            steps += 1
            if steps % 100 == 0:
                node.save(saved)
            if node.finished or node.swarm_samples >= SAMPLES:
                break
    node.settle(1)
    accuracy = right(model) / len(x_test)
    print(f"accuracy {accuracy:.3f}")
    node.save(saved)
    node.finish(1)
