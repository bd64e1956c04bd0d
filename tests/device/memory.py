"""A device's memory: its blocks, their bytes, and poison in every block that holds no value yet or no longer."""

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from tests.device.queues import Queue, Queues


def poison(tensor: Tensor) -> None:
    """Fill with NaN; integers, which have none, with a number that is a valid index and a wrong value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    else:
        tensor.zero_()


class Block:
    """A piece of device memory, which ends with the last tensor over it."""

    __slots__ = ("__weakref__", "users")

    def __init__(self) -> None:
        self.users: list[Queue] = []  # The queues that record_stream named.


class Memory:
    """A caching allocator as torch has it.

    A block that ends is free for its own stream at once: what that stream does next may overwrite it. Streams that
    record_stream named are waited for first, and only those.
    """

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.limit_bytes = math.inf
        self.bytes = self.peak_bytes = 0
        self.refuse: Callable[[int], bool] = lambda size: False  # For tests: a size that finds no room.

    def reserve(self, size: int) -> None:
        """Count so many bytes; raise what torch raises if there is no room."""
        with self.queues.lock:
            if self.bytes + size > self.limit_bytes or self.refuse(size):
                raise torch.OutOfMemoryError(f"Simulated device out of memory. Tried to allocate {size} bytes.")
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def release(self, size: int) -> None:
        with self.queues.lock:
            self.bytes -= size

    def block(self, base: Tensor, queue: Queue) -> Block:
        """Give ``base``, fresh and poisoned, to ``queue``. At its end it is poisoned where reuse could begin."""
        size = base.numel() * base.element_size()
        self.reserve(size)
        poison(base)
        block = Block()
        weakref.finalize(block, self.end, block.users, size, base, queue).atexit = False
        return block

    def end(self, users: list[Queue], size: int, base: Tensor, queue: Queue) -> None:
        others = [one for one in users if one is not queue]
        if not others:
            self.release(size)
            self.queues.put(queue, "run", lambda: poison(base))
            return

        def reuse() -> None:
            poison(base)
            self.release(size)

        # The allocator looks at these events when it is asked for memory, and holds up no stream for them.
        marks = [self.queues.mark(other) for other in (*others, queue)]
        late = self.queues.new("freed")
        for mark in marks:
            self.queues.put(late, "wait", mark)
        self.queues.put(late, "run", reuse)


class Pinned:
    """The ranges of host memory that are page-locked. They stay so, as torch keeps them for reuse."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.ranges: dict[int, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        storage = tensor.untyped_storage()
        self.ranges[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return not tensor.numel() or any(start <= at < stop for start, stop in tuple(self.ranges.items()))
