"""Sharpness-aware minimisation (Foret et al., 2020) around SGD."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class SAM(torch.optim.SGD):
    """SGD with the gradient at the worst point within a radius."""

    radius = 0.05

    @torch.no_grad()
    def climb(self):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        length = torch.stack([weight.grad.norm() for weight in weights]).norm() + 1e-12
        for weight in weights:
            self.state[weight]["old_p"] = weight.clone()
            weight.add_(weight.grad, alpha=float(self.radius / length))

    @torch.no_grad()
    def step_from_start(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(self.state[weight]["old_p"])
        self.step()


@zoo("SAM", "accuracy", "high", 0.03, late_notices=("optimizer",))  # Its SAM has not stepped yet.
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = SAM(model.parameters(), 0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(20, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.climb()
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step_from_start()
                node.step(loss)
    return (model(x_test).argmax(1) == y_test).float().mean()
