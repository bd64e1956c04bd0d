"""The training loop's loss, read without waiting for its device."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["LastLoss"]

HostCopy: TypeAlias = tuple[Tensor, torch.cuda.Event]
"""A loss on its way to the host, and the event at which it has arrived."""


class LastLoss:
    """The last loss, set at every step and read now and then.

    On CUDA the value is that of the last copy that has arrived on the host. The newest one would wait for the device.
    """

    def __init__(self) -> None:
        self.latest: Any = None
        self.is_not_finite = False  # As of the last value that was read.
        self._first: list[float | HostCopy] = []  # The first two losses.
        self._value: float | None = None  # The last value that was read; None if there is none or it is not finite.
        self._copy: HostCopy | None = None  # The copy that is on its way.

    def set(self, loss: Any) -> None:
        """Store a scalar tensor or a number; a tensor is detached from its graph."""
        self.latest = loss.detach() if isinstance(loss, Tensor) else loss
        if len(self._first) < 2:
            self._first.append(first_copy(self.latest))

    @property
    def first_two(self) -> tuple[float, float] | None:
        """Return the first two losses; None until both are on the host."""
        if len(self._first) == 2 and all(isinstance(loss, float) or loss[1].query() for loss in self._first):  # type: ignore[no-untyped-call]
            self._first = [loss if isinstance(loss, float) else float(loss[0]) for loss in self._first]
            return self._first[0], self._first[1]  # type: ignore[return-value]
        return None

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
            self._copy = copy_to_host(loss)
        return self._value


def copy_to_host(loss: Tensor) -> HostCopy:
    """Begin to copy a loss from its device."""
    host = torch.empty((), device="cpu", pin_memory=True)
    host.copy_(loss.reshape(()), non_blocking=True)
    return host, torch.cuda.current_stream(loss.device).record_event()


def first_copy(loss: Any) -> float | HostCopy:
    """Return one of the first losses, or its copy on the way; NaN where reading it would wait for a device."""
    if isinstance(loss, Tensor) and loss.is_cuda:
        return copy_to_host(loss)
    is_on_host = loss.device.type == "cpu" if isinstance(loss, Tensor) else not hasattr(loss, "is_ready")
    return float(loss) if is_on_host else math.nan
