"""Reproducible dropout: a mask depends only on the peer's seed, its step and the position in the model.

The masks are therefore the same however the steps of several peers are batched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sim.learning.batches import GOLDEN, mixed
from sim.seeds import derive

__all__ = ["Dropouts", "StepKeys"]

I64 = NDArray[np.int64]

BITS = 24  # bits of a hash that decide a mask: exact in float32, and precise enough to meet p to within 6e-8
LOW = (1 << 32) - 1
# lowbias32 of C. Wellons, "Prospecting for Hash Functions", 2018, in torch's int64, where a product of 32 and 31 bits
# does not overflow.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
Kind = nn.modules.dropout._DropoutNd
KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StepKeys:
    """The random keys of all peers' steps: they depend only on the seed, the peer's name and the step's number."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        keys = [int.from_bytes(derive(seed, name, "dropout")[:8], "little") for name in names]
        self._keys = np.array(keys, np.uint64)

    def of(self, rows: I64, steps: I64) -> I64:
        """Return the 32-bit key of each row's step, int64 (rows,)."""
        drawn = mixed(self._keys[rows] + steps.astype(np.uint64) * GOLDEN)
        return (drawn >> np.uint64(32)).astype(np.int64)


class Dropouts:
    """The dropout layers of one module, numbered in the order in which a forward pass reaches them."""

    def __init__(self, module: nn.Module) -> None:
        self.key: torch.Tensor | None = None  # key of the current step; under vmap one per model
        self.met = 0  # layers that the forward pass has reached
        self.any = False
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, Kind) and type(child) in KINDS and child.p > 0:
                    setattr(parent, name, KeyedDropout(child, self))
                    self.any = True

    def begin(self, key: torch.Tensor | None) -> None:
        """Prepare for the forward pass of the step with this key; None switches dropout off."""
        self.key, self.met = key, 0


class KeyedDropout(nn.Module):
    """A replacement of nn.Dropout and of its variants that drop whole channels."""

    def __init__(self, module: Kind, all_of_them: Dropouts) -> None:
        super().__init__()
        self.p, self.whole_channels = module.p, type(module) is not nn.Dropout
        vars(self)["shared"] = all_of_them  # set past nn.Module, so that it is not part of the module's state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: Dropouts = vars(self)["shared"]
        if shared.key is None:
            return x
        shared.met += 1
        # The mask has shape (batch, channels, 1, ...) if whole channels are dropped, else the shape of x.
        shape = [*x.shape[:2], *([1] * (x.dim() - 2))] if self.whole_channels else list(x.shape)
        places = torch.arange(int(np.prod(shape))).view(shape)
        drawn = hashed(hashed(places + shared.met * 0x9E3779B1) ^ shared.key)
        kept = (drawn >> (32 - BITS)) >= round(self.p * (1 << BITS))
        return x * kept.to(x.dtype) / (1.0 - self.p) if self.p < 1 else x * 0.0


def hashed(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit numbers: each bit of the result depends on each bit of x."""
    x = x & LOW
    x = (x ^ (x >> 16)) * FIRST & LOW
    x = (x ^ (x >> 15)) * (SECOND - (1 << 32)) & LOW  # SECOND - 2^32 gives the same modulo 2^32 without overflow
    return x ^ (x >> 16)
