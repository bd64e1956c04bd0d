"""The random draws of the authors' logged dumbbell runs: the samples of every node, and their GPU's dropout masks.

Both follow from the seeds of their program (github.com/epfml/byzantine-robust-decentralized-optimizer). Its logs
confirm them: they show the labels of each node's first samples, and the loss of the first batches to seven digits.
"""

import numpy as np
import torch

CLIQUE = 10
ROUNDS = 10
# Philox4x32: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def samples(labels, shuffles):
    """Return the rows of the training set that each node draws, in its order: int64 (nodes, samples).

    Their sampler sorts by class, shuffles the samples of each clique ``shuffles`` times, and assigns them round-robin.
    It then permutes the samples of all nodes in the same way. The published runs of gossip and median shuffled once,
    all others twice.
    """
    generator = torch.Generator().manual_seed(0)
    ordered, below = torch.argsort(labels, stable=True), int((labels < 5).sum())
    share = min(below, len(labels) - below) // CLIQUE
    halves = [ordered[:below], ordered[below:]]
    for _ in range(shuffles):
        halves = [half[torch.randperm(len(half), generator=generator)][: share * CLIQUE] for half in halves]
    dealt = torch.cat([half.view(share, CLIQUE).T for half in halves])
    return dealt[:, torch.randperm(share, generator=torch.Generator().manual_seed(0))]


def masks(batch, seed=0):
    """Return the dropout factors of every step of every node: float32 (batch, 64, 1, 1) and (batch, 128).

    On a GPU, torch gives element i of a mask the first number of curand's Philox sequence i. The first mask starts at
    offset 0, the second at 4, and their program resets the generator after each node.
    """
    channels = uniform(batch * 64, 0, seed).view(batch, 64, 1, 1) < 0.75
    return channels / 0.75, (uniform(batch * 128, 1, seed).view(batch, 128) < 0.5) / 0.5


def uniform(count, block, seed):
    """Draw a number in (0, 1] from the ``block``-th block of each of ``count`` Philox sequences: float64 (count,)."""
    counter = [np.full(count, value, np.uint64) for value in (block, 0, 0, 0)]
    counter[2] = np.arange(count, dtype=np.uint64)
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(ROUNDS):
        product_0, product_2 = MULTIPLIERS[0] * counter[0], MULTIPLIERS[1] * counter[2]
        counter = [
            (product_2 >> HALF) ^ counter[1] ^ keys[0], product_2 & LOW,
            (product_0 >> HALF) ^ counter[3] ^ keys[1], product_0 & LOW,
        ]  # fmt: skip
        keys = [(key + step) & LOW for key, step in zip(keys, WEYL, strict=True)]
    return torch.from_numpy((counter[0] + 0.5) * 2.0**-32)
