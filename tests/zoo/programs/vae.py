"""A variational autoencoder (Kingma and Welling, 2013) on small images."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        shown = self.decoder(mean + noise * (log_variance / 2).exp())
        rebuilt = F.binary_cross_entropy_with_logits(shown, x.flatten(1), reduction="none").sum(1)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return (rebuilt + divergence).mean()


@zoo("VAE", "negative ELBO", "low", 0.4)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, _ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(40, loader):
            for images, _ in node.loader(loader):
                loss = model(images, torch.randn(len(images), 8))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    with torch.no_grad():
        return model(x_test, torch.randn(len(x_test), 8, generator=torch.Generator().manual_seed(1)))
