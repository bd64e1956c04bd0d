"""Pending copies between a host array and a device, and half-precision values that are widened where they arrive."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossip.averaging.model import Pending
from node.model.device.guard import TornWatch

HALF_TYPES: Final = (torch.bfloat16, torch.float16)
LAST_ELEMENTS = 1 << 15  # The last elements are widened through a copy of 64 KiB, which stays in the cache.


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


@dataclass(frozen=True, slots=True)
class Copies(Pending):
    """Pending copies between a host array and a device.

    Until they are done, do not use the host array, which a read still writes and an addition still reads. If a read
    brings half precision, call :meth:`widen` before using its values.

    Attributes:
        events: Events recorded after the copies.
        flags: Page-locked booleans that say for each device whether all copied values are finite.
        watches: The watches of the live tensors that the copies read.
        halves: The parts of the host array that arrive in half precision.
    """

    events: tuple[torch.cuda.Event, ...] = ()
    flags: tuple[Tensor, ...] = ()
    watches: tuple[TornWatch, ...] = ()
    halves: tuple[HalfPart, ...] = ()

    def done(self) -> bool:
        """Return True once the copies have finished; always True on the CPU. Any thread may call it."""
        if not all(event.query() for event in self.events):  # type: ignore[no-untyped-call]
            return False
        for watch in self.watches:
            watch.check()
        return True

    @property
    def is_narrow(self) -> bool:
        """Return True if half-precision values are still to be widened."""
        return not all(half.is_widened for half in self.halves)

    def widen(self) -> None:
        """Widen the half-precision values of finished copies: 1 B parameters take about a second of one core."""
        for half in self.halves:
            half.widen()

    def wait(self) -> None:
        """Block until the copies have finished, and widen what they have brought."""
        for event in self.events:
            event.synchronize()
        self.widen()

    @property
    def finite(self) -> bool | None:
        """Return True if all copied values are finite, None if they were not checked. Valid once done."""
        return all(bool(flag) for flag in self.flags) if self.flags else None

    @property
    def torn(self) -> bool:
        """Return True if the copy mixes old and new values, because the loop changed the weights meanwhile."""
        return any(watch.is_torn for watch in self.watches)


def combined(each: Sequence[Copies]) -> Copies:
    """Return copies that are done when all of these are."""
    return Copies(
        tuple(event for copies in each for event in copies.events),
        tuple(flag for copies in each for flag in copies.flags),
        tuple(watch for copies in each for watch in copies.watches),
        tuple(half for copies in each for half in copies.halves),
    )


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where torch says that a device has no memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def crossing_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor's elements go to the host: half precision as it is, all others as float32."""
    return tensor.dtype if tensor.dtype in HALF_TYPES else torch.float32
