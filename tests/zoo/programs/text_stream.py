"""Text that is read from files as a stream."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.zoo.data import LETTERS, text
from tests.zoo.registry import zoo

CONTEXT, FILES, LINES = 10, 24, 500


class Windows(IterableDataset):
    """The windows of the files, which come in an order that the node gives."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        for name in self.files:
            numbers = torch.tensor([LETTERS.index(letter) for letter in Path(name).read_text()])
            windows = numbers.unfold(0, CONTEXT + 1, 1)
            yield from windows[torch.randperm(len(windows))]


@zoo("iterable text", "nats per character", "low", 0.08)
def run(Node, seed):
    torch.manual_seed(seed)
    folder = Path(tempfile.mkdtemp(prefix="zoo-text-"))
    files = [str(folder / f"{number}.txt") for number in range(FILES)]
    for number, name in enumerate(files):
        Path(name).write_text("".join(LETTERS[at] for at in text(LINES + CONTEXT, 100 + number)))
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(24 * CONTEXT, 128), nn.Tanh())
    model = nn.Sequential(nn.Embedding(len(LETTERS), 24), hidden, nn.Linear(128, len(LETTERS)))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    with Node(model, optimizer) as node:
        loader = DataLoader(Windows(node.shards(files, epochs=1)), 64)
        for _ in node.epochs(8, FILES * LINES):
            for rows in node.loader(loader):
                loss = F.cross_entropy(model(rows[:, :-1]), rows[:, -1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    test = text(4_000).unfold(0, CONTEXT + 1, 1)
    with torch.no_grad():
        return F.cross_entropy(model(test[:, :-1]), test[:, -1])
