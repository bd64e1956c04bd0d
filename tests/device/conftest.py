"""Fixtures for tests of a model on the device."""

import math

import pytest
import torch

from node.model.device.downloads import Downloads
from tests.device.device import Device


class Costs:
    """What the device was made to do since the last :meth:`reset`.

    Only the simulated device counts waits and crossing bytes, and a real allocator rounds small sizes up. So on a real
    device :meth:`check` asserts nothing.
    """

    def __init__(self, device: Device | None) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.allocated_bytes = torch.cuda.memory_allocated()
        if self.device is not None:
            self.device.waits.clear()
            self.device.crossed_bytes.update(up=0, down=0)

    def check(
        self, *, waits: int | None = None, up: int | None = None, down: int | None = None, peak: float = math.inf
    ) -> None:
        """Assert the number of waits, the bytes that crossed, and that at most ``peak`` bytes more were in use."""
        if self.device is None:
            return
        assert waits in (None, len(self.device.waits)), self.device.waits
        assert up in (None, self.device.crossed_bytes["up"])
        assert down in (None, self.device.crossed_bytes["down"])
        assert torch.cuda.max_memory_allocated() - self.allocated_bytes <= peak


@pytest.fixture
def costs(accelerator):
    return Costs(accelerator)


@pytest.fixture
def simulated_device(accelerator):
    """The simulated device, for tests that hold it up or fill its memory."""
    if accelerator is None:
        pytest.skip("holds up or fills a simulated device only")
    return accelerator


@pytest.fixture
def large(monkeypatch):
    """Treat a small model as one that is copied in place."""
    monkeypatch.setattr(Downloads, "MAX_STAGED_ELEMENTS", 0)
    monkeypatch.setattr(Downloads, "MIN_DIRECT_ELEMENTS", 1)
