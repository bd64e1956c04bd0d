"""Vectors in sealed shared memory: other processes of this host can read them, but only this process can write."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from gossip.averaging.vectors import Floats

__all__ = ["HostMemory", "Views", "lying"]

FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1: existing mappings may write, new ones never.
NOEXEC = 0x8  # MFD_NOEXEC_SEAL, Linux 6.3: some systems require it.
POPULATE = 0x8000  # MAP_POPULATE: maps all pages at once instead of one page fault each.
MAP_FAILED = ctypes.c_void_p(-1).value


class Mapped:
    """A float32 mapping of some of a file's bytes, as long as an array uses it. Forked children do not inherit it."""

    def __init__(self, descriptor: int, start: int, size: int, writes: bool) -> None:
        """Map ``size`` bytes from ``start``, a multiple of the page size. Raises OSError."""
        rights, flags = (mmap.PROT_READ | mmap.PROT_WRITE, 0) if writes else (mmap.PROT_READ, POPULATE)
        address = _libc.mmap(None, size, rights, mmap.MAP_SHARED | flags, descriptor, start)
        if address is None or address == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "memory cannot be mapped")
        self.address, self.bytes, self.writes = int(address), size, writes
        weakref.finalize(self, unmap, os.getpid(), self.address, size).atexit = False
        _libc.madvise(address, size, mmap.MADV_DONTFORK)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Describe the memory, so that numpy makes an array that keeps this object alive."""
        return {
            "version": 3, "shape": (self.bytes // 4,), "typestr": "<f4", "data": (self.address, not self.writes)
        }  # fmt: skip

    @property
    def vector(self) -> Floats:
        return np.asarray(self)


class HostMemory(Mapped):
    """One vector's memory, and the file descriptor by which other processes read it.

    Seals fix the file's size, and allow no writes through the descriptor.
    """

    def __init__(self, elements: int) -> None:
        """Allocate the memory. Raises OSError if no descriptor is free, or the system cannot seal."""
        self.descriptor = fresh_file()
        weakref.finalize(self, close, os.getpid(), self.descriptor).atexit = False
        _all.add(self)
        os.ftruncate(self.descriptor, 4 * elements)
        super().__init__(self.descriptor, 0, 4 * elements, True)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    @classmethod
    def of(cls, values: Floats) -> tuple[HostMemory, int] | None:
        """Return the memory that holds an array or a slice of one, and the slice's offset there in bytes."""
        found: Any = values
        while isinstance(found, np.ndarray):
            found = found.base
        if not isinstance(found, cls) or not values.flags.c_contiguous:
            return None
        return found, int(values.ctypes.data) - found.address


def lying(descriptor: int, offset: int, elements: int) -> Floats | None:
    """Map the memory behind an untrusted descriptor for reading: ``elements`` float32 values at ``offset`` bytes.

    The file must be memory like a :class:`HostMemory`'s, and must not shrink: then no read can fail or block. With a
    device, a remote file, a full disk or missing huge pages the kernel would kill this process at a read.

    Returns:
        The values, or None if the descriptor is of another kind.

    Raises:
        OSError: We have no room for the mapping.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # Fails if the file is not memory.
    except OSError:
        return None
    found, stop = os.fstat(descriptor), offset + 4 * elements
    if not seals & fcntl.F_SEAL_SHRINK or found.st_dev != device() or found.st_size < stop or offset % 4:
        return None
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    return Mapped(descriptor, start, stop - start, False).vector[(offset - start) // 4 :]


class Views:
    """A cache of the mappings of one neighbour's memory.

    A kept mapping saves a sixth of the cost of reading. It keeps the neighbour's memory allocated, even after the
    neighbour has released it, for as long as the two can share memory.
    """

    MOST = 2  # A node alternates between two: a snapshot uses the memory of the difference before it.

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Floats] = {}
        self.lock = threading.Lock()

    def lying(self, descriptor: int, offset: int, elements: int) -> Floats | None:
        """Return the view, as the module's function does. Thread-safe."""
        file = os.fstat(descriptor)
        key = file.st_dev, file.st_ino, offset, elements  # Unique while the file is mapped.
        with self.lock:
            view = self.kept.pop(key, None)
        if view is None:
            view = lying(descriptor, offset, elements)
        if view is not None:
            with self.lock:
                self.kept[key] = view
                while len(self.kept) > self.MOST:
                    del self.kept[next(iter(self.kept))]
        return view


def device() -> int:
    """Return the device number of the file system of plain memory files, which has no size limit of its own."""
    if not _device:
        descriptor = fresh_file()
        _device.append(os.fstat(descriptor).st_dev)
        os.close(descriptor)
    return _device[0]


def fresh_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("gossip", flags | NOEXEC)
    except OSError:
        return os.memfd_create("gossip", flags)


# Call mmap through ctypes: the module mmap would keep a descriptor of its own, which a forked child could not close.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_device: list[int] = []
_all: weakref.WeakSet[HostMemory] = weakref.WeakSet()


def unmap(process: int, address: int, size: int) -> None:
    """Unmap the memory, unless this is a forked child, which does not have it."""
    if process == os.getpid():
        _libc.munmap(address, size)


def close(process: int, descriptor: int) -> None:
    if process == os.getpid():
        os.close(descriptor)


def _close_all() -> None:
    """Close all descriptors in a forked child, which would otherwise keep the memory allocated."""
    for memory in list(_all):
        with contextlib.suppress(OSError):
            os.close(memory.descriptor)
    _all.clear()


os.register_at_fork(after_in_child=_close_all)
