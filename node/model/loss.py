"""The training loop's loss, read without waiting for its device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["LastLoss"]


class LastLoss:
    """The last loss, set at every step and read now and then.

    On CUDA, the value is that of the last copy to the host that has arrived: the current one would wait for the device.
    """

    def __init__(self) -> None:
        self.given: Any = None
        self.lost = False  # The last loss that was read is not finite.
        self._value: float | None = None
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def give(self, loss: Any) -> None:
        """Store a scalar tensor or a number; a tensor is detached from its graph."""
        self.given = loss.detach() if isinstance(loss, Tensor) else loss

    def read(self) -> float | None:
        """Return the loss, or None if there is none or it is not finite."""
        loss = self.given
        if isinstance(loss, Tensor) and loss.is_cuda:
            return self._read_cuda(loss)
        ready = getattr(loss, "is_ready", None)
        # An unfinished JAX loss leaves the last value in place, as on CUDA.
        if ready is None or ready():
            self._value = None if loss is None else self._number(float(loss))
        return self._value

    def _number(self, loss: float) -> float | None:
        self.lost = not math.isfinite(loss)
        return None if self.lost else loss

    def _read_cuda(self, loss: Tensor) -> float | None:
        if self._copy is not None and self._copy[1].query():  # type: ignore[no-untyped-call]
            self._value = self._number(float(self._copy[0]))
            self._copy = None
        if self._copy is None:
            host = torch.empty((), pin_memory=True)
            host.copy_(loss.reshape(()), non_blocking=True)
            self._copy = (host, torch.cuda.current_stream(loss.device).record_event())
        return self._value
