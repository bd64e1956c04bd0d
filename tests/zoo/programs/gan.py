"""A GAN (Goodfellow et al., 2014) of points on a ring: generator and discriminator are two Nodes."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.registry import zoo


def ring(count, generator):
    """Return points of eight clusters on a ring."""
    angles = torch.randint(8, (count,), generator=generator) * (math.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


def energy_distance(a, b):
    return 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()


@zoo("GAN (two Nodes)", "energy distance", "low", 0.02)
def run(Node, seed):
    torch.manual_seed(seed)
    points = ring(8192, torch.Generator().manual_seed(7))
    maker = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    judge = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    maker_optimizer = torch.optim.Adam(maker.parameters(), 1e-3, betas=(0.5, 0.999))
    judge_optimizer = torch.optim.Adam(judge.parameters(), 2e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(points), 64, shuffle=True)
    with Node(maker, maker_optimizer) as node, Node(judge, judge_optimizer) as node_judge:
        for _ in node.epochs(10, loader):
            for (real,) in node.loader(loader):
                made = maker(torch.randn(len(real), 8))
                judge_loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(real)).mean()
                judge_optimizer.zero_grad()
                judge_loss.backward()
                judge_optimizer.step()
                node_judge.step(judge_loss, samples=len(real))
                loss = F.softplus(-judge(made)).mean()
                maker_optimizer.zero_grad()
                loss.backward()
                maker_optimizer.step()
                node.step(loss)
        node_judge.settle(5, wait_s=60)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        return energy_distance(maker(torch.randn(2000, 8, generator=generator)), ring(2000, generator))
