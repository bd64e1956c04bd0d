"""Half-precision values that arrive in a float32 host vector as they are, and are widened in its own memory."""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

__all__ = ["HALF_TYPES", "HalfPart", "crossing_type"]

HALF_TYPES: Final = (torch.bfloat16, torch.float16)
LAST_ELEMENTS = 1 << 15  # The last elements are widened through a copy of 64 KiB, which stays in the cache.


def crossing_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor's elements go to the host: half precision as it is, all others as float32."""
    return tensor.dtype if tensor.dtype in HALF_TYPES else torch.float32


class HalfPart:
    """Consecutive elements of a host vector that arrive in half precision.

    They arrive in the second half of their own memory. Widening goes from the front to the back, and needs no memory.

    Args:
        wide: The elements, float32.
        dtype: The type in which they arrive.

    Attributes:
        narrow: The place at which they arrive.
        is_widened: True once ``wide`` holds their values.
    """

    def __init__(self, wide: Tensor, dtype: torch.dtype) -> None:
        self.wide, self.narrow = wide, wide.view(dtype)[wide.numel() :]
        self.is_widened, self.lock = False, threading.Lock()

    @torch.no_grad()
    def widen(self) -> None:
        """Widen the values, once they have arrived. A second call does nothing.

        The first half of the values is widened into the memory in front of them, which holds none. Then the first half
        of the rest is, and so on: no copy overlaps with what it reads.
        """
        with self.lock:
            if self.is_widened:
                return
            start, rest = 0, self.narrow.numel()
            while rest > LAST_ELEMENTS:
                stop = start + rest // 2
                self.wide[start:stop].copy_(self.narrow[start:stop])
                start, rest = stop, rest - rest // 2
            self.wide[start:].copy_(self.narrow[start:].clone())
            self.is_widened = True
