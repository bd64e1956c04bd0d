"""The same as a swarm: gossip local -n 2 after_ddp.py."""

import torch
from task import EPOCHS, net, right, train, x_test
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gossip import Node

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / EPOCHS)
loader = DataLoader(train, batch_size=16, shuffle=True)

with Node(model, optimizer) as node:
    node.schedule(schedule, steps=EPOCHS)
    for _ in node.epochs(EPOCHS, loader):
        for x, y in node.loader(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss)

    accuracy = right(model) / len(x_test)  # each node its own, of the same weights
    told = node.reduce({"accuracy": accuracy})["accuracy"]
    print(f"accuracy {accuracy:.3f}, median of {told.members} nodes {told.median:.3f}")
    node.save(f"digits-{node.id[:8]}")
    node.finish(1)
