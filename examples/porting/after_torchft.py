"""The same as a swarm, with checkpoints in the program's own format."""

from pathlib import Path

import torch
from task import SAMPLES, net, right, x_test, x_train, y_train
from torch.nn import functional as F

from gossip import Node

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
node = Node(model, optimizer)
file = Path("digits.pt")
if file.exists():
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optim"])
    node.load_state_dict(saved["node"])  # The run of these weights, and its progress.

with node:
    while not node.finished and node.swarm_samples < SAMPLES:
        for x, y in node.shard((x_train, y_train), batch_size=16):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            if node.finished or node.swarm_samples >= SAMPLES:
                break
    node.settle(1)
    accuracy = right(model) / len(x_test)
    print(f"accuracy {accuracy:.3f}")
    node.finish(1)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "node": node.state_dict()}, file)
