"""Scalars that are read without waiting for their device, as the training loop's loss, and earlier samples."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor that is on its way from a CUDA device to the host; others are there at once.

    Attributes:
        values: The copy on the host. Read it once :meth:`done` returns True.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            self.values.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self.values = tensor.detach().to("cpu", copy=True)

    def done(self) -> bool:
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]


def largest(scalars: Sequence[Tensor]) -> Tensor:
    """Return the largest of some scalars, float32 on the device of the first."""
    device = scalars[0].device
    return torch.stack([scalar.to(device, torch.float32) for scalar in scalars]).amax()


def beside(last: Sequence[Tensor], now: Sequence[Tensor]) -> list[Tensor]:
    """Return earlier samples on the devices of later ones, since the program may have moved the model."""
    return [old.to(new.device) for old, new in zip(last, now, strict=True)]


class LastLoss:
    """The last loss, set at every step and read now and then.

    On CUDA the value is that of the last copy that has arrived on the host. The newest one would wait for the device.
    """

    def __init__(self) -> None:
        self.latest: Any = None
        self.is_not_finite = False  # As of the last value that was read.
        self._first: list[HostCopy] = []  # The first two losses.
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
        if len(self._first) < 2 or not all(copy.done() for copy in self._first):
            return None
        return float(self._first[0].values), float(self._first[1].values)

    def read(self) -> float | None:
        """Return the loss, or None if there is none or it is not finite."""
        loss = self.latest
        if isinstance(loss, Tensor) and loss.is_cuda:
            if self._copy is not None and self._copy.done():
                self._value, self._copy = self._checked(float(self._copy.values)), None
            self._copy = self._copy or HostCopy(loss)
            return self._value
        is_ready = getattr(loss, "is_ready", None)  # Only JAX's arrays have it.
        if is_ready is None or is_ready():  # Until then the last value stays, as on CUDA.
            self._value = None if loss is None else self._checked(float(loss))
        return self._value

    def _checked(self, loss: float) -> float | None:
        """Note whether the loss is finite; return it, or None if it is not."""
        self.is_not_finite = not math.isfinite(loss)
        return None if self.is_not_finite else loss


def first_copy(loss: Any) -> HostCopy:
    """Return one of the first losses; NaN where reading it would wait for a device."""
    if isinstance(loss, Tensor) and loss.device.type in ("cpu", "cuda"):
        return HostCopy(loss)
    is_elsewhere = isinstance(loss, Tensor) or hasattr(loss, "is_ready")
    return HostCopy(torch.tensor(math.nan if is_elsewhere else float(loss), dtype=torch.float64, device="cpu"))
