"""Host vectors in memory that several processes of one host map.

Rank 0 makes the memory without a name in any file system, and tells the others where its open file is. So nothing
remains when the processes end, however they end, and the size of /dev/shm is no limit.
"""

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossip.errors import ConfigError
from node.model.state import Floats

Bytes = NDArray[np.uint8]
TOKEN_PREFIX = "gossip-vector-"
NO_BYTES = np.empty(0, np.uint8)  # Stands for memory that does not exist, or that this process does not map.
NO_SHARING = (
    "A model that is sharded over processes needs Linux, whose memfd_create makes memory that they share: on other "
    "systems use DistributedDataParallel with group=, or a Node in each process."
)


@dataclass(frozen=True, slots=True)
class MemoryName:
    """The place at which the other ranks find a piece of memory."""

    number: int
    path: str
    size: int  # In bytes.
    token: str  # The memory's own name, by which a rank knows that the path leads to it and to no other process's file.


@dataclass(slots=True)
class MadeMemory:
    """A piece of memory that this process has made. It is *offered* to the other ranks before its first use."""

    name: MemoryName
    address: int
    memory: weakref.ref[mmap.mmap]  # Dead once no vector uses it.
    descriptor: int | None  # Open until the other ranks have mapped it.
    absent: tuple[int, ...] = ()  # The ranks that could not map it.


class SharedVectors:
    """The memory that rank 0 makes.

    Any thread may call :meth:`make`, and drop a vector. The training thread calls all other methods.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(NO_SHARING)
        self.lock = threading.Lock()
        self.made: dict[int, MadeMemory] = {}
        self.count = 0  # The number of the last memory; 0 stands for no memory.
        self.absent: set[int] = set()  # The ranks that could not map some memory.
        self.unused: deque[int] = deque()  # Numbers of memory that no vector uses any more.

    def make(self, elements: int) -> Floats:
        """Return zeros, whose pages are allocated when they are written to."""
        size, token = max(4 * elements, 1), TOKEN_PREFIX + secrets.token_hex(8)
        descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        vector = np.frombuffer(memory, np.float32, elements)
        with self.lock:
            number = self.count = self.count + 1
            name = MemoryName(number, f"/proc/{os.getpid()}/fd/{descriptor}", size, token)
            self.made[number] = MadeMemory(name, vector.ctypes.data, weakref.ref(memory), descriptor)
        weakref.finalize(memory, self.unused.append, number)
        return vector

    def locate(self, array: NDArray[Any]) -> tuple[int, int] | None:
        """Return the number of the memory that holds an array, and the array's offset in bytes; None if none does."""
        address = array.ctypes.data
        with self.lock:
            for made in self.made.values():
                offset = address - made.address
                if offset >= 0 and offset + array.nbytes <= made.name.size and made.memory() is not None:
                    return made.name.number, offset
        return None

    def bytes_of(self, number: int) -> Bytes:
        """Return the memory of this number, empty if there is none."""
        made = self.made.get(number)
        memory = None if made is None else made.memory()
        return NO_BYTES if memory is None else np.frombuffer(memory, np.uint8)

    def size_of(self, number: int) -> int:
        """Return the size of the memory of this number in bytes; 0 if there is none."""
        return self.bytes_of(number).size

    def map(self, name: MemoryName) -> bool:
        """Return True, because this process has made the memory."""
        return True

    def is_offered(self, number: int) -> bool:
        """Return True if the other ranks have mapped a piece of memory, or have tried to."""
        return self.made[number].descriptor is None

    def on_offered(self, number: int, absent: tuple[int, ...]) -> None:
        """Close the file of a piece of memory that all ranks have mapped, except those that could not."""
        made = self.made[number]
        made.absent = absent
        self.absent.update(absent)
        self.close(made)

    def absent_ranks(self, number: int) -> tuple[int, ...]:
        """Return the ranks that could not map a piece of memory."""
        return self.made[number].absent

    def drop_unused(self) -> list[int]:
        """Forget memory that no vector uses any more; return the numbers of pieces that the other ranks have mapped."""
        numbers = []
        while self.unused:
            with self.lock:
                made = self.made.pop(self.unused.popleft())
            if made.descriptor is None:
                numbers.append(made.name.number)
            self.close(made)
        return numbers

    def close(self, made: MadeMemory) -> None:
        if made.descriptor is not None:
            os.close(made.descriptor)
            made.descriptor = None


class MappedVectors:
    """The memory of rank 0 on another rank, which maps it if both are on one host."""

    def __init__(self) -> None:
        self.mapped: dict[int, Bytes] = {}  # By number.
        self.sizes: dict[int, int] = {}  # In bytes, by number, also of memory that could not be mapped.

    def map(self, name: MemoryName) -> bool:
        """Map rank 0's memory; return False if there is no such memory on this host."""
        self.sizes[name.number] = name.size
        if not name.token.startswith(TOKEN_PREFIX):
            return False
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(name.path) == f"/memfd:{name.token} (deleted)":
                descriptor = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = mmap.mmap(descriptor, name.size)  # ValueError if the file is shorter.
                finally:
                    os.close(descriptor)
                self.mapped[name.number] = np.frombuffer(memory, np.uint8)
                return True
        return False

    def maps(self, number: int) -> bool:
        """Return True if this rank maps the memory of this number, or there is none."""
        return number in self.mapped or number not in self.sizes

    def bytes_of(self, number: int) -> Bytes:
        """Return the memory of this number, empty if this rank does not map it."""
        return self.mapped.get(number, NO_BYTES)

    def size_of(self, number: int) -> int:
        """Return the size of rank 0's memory of this number in bytes; 0 if there is none."""
        return self.sizes.get(number, 0)

    def unmap(self, numbers: list[int]) -> None:
        for number in numbers:
            self.mapped.pop(number, None)
            self.sizes.pop(number, None)
