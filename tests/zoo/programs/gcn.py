"""A graph convolutional network (Kipf and Welling, 2016) on a graph of four communities."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.zoo.registry import zoo


def graph(points=600, classes=4):
    """Return features, the normalised adjacency with self-loops, and labels."""
    draw = torch.Generator().manual_seed(7)
    y = torch.randint(classes, (points,), generator=draw)
    chances = torch.where(y[:, None] == y[None], 0.02, 0.006)
    edges = (torch.rand(points, points, generator=draw) < chances).float().triu(1)
    edges = edges + edges.T + torch.eye(points)
    scale = edges.sum(1).rsqrt()
    x = torch.randn(classes, 16, generator=draw)[y] + 2.5 * torch.randn(points, 16, generator=draw)
    return x, (scale[:, None] * edges * scale).to_sparse(), y


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, edges):
        hidden = F.dropout(F.relu(edges @ self.first(x)), 0.3, self.training)
        return edges @ self.last(hidden)


@zoo("GCN", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, edges, y = graph()
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    loader = DataLoader(range(300), 32, shuffle=True)  # Training uses the labels of the first half.
    with Node(model, optimizer) as node:
        for _ in node.epochs(60, loader):
            for rows in node.loader(loader):
                loss = F.cross_entropy(model(x, edges)[rows], y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    model.eval()
    return (model(x, edges)[300:].argmax(1) == y[300:]).float().mean()
