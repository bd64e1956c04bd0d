"""A small GPT under bf16 autocast that accumulates gradients over two batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import LETTERS, text
from tests.zoo.registry import zoo

CONTEXT = 16


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, len(LETTERS), bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(CONTEXT))
        nn.init.normal_(self.tokens.weight, std=0.05)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places(self.order)))


@zoo("nanoGPT, bf16 autocast, accumulation", "nats per character", "low", 0.12, gains=False)
def run(Node, seed):
    torch.manual_seed(seed)
    windows = text(36_000).unfold(0, CONTEXT + 1, 8)
    train, test = windows[:4_000], windows[4_000:]
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1)
    loader = DataLoader(TensorDataset(train), 16, shuffle=True, drop_last=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(6, loader):
            for number, (rows,) in enumerate(node.loader(loader), 1):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                (loss / 2).backward()
                if number % 2 == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    node.step(loss)
    with torch.no_grad():
        return F.cross_entropy(model(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten())
