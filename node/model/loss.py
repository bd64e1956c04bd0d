"""The training loop's loss, read without waiting for its device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["LastLoss"]


class LastLoss:
    """The last loss, set at every step and read now and then.

    On CUDA the value is that of the last copy that has arrived on the host. The newest one would wait for the device.
    """

    def __init__(self) -> None:
        self.latest: Any = None
        self.is_not_finite = False  # As of the last value that was read.
        self._value: float | None = None  # The last value that was read; None if there is none or it is not finite.
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None  # The copy that is on its way.

    def set(self, loss: Any) -> None:
        """Store a scalar tensor or a number; a tensor is detached from its graph."""
        self.latest = loss.detach() if isinstance(loss, Tensor) else loss

    def read(self) -> float | None:
        """Return the loss, or None if there is none or it is not finite."""
        loss = self.latest
        if isinstance(loss, Tensor) and loss.is_cuda:
            return self._read_cuda(loss)
        is_ready = getattr(loss, "is_ready", None)  # Only JAX's arrays have it.
        if is_ready is None or is_ready():  # Until then the last value stays, as on CUDA.
            self._value = None if loss is None else self._checked(float(loss))
        return self._value

    def _checked(self, loss: float) -> float | None:
        """Note whether the loss is finite; return it, or None if it is not."""
        self.is_not_finite = not math.isfinite(loss)
        return None if self.is_not_finite else loss

    def _read_cuda(self, loss: Tensor) -> float | None:
        if self._copy is not None and self._copy[1].query():  # type: ignore[no-untyped-call]
            self._value = self._checked(float(self._copy[0]))
            self._copy = None
        if self._copy is None:
            host = torch.empty((), pin_memory=True, device="cpu")
            host.copy_(loss.reshape(()), non_blocking=True)
            self._copy = (host, torch.cuda.current_stream(loss.device).record_event())
        return self._value
