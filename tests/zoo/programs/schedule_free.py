"""Schedule-free SGD (Defazio et al., 2024): the model trains at y and is evaluated at the average x."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class ScheduleFreeSGD(torch.optim.Optimizer):
    """z <- z - lr g(y);  x <- (1 - c) x + c z with c = 1 / t;  y = (1 - beta) z + beta x."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "t": 0, "is_training": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] += 1
            share, beta, lr = 1 / group["t"], group["beta"], group["lr"]
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                x = (y - (1 - beta) * z) / beta
                z.sub_(y.grad, alpha=lr)
                x.lerp_(z, share)
                y.copy_((1 - beta) * z + beta * x)

    @torch.no_grad()
    def eval(self):
        """Put x into the model."""
        for group in self.param_groups:
            for y in group["params"] if group["is_training"] else ():
                y.copy_((y - (1 - group["beta"]) * self.state[y]["z"]) / group["beta"])
            group["is_training"] = False


@zoo("schedule-free optimizer", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = ScheduleFreeSGD(model.parameters(), 0.5)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(30, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
        optimizer.eval()  # Settling makes the nodes agree on the model's weights, so x must be in the model first.
        node.settle(5, wait_s=60)
    return (model(x_test).argmax(1) == y_test).float().mean()
