"""Pending copies between a host array and a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Copies", "Watch", "joined", "memory_errors"]


class Watch:
    """The versions of live tensors while a copy reads them.

    The optimizer waits for the copy before it changes them. Any other change in the meantime may tear the copy.
    """

    __slots__ = ("closed", "tensors", "torn", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.versions = list(tensors), [tensor._version for tensor in tensors]
        self.closed = self.torn = False

    def look(self) -> bool:
        """Return True if a tensor has changed before the copy was waited for. Thread-safe."""
        if not self.closed:
            changed = any(tensor._version != was for tensor, was in zip(self.tensors, self.versions, strict=False))
            # The training thread may have closed it, and then changed the tensors.
            if changed and not self.closed:
                self.torn = True
        return self.torn

    def close(self) -> bool:
        """End the watch, as later work of the device waits for the copy. Return True if a tensor had changed before."""
        self.look()
        self.closed = True
        self.tensors = []
        return self.torn


@dataclass(frozen=True, slots=True)
class Copies:
    """Pending copies between a host array and a device.

    Until they are done, do not use the host array: a read still writes it, an addition still reads it.

    Attributes:
        events: Events recorded after the copies.
        flags: Page-locked booleans that say for each device whether all copied values are finite.
        watches: Watch tensors that are copied in place.
    """

    events: tuple[torch.cuda.Event, ...] = ()
    flags: tuple[Tensor, ...] = ()
    watches: tuple[Watch, ...] = ()

    def done(self) -> bool:
        """Return True once the copies have finished; always True on the CPU. Thread-safe."""
        if not all(event.query() for event in self.events):  # type: ignore[no-untyped-call]
            return False
        for watch in self.watches:
            watch.look()
        return True

    def wait(self) -> None:
        """Block until the copies have finished."""
        for event in self.events:
            event.synchronize()

    @property
    def finite(self) -> bool | None:
        """Return True if all copied values are finite, None if they were not checked. Valid once done."""
        return all(bool(flag) for flag in self.flags) if self.flags else None

    @property
    def torn(self) -> bool:
        """Return True if the copy mixes old and new values, because the loop changed the weights meanwhile."""
        return any(watch.torn for watch in self.watches)


def joined(found: Sequence[Copies]) -> Copies:
    """Return copies that are done when all of these are."""
    if len(found) == 1:
        return found[0]
    return Copies(
        tuple(event for one in found for event in one.events), tuple(flag for one in found for flag in one.flags),
        tuple(watch for one in found for watch in one.watches),
    )  # fmt: skip


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where torch says that a device has no memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
