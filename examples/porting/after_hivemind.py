"""The same as a swarm: GOSSIP_SEEDS=HOST:PORT python after_hivemind.py for each node but the first."""

import torch
from task import SAMPLES, net, right, train, x_test
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gossip import Config, Node

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with Node(model, optimizer, config=Config(swarm="digits", mix_every_steps=8)) as node:
    print("others start with GOSSIP_SEEDS =", node.address)
    loader = DataLoader(train, batch_size=16, shuffle=True)  # Each node has its own data, so nothing is divided.
    while not node.finished and node.swarm_samples < SAMPLES:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            if node.finished or node.swarm_samples >= SAMPLES:
                break
    losses = [member.loss for member in node.members if member.state == "alive" and member.loss is not None]
    losses = losses or [loss.item()]  # Members learn of a loss within a second.
    print(f"{len(losses)} alive, mean loss {sum(losses) / len(losses):.3f}")
    node.settle(1)
    accuracy = right(model) / len(x_test)
    print(f"accuracy {accuracy:.3f}")
    node.finish(1)
