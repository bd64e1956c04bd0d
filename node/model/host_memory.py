"""Vectors in memory that other processes of this host can be given to read, and nobody else to change."""

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

FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1: what is mapped by now may write, and no descriptor ever
NOEXEC = 0x8  # MFD_NOEXEC_SEAL, Linux 6.3: some systems give no other
POPULATE = 0x8000  # MAP_POPULATE: its pages are found at once, and not one fault after another
MAP_FAILED = ctypes.c_void_p(-1).value


class Mapped:
    """Some of a file's bytes as float32, for as long as any array lies there. Forked children do not have it."""

    def __init__(self, descriptor: int, start: int, size: int, writes: bool) -> None:
        """``start`` is a multiple of the page's size. Raises OSError."""
        rights, flags = (mmap.PROT_READ | mmap.PROT_WRITE, 0) if writes else (mmap.PROT_READ, POPULATE)
        address = _libc.mmap(None, size, rights, mmap.MAP_SHARED | flags, descriptor, start)
        if address is None or address == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "memory cannot be mapped")
        self.address, self.bytes, self.writes = int(address), size, writes
        weakref.finalize(self, unmap, os.getpid(), self.address, size).atexit = False
        _libc.madvise(address, size, mmap.MADV_DONTFORK)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """By which numpy makes an array that keeps this memory."""
        return {
            "version": 3, "shape": (self.bytes // 4,), "typestr": "<f4", "data": (self.address, not self.writes)
        }  # fmt: skip

    @property
    def vector(self) -> Floats:
        return np.asarray(self)


class HostMemory(Mapped):
    """One vector's memory, and the descriptor by which others may read it. It keeps its size, and whoever has the
    descriptor can write nothing there."""

    def __init__(self, elements: int) -> None:
        """Raises OSError: no descriptor is left, or this system seals nothing."""
        self.descriptor = fresh_file()
        weakref.finalize(self, close, os.getpid(), self.descriptor).atexit = False
        _all.add(self)
        os.ftruncate(self.descriptor, 4 * elements)
        super().__init__(self.descriptor, 0, 4 * elements, True)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    @classmethod
    def of(cls, values: Floats) -> tuple[HostMemory, int] | None:
        """The memory in which an array or a piece of it lies, and how many bytes lie before it there."""
        found: Any = values
        while isinstance(found, np.ndarray):
            found = found.base
        if not isinstance(found, cls) or not values.flags.c_contiguous:
            return None
        return found, int(values.ctypes.data) - found.address


def lying(descriptor: int, offset: int, elements: int) -> Floats | None:
    """What a descriptor from anybody leads to, to be read alone: so many float32 behind ``offset`` bytes. None where
    reading them could ever fail or wait: it must be memory as a :class:`HostMemory`'s, and of a size that stays. Of a
    device, a file of some server, a disk that is full, or huge pages of which none is left the kernel would end this
    process where it reads. Raises OSError where we have no room for it."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # an error for what is not memory
    except OSError:
        return None
    found, stop = os.fstat(descriptor), offset + 4 * elements
    if not seals & fcntl.F_SEAL_SHRINK or found.st_dev != device() or found.st_size < stop or offset % 4:
        return None
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    return Mapped(descriptor, start, stop - start, False).vector[(offset - start) // 4 :]


class Views:
    """What was read last of one neighbour's memory: kept mapped, which is a sixth of what reading it costs, for as long
    as the two can share any. It is the neighbour's own that it holds, after the neighbour has given it up too."""

    MOST = 2  # which a node lends in turn: a snapshot lies where the difference before it lay

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Floats] = {}
        self.lock = threading.Lock()

    def lying(self, descriptor: int, offset: int, elements: int) -> Floats | None:
        """As the function; in any thread."""
        file = os.fstat(descriptor)
        key = file.st_dev, file.st_ino, offset, elements  # nobody else's while it is mapped
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
    """Of the file system on which all plain memory lies, with no limit of its own."""
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


# The module mmap would keep a descriptor of its own, which no forked child could close.
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
    """A forked child has nothing there, or something else."""
    if process == os.getpid():
        _libc.munmap(address, size)


def close(process: int, descriptor: int) -> None:
    if process == os.getpid():
        os.close(descriptor)


def _close_all() -> None:
    """In the child, which would keep all of that memory for as long as it lives."""
    for memory in list(_all):
        with contextlib.suppress(OSError):
            os.close(memory.descriptor)
    _all.clear()


os.register_at_fork(after_in_child=_close_all)
