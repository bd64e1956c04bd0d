"""Host vectors in files of a folder, for models whose vectors memory does not hold."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from gossip.averaging.vectors import Floats, Vector
from gossip.errors import ConfigError

__all__ = ["FileVectors"]

MIN_ELEMENTS: Final = 65_536  # Smaller vectors are in memory: they are little to keep, and each would be a file.
MB: Final = 1e6


class FileVectors:
    """Zeros in files of one folder.

    A file has no name, so that nothing is left of a process that was killed. Its room is taken when it is made: a disk
    that is full later would end the process with SIGBUS at a write. Where there is no room left, a vector is in memory.
    Thread-safe.

    Args:
        folder: The folder.
        elements: The number of elements that the node's vectors will have together.

    Raises:
        ConfigError: The folder cannot be written, or has no room for so many.
    """

    def __init__(self, folder: Path, elements: int) -> None:
        self.folder = folder
        try:
            with tempfile.TemporaryFile(dir=folder):
                disk = os.statvfs(folder)
        except OSError as error:
            raise ConfigError(
                f"The vectors' folder {folder} cannot be used ({error.strerror}): name a folder that this node may "
                "write, on a local disk."
            ) from error
        room, needed = disk.f_bavail * disk.f_frsize, 4 * elements
        if room < needed:
            raise ConfigError(
                f"The vectors' folder {folder} has {room / MB:,.0f} MB of room, and this node's vectors take "
                f"{needed / MB:,.0f} MB: make room, or name another folder as memory_dir."
            )

    def zeros(self, elements: int) -> Floats:
        """Return a vector of zeros."""
        return self.vector(elements).array

    def vector(self, elements: int) -> Vector:
        """Return a vector of zeros whose file is freed when the vector is no longer used."""
        if elements < MIN_ELEMENTS:
            return Vector(np.zeros(elements, np.float32), is_transient=True)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, 4 * elements)
                memory = mmap.mmap(file.fileno(), 4 * elements)
        except OSError:  # The folder has less room than at the start; training must go on.
            return Vector.mapped(elements)
        return Vector(np.frombuffer(memory, np.float32), is_transient=True, memory=memory)
