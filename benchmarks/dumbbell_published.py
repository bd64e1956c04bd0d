"""What the authors' logged dumbbell runs drew: the samples of every node, and the dropout masks of their GPU.

Both follow from the seeds of their program (github.com/epfml/byzantine-robust-decentralized-optimizer), in whose logs
they show: the labels of each node's first samples, and the loss of the very first batches to seven digits.
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
    """Rows of the training set that each node draws, in its order: int64 (nodes, samples).

    Their sampler sorts by class, shuffles the samples of each clique ``shuffles`` times, deals them out in turns and
    orders all hands alike. It did so once when the published gossip and median were run, and twice in all other runs.
    """
    generator = torch.Generator().manual_seed(0)
    ordered, below = torch.argsort(labels, stable=True), int((labels < 5).sum())
    share = min(below, len(labels) - below) // CLIQUE
    halves = [ordered[:below], ordered[below:]]
    for _ in range(shuffles):
        halves = [half[torch.randperm(len(half), generator=generator)][: share * CLIQUE] for half in halves]
    hands = torch.cat([half.view(share, CLIQUE).T for half in halves])
    return hands[:, torch.randperm(share, generator=torch.Generator().manual_seed(0))]


def masks(batch, seed=0):
    """What dropout multiplies by, in every step of every node: float32 (batch, 64, 1, 1) and (batch, 128).

    Torch on a GPU gives element i of a mask the first number of curand's Philox sequence i; the first mask begins at
    offset 0, the second at 4, and their program puts the generator back after each node.
    """
    channels = uniform(batch * 64, 0, seed).view(batch, 64, 1, 1) < 0.75
    return channels / 0.75, (uniform(batch * 128, 1, seed).view(batch, 128) < 0.5) / 0.5


def uniform(count, block, seed):
    """One number in (0, 1] from each of so many Philox sequences, its ``block``-th of four: float64 (count,)."""
    counter = [np.full(count, value, np.uint64) for value in (block, 0, 0, 0)]
    counter[2] = np.arange(count, dtype=np.uint64)
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(ROUNDS):
        one, other = MULTIPLIERS[0] * counter[0], MULTIPLIERS[1] * counter[2]
        counter = [(other >> HALF) ^ counter[1] ^ keys[0], other & LOW, (one >> HALF) ^ counter[3] ^ keys[1], one & LOW]
        keys = [(key + step) & LOW for key, step in zip(keys, WEYL, strict=True)]
    return torch.from_numpy((counter[0] + 0.5) * 2.0**-32)
