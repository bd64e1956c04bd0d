"""Early stopping by a validation loss of all nodes, with the best weights in the end."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


@zoo("early stopping", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    best, best_loss, waited = copy.deepcopy(model.state_dict()), float("inf"), 0
    with Node(model, optimizer) as node:
        train, held_out = node.split(TensorDataset(x, y), [0.8, 0.2])
        loader, (x_held_out, y_held_out) = DataLoader(train, 32, shuffle=True), held_out[:]
        for _ in node.epochs(40, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
            node.settle(20, wait_s=60)  # All nodes then evaluate the same weights, and stop together.
            with torch.no_grad():
                loss = F.cross_entropy(model(x_held_out), y_held_out).item()
            waited += 1
            if loss < best_loss:
                best, best_loss, waited = copy.deepcopy(model.state_dict()), loss, 0
            if node.reduce({"stops": waited == 6})["stops"].max:
                break
        model.load_state_dict(best)
        node.settle(20, wait_s=60)
    return (model(x_test).argmax(1) == y_test).float().mean()
