"""Reproducible dropout: a mask depends only on the peer's seed, its step and the position in the model.

The masks are therefore the same however the steps of several peers are batched.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from sim.arrays import I64
from sim.seeds import GOLDEN, derive_int, splitmix

# Bits of a hash that decide whether an element is kept: exact in float32, and enough to meet p to within 6e-8.
BITS = 24
LOW_32 = (1 << 32) - 1  # Selects the low 32 bits.
LAYER_ODD = 0x9E3779B1  # An odd constant that separates the hash inputs of layers.
# lowbias32 of C. Wellons, "Prospecting for Hash Functions", 2018.
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B
AnyDropout = nn.modules.dropout._DropoutNd  # The base class of torch's dropout layers.
KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StepKeys:
    """The random keys of all peers' steps: they depend only on the seed, the peer's name and the step's number."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._keys = np.array([derive_int(seed, name, "dropout") for name in names], np.uint64)

    def of(self, rows: I64, steps: I64) -> I64:
        """Return the key of each step: 32-bit numbers as int64 (rows,).

        Args:
            rows: Indexes of peers in ``names``, int64 (rows,).
            steps: The number of each one's step, int64 (rows,).
        """
        hashes = splitmix(self._keys[rows] + steps.astype(np.uint64) * GOLDEN)
        return (hashes >> np.uint64(32)).astype(np.int64)


class Dropouts:
    """The dropout layers of one module, numbered in the order in which a forward pass reaches them.

    The constructor replaces these layers in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.key: torch.Tensor | None = None  # Key of the current step; under vmap one per model.
        self.reached_layers = 0  # Layers that the forward pass has reached.
        self.exist = False  # The module has at least one layer that drops something.
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, AnyDropout) and type(child) in KINDS and child.p > 0:
                    setattr(parent, name, KeyedDropout(child, self))
                    self.exist = True

    def begin(self, key: torch.Tensor | None) -> None:
        """Prepare for the forward pass of the step with this key; None switches dropout off."""
        self.key, self.reached_layers = key, 0


class KeyedDropout(nn.Module):
    """A replacement of nn.Dropout and of its variants that drop whole channels."""

    def __init__(self, module: AnyDropout, dropouts: Dropouts) -> None:
        super().__init__()
        self.p, self.whole_channels = module.p, type(module) is not nn.Dropout
        vars(self)["dropouts"] = dropouts  # Set past nn.Module, so that it is not part of the module's state.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropouts: Dropouts = vars(self)["dropouts"]
        if dropouts.key is None:
            return x
        dropouts.reached_layers += 1
        # The mask has shape (batch, channels, 1, ...) if whole channels are dropped, else the shape of x.
        shape = [*x.shape[:2], *([1] * (x.dim() - 2))] if self.whole_channels else list(x.shape)
        positions = torch.arange(int(np.prod(shape))).view(shape)
        hashes = hashed(hashed(positions + dropouts.reached_layers * LAYER_ODD) ^ dropouts.key)
        mask = (hashes >> (32 - BITS)) >= round(self.p * (1 << BITS))  # True where the element is kept.
        # With p = 1 the quotient would be 0 / 0. The product has a gradient, zero, as that of nn.Dropout.
        return x * mask.to(x.dtype) / (1.0 - self.p) if self.p < 1 else x * 0.0


def hashed(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit numbers: each bit of the result depends on each bit of x.

    x is int64, where a product of 32 and 31 bits does not overflow, but SECOND_FACTOR has 32 bits. SECOND_FACTOR - 2^32
    has 31 bits and a sign, and gives the same modulo 2^32.
    """
    x = x & LOW_32
    x = (x ^ (x >> 16)) * FIRST_FACTOR & LOW_32
    x = (x ^ (x >> 15)) * (SECOND_FACTOR - (1 << 32)) & LOW_32
    return x ^ (x >> 16)
