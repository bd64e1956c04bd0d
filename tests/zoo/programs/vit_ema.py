"""A small vision transformer, evaluated with an exponential average of its weights (torch's AveragedModel)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class ViT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.label = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.label.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


@zoo("ViT with EMA of its weights", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = ViT()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(nn.ModuleDict({"model": model, "ema": ema}), optimizer) as node:
        for _ in node.epochs(20, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ema.update_parameters(model)
                node.step(loss)
    ema.eval()
    return (ema(x_test).argmax(1) == y_test).float().mean()
