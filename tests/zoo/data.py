"""The data of the zoo's programs, the same in every process: small images, and text of a small grammar."""

import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits for training and test: images (n, 1, 8, 8) with values from 0 to 1, and labels."""
    raw = load_digits()
    x, y = torch.tensor(raw.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(raw.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(7))
    train, test = order[:1437], order[1437:]
    return x[train], y[train], x[test], y[test]


def text(characters: int, seed: int = 7) -> Tensor:
    """Return sentences of a small grammar as numbers of :data:`LETTERS`."""
    draw = random.Random(seed)
    names = ["the cat", "a dog", "the old man", "my sister", "a bird", "the queen", "some child"]
    verbs = ["sees", "follows", "likes", "calls", "finds", "paints"]
    places = ["in the garden", "near a river", "at home", "under the bridge", "on a hill"]
    parts: list[str] = []
    while sum(map(len, parts)) < characters:
        sentence = f"{draw.choice(names)} {draw.choice(verbs)} {draw.choice(names)}"
        parts.append(sentence + (f" {draw.choice(places)}. " if draw.random() < 0.6 else ". "))
    return torch.tensor([LETTERS.index(letter) for letter in "".join(parts)[:characters]])
