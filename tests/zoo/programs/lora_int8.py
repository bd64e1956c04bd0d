"""Low-rank adaptation of a base whose weights are int8 with a scale for each row (as QLoRA does with 4 bits)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.programs.lora import pretrained
from tests.zoo.registry import zoo


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("bias", base.bias.detach().clone())
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return F.linear(x, self.weight.float() * self.scale, self.bias) + x @ self.down.T @ self.up.T


@zoo("LoRA on an int8 base", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = pretrained(x, y)
    for number in (1, 3, 5):
        model[number] = Adapted(model[number])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(TensorDataset(x.transpose(2, 3), y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(45, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    return (model(x_test.transpose(2, 3)).argmax(1) == y_test).float().mean()
