"""Pending copies between a host array and a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossip.averaging.model import Pending
from node.model.device.halves import HalfPart

__all__ = ["Copies", "TornWatch", "combined", "memory_errors"]


class TornWatch:
    """A watch for changes of live tensors that a copy is reading. A change *tears* the copy into old and new values.

    The optimizer waits for the copy, so that only other code can change the tensors meanwhile. torch counts a tensor's
    changes in its ``_version``.
    """

    __slots__ = ("is_closed", "is_torn", "tensors", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.versions = list(tensors), [tensor._version for tensor in tensors]
        self.is_closed = self.is_torn = False

    def check(self) -> bool:
        """Return True if a tensor has changed before the watch was closed. Any thread may call it."""
        if not self.is_closed:
            versions = zip(self.tensors, self.versions, strict=False)  # Another thread may be closing the watch.
            changed = any(tensor._version != before for tensor, before in versions)
            if changed and not self.is_closed:  # The training thread may have closed it before it changed the tensors.
                self.is_torn = True
        return self.is_torn

    def close(self) -> bool:
        """End the watch, because later work of the device waits for the copy. Return True if a tensor has changed."""
        self.check()
        self.is_closed = True
        self.tensors = []
        return self.is_torn


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
    if len(each) == 1:
        return each[0]
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
