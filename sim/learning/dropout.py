"""Dropout whose masks a peer's seed, its step and the place in the model decide, so that they are the same whoever
else's step is computed in the same call."""

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

BITS = 24  # of a hash that a mask is drawn from: 24 are exact in float32, and p is met to within 6e-8
LOW = (1 << 32) - 1
# lowbias32 of C. Wellons, "Prospecting for Hash Functions", 2018, in torch's int64: of 32 bits times 31 none is lost.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
Kind = nn.modules.dropout._DropoutNd
KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StepKeys:
    """A number for each step of each peer, decided by the seed, the peer's name and how many steps it took before."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        keys = [int.from_bytes(derive(seed, name, "dropout")[:8], "little") for name in names]
        self._keys = np.array(keys, np.uint64)

    def of(self, rows: I64, steps: I64) -> I64:
        """32 bits of each, int64 (rows,)."""
        drawn = mixed(self._keys[rows] + steps.astype(np.uint64) * GOLDEN)
        return (drawn >> np.uint64(32)).astype(np.int64)


class Dropouts:
    """All the dropouts of one module, in the order in which a forward pass meets them."""

    def __init__(self, module: nn.Module) -> None:
        self.key: torch.Tensor | None = None  # of the step that is computed; under vmap of each model
        self.met = 0
        self.any = False
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, Kind) and type(child) in KINDS and child.p > 0:
                    setattr(parent, name, KeyedDropout(child, self))
                    self.any = True

    def begin(self, key: torch.Tensor | None) -> None:
        """A forward pass follows, of the step with this key; None: nothing is dropped out."""
        self.key, self.met = key, 0


class KeyedDropout(nn.Module):
    """nn.Dropout, or one of its kinds that drop whole channels."""

    def __init__(self, module: Kind, all_of_them: Dropouts) -> None:
        super().__init__()
        self.p, self.whole_channels = module.p, type(module) is not nn.Dropout
        vars(self)["shared"] = all_of_them  # no part of the module's state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: Dropouts = vars(self)["shared"]
        if shared.key is None:
            return x
        shared.met += 1
        # (batch, channels, 1, ...) where whole channels go
        shape = [*x.shape[:2], *([1] * (x.dim() - 2))] if self.whole_channels else list(x.shape)
        places = torch.arange(int(np.prod(shape))).view(shape)
        drawn = hashed(hashed(places + shared.met * 0x9E3779B1) ^ shared.key)
        kept = (drawn >> (32 - BITS)) >= round(self.p * (1 << BITS))
        return x * kept.to(x.dtype) / (1.0 - self.p) if self.p < 1 else x * 0.0


def hashed(x: torch.Tensor) -> torch.Tensor:
    """Each bit of 32 depends on each bit of 32."""
    x = x & LOW
    x = (x ^ (x >> 16)) * FIRST & LOW
    x = (x ^ (x >> 15)) * (SECOND - (1 << 32)) & LOW  # the same modulo 2^32
    return x ^ (x >> 16)
