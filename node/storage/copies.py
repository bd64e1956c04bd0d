"""Local copies of checkpoints on their way to a store or from there, and how often a store is asked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gossip.errors import CheckpointError
from node.storage.older import companion
from node.storage.urls import public_url

__all__ = ["CHECK_PERIOD_S", "FOLDER_PREFIX", "PERMANENT", "LocalCopy", "folder_in", "open_store", "retry"]

# Enough to outlast the restart of a server. The packages of cloud stores retry by themselves, and no number outlasts an
# outage.
ATTEMPTS: Final = 5
FIRST_WAIT_S: Final = 1.0  # Doubled after each attempt: 15 s in all.
# A copy is stalled after this time without a moved byte. A piece of 100 MB takes as long at 3 Mbit/s.
STALL_S: Final = 300.0
CHECK_PERIOD_S: Final = 0.1  # Interval of the checks whether a store has finished.
FOLDER_PREFIX: Final = "upload-"  # Of the folders for local files.
PERMANENT: Final = (
    FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, NotImplementedError,
)  # fmt: skip
"""Errors that another attempt does not change."""


@dataclass(slots=True, eq=False)
class LocalCopy:
    """A checkpoint of a store in local files, on its way to the store or from there.

    Attributes:
        url: Its URL, with an ending.
        folder: The local folder that holds its files, and nothing else.
        home: The folder around it, where a checkpoint stays that cannot be sent.
        keep: The number of checkpoints to keep under its name in the store.
        moved_at: time.monotonic() when the store last took or gave something.
    """

    url: str
    folder: Path
    home: Path
    keep: int = 1
    moved_at: float = field(default_factory=time.monotonic)

    @property
    def file(self) -> Path:
        """Return the weights."""
        return self.folder / self.url.partition("?")[0].rpartition("/")[2]

    @property
    def optimizer_file(self) -> Path:
        """Return the optimizer's state, which a checkpoint may lack."""
        return self.file.with_name(companion(self.file.name))

    @property
    def store_name(self) -> str:
        """Return the part of the URL that names its store: protocol and host or bucket."""
        return "/".join(public_url(self.url).split("/")[:3])

    @property
    def shown_url(self) -> str:
        """Return the URL for users."""
        return public_url(self.url)

    @property
    def stall_s(self) -> float:
        """Return the time without progress after which the copy is stalled."""
        return STALL_S

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self.moved_at > STALL_S

    def on_moved(self, *_: object, **__: object) -> None:
        self.moved_at = time.monotonic()


def open_store(url: str) -> tuple[Any, str]:
    """Return the store and the checkpoint's path there. May connect."""
    from fsspec.core import url_to_fs

    store, path = url_to_fs(url)
    store.invalidate_cache()  # Others write there too.
    return store, path


def retry(work: Callable[[], None]) -> None:
    """Call ``work`` until it succeeds, ATTEMPTS times at most. Raise its last exception."""
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except PERMANENT:
            raise
        except Exception:
            if attempt + 1 == ATTEMPTS:
                raise
        time.sleep(FIRST_WAIT_S * 2**attempt)


def folder_in(home: Path, url: str) -> Path:
    """Make a folder for local files. Raise CheckpointError if that fails."""
    try:
        return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=home))
    except OSError as error:
        text = f"{public_url(url)} needs a local file on its way, and no folder for it can be made in {home}"
        raise CheckpointError(f"{text} ({error.strerror}): give room there.") from error
