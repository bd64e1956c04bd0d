"""OneCycleLR (Smith and Topin, 2017), made for the steps of one process."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


@zoo("OneCycleLR", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    scheduler = OneCycleLR(optimizer, 0.3, epochs=25, steps_per_epoch=len(loader))
    with Node(model, optimizer) as node:
        node.schedule(scheduler)
        for _ in node.epochs(25, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
        assert optimizer.param_groups[0]["lr"] < 0.01, "the schedule has come to its end"
    return (model(x_test).argmax(1) == y_test).float().mean()
