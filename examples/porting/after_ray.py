"""The same as a swarm. Each node keeps the best weights that it has seen."""

import torch
from task import EPOCHS, SAMPLES, net, right, x_test, x_train, y_train
from torch.nn import functional as F

from gossip import Node


def learn(**settings):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best, evaluated = 0.0, 0
    with Node(model, optimizer, **settings) as node:
        while not node.finished and node.swarm_samples < SAMPLES:
            for x, y in node.shard((x_train, y_train), batch_size=16):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss=loss, samples=len(x))
                if node.swarm_samples >= evaluated + SAMPLES // EPOCHS:  # once an epoch of the swarm
                    evaluated = node.swarm_samples
                    accuracy = right(model) / len(x_test)
                    told = node.reduce({"accuracy": accuracy, "best": max(best, accuracy)})
                    if accuracy > best:
                        best = accuracy
                        node.save(f"best-{node.id[:8]}")
                if node.finished or node.swarm_samples >= SAMPLES:
                    break
        print(f"best here {best:.3f}, best of {told['best'].members} nodes {told['best'].max:.3f}")
        node.finish(1)
    return best


if __name__ == "__main__":
    accuracy = learn()  # in a task of Ray: learn(seeds=[address of any], listen="0.0.0.0:7700", secret=...)
