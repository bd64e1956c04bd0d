"""Checkpoints on their way between local files and a store, and how often a store is asked.

A checkpoint for a URL is first written to a local file, as one for a path is. A thread then sends that file. So sending
takes no memory for the model, every attempt sends the same bytes, and a store that is slow, fails or hangs costs the
training loop nothing. A checkpoint of a store is likewise read by way of a local copy. fsspec is imported for
the first URL.
"""

import contextlib
import errno
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from gossip.errors import CheckpointError
from node.storage.older import companion
from node.storage.urls import check_url, error_text, public_url, with_ending

# Enough to outlast the restart of a server. The packages of cloud stores retry by themselves, and no number outlasts an
# outage.
ATTEMPTS: Final = 5
FIRST_WAIT_S: Final = 1.0  # Doubled after each attempt: 15 s in all.
CHECK_PERIOD_S: Final = 0.1  # Interval of the checks whether a store has finished.
FOLDER_PREFIX: Final = "upload-"  # Of the folders for local files.
PERMANENT: Final = (
    FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, NotImplementedError,
)  # fmt: skip
"""Errors that another attempt does not change."""


class LocalCopy:
    """A checkpoint of a store in local files, on its way to the store or from there.

    Args:
        url: Its URL, which may lack an ending.
        home: The folder for local files, where a checkpoint stays that cannot be sent.
        keep: The number of checkpoints to keep under its name in the store.

    Raises:
        CheckpointError: The URL cannot be used, or ``home`` has no room.
    """

    # A copy is stalled after this time without a moved byte. A piece of 100 MB takes as long at 3 Mbit/s. A store that
    # tells of no piece, as fsspec's SFTP, has as long for each 100 MB that are here.
    stall_s = 300.0

    def __init__(self, url: str, home: Path, keep: int = 1) -> None:
        check_url(url)
        self.url, self.home, self.keep = with_ending(url), home, keep
        self.shown_url = public_url(self.url)
        # The part of the URL that names the store: protocol and host or bucket.
        self.store_name = "/".join(self.shown_url.split("/")[:3])
        self.moved_at = time.monotonic()  # When the store last took or gave something.
        self.has_told = False  # It tells of pieces.
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=home))  # It holds these files alone.
        except OSError as error:
            raise CheckpointError(
                f"{public_url(url)} needs a local file on its way, and no folder for it can be made in {home} "
                f"({error.strerror}): give room there."
            ) from error
        self.file = self.folder / self.url.partition("?")[0].rpartition("/")[2]  # The weights.
        self.optimizer_file = self.file.with_name(companion(self.file.name))  # A checkpoint may lack it.

    @property
    def is_stalled(self) -> bool:
        here = 0
        with contextlib.suppress(OSError):  # Its thread may be removing it.
            here = 0 if self.has_told else sum(file.stat().st_size for file in self.folder.glob("*"))
        return time.monotonic() - self.moved_at > self.stall_s * (1.0 + here / 100e6)

    def on_moved(self, *_: object, **__: object) -> None:
        self.moved_at, self.has_told = time.monotonic(), True

    def remove(self) -> None:
        """Delete the local files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def open_store(self, url: str) -> tuple[Any, str, Any]:
        """Return the store, the checkpoint's path there, and a callback for each piece. May connect."""
        from fsspec.callbacks import Callback
        from fsspec.core import url_to_fs

        self.moved_at = time.monotonic()
        store, path = url_to_fs(url)
        store.invalidate_cache()  # Others write there too.
        return store, path, Callback(hooks={"moved": self.on_moved})

    def download(self, given_url: str) -> None:
        """Fetch the files of the checkpoint: the one with an ending, else the one at the URL as the user gave it."""
        store, path, callback = self.open_store(self.url)
        try:
            store.get_file(path, str(self.file), callback=callback)
        except FileNotFoundError:
            if self.url == given_url:
                raise
            store, path, callback = self.open_store(given_url)  # Another program may have stored it without an ending.
            store.get_file(path, str(self.file), callback=callback)
        if path.endswith(self.file.name):  # A signed URL names one file.
            with contextlib.suppress(*PERMANENT):  # The weights name their save, so that a missing one is noticed.
                optimizer_path = path.removesuffix(self.file.name) + self.optimizer_file.name
                store.get_file(optimizer_path, str(self.optimizer_file), callback=callback)


def retry(work: Callable[[], None]) -> Exception | None:
    """Call ``work`` until it succeeds, ATTEMPTS times at most. Return its last exception, or None after a success."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            work()
            return None
        except Exception as error:  # A store's package may raise anything.
            last_error = error
            if isinstance(error, PERMANENT):
                break
    return last_error


@contextlib.contextmanager
def fetched_copy(url: str, home: Path, beat: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a local copy of a checkpoint in a store, and delete it at the end.

    Errors inside the block that name the copy name the URL instead.

    Args:
        url: Its URL.
        home: The folder for the copy.
        beat: Called about ten times a second while the store is read.

    Raises:
        CheckpointError: The URL cannot be used, or the store has no such file, refuses it or gives nothing.
    """
    copy = LocalCopy(url, home)
    errors: list[Exception | None] = []
    thread = threading.Thread(
        target=lambda: errors.append(retry(lambda: copy.download(url))), name="gossip-fetch", daemon=True
    )
    try:
        thread.start()  # A store may hang.
        while thread.is_alive():
            thread.join(CHECK_PERIOD_S)
            beat()
            if copy.is_stalled:
                raise CheckpointError(
                    f"Could not read {copy.shown_url}: the store gives nothing for {copy.stall_s:g} s; look at it and "
                    "at the network."
                )
        if (error := errors[0]) is not None:
            raise CheckpointError(unread_text(copy, error)) from error
        try:
            yield copy.file
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(copy.file), copy.shown_url)) from error
    finally:
        copy.remove()


def unread_text(copy: LocalCopy, error: Exception) -> str:
    """Return the sentence for a checkpoint that a store did not give."""
    reason = error_text(error, copy.url)
    if isinstance(error, FileNotFoundError):
        return f"There is no checkpoint at {copy.shown_url}; check the URL."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Could not read {copy.shown_url}: {reason} in {copy.home}, where it is copied first; free room there."
    if isinstance(error, PERMANENT):
        return f"The store refuses to give {copy.shown_url} ({reason}); check its name, credentials and permissions."
    return f"Could not read {copy.shown_url}: {reason}; check the URL, the store and the network."
