"""Host vectors that are added repeatedly, with a copy on the device for as long as they do not change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LastingValues"]

PORTION_ELEMENTS = 1 << 24  # 64 MB are page-locked at a time, and not a vector of the whole model.


@dataclass(frozen=True, slots=True)
class DeviceValues:
    """The copy of a host vector's version on a device. ``ready`` follows the copy."""

    version: int
    flat: Tensor
    ready: torch.cuda.Event | None


class LastingValues:
    """Device copies of host vectors, by the vector's address. Only the training thread uses it."""

    def __init__(self) -> None:
        self.copies: dict[tuple[torch.device, int], DeviceValues] = {}

    def of(self, device: torch.device, host: Tensor, version: int) -> Tensor:
        """Return the values on the device, for work of the current stream.

        Raises:
            torch.OutOfMemoryError: The device has no memory for them.
        """
        key = device, host.data_ptr()
        copy = self.copies.get(key)
        if copy is None or copy.version != version:
            self.copies.pop(key, None)  # Both names are dropped first, to make room for the next copy.
            copy = None
            copy = self.copies[key] = DeviceValues(version, *upload(device, host))
        if copy.ready is not None:
            current = torch.cuda.current_stream(device)
            current.wait_event(copy.ready)
            copy.flat.record_stream(current)
        return copy.flat


def upload(device: torch.device, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy to the device; CUDA takes page-locked memory without a wait."""
    if device.type != "cuda":
        return host.to(device), None
    flat = torch.empty(host.numel(), dtype=torch.float32, device=device)
    for there, here in zip(torch.split(flat, PORTION_ELEMENTS), torch.split(host, PORTION_ELEMENTS), strict=True):
        there.copy_(here.pin_memory(), non_blocking=True)
    return flat, torch.cuda.current_stream(device).record_event()
