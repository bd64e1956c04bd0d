"""Checkpoints that are read from stores, by way of a local copy."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from gossip.errors import CheckpointError
from node.storage.copies import CHECK_PERIOD_S, PERMANENT, LocalCopy, folder_in, open_store, retry
from node.storage.urls import check_url, error_text, with_ending

__all__ = ["fetched_copy"]


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
    check_url(url)
    copy = LocalCopy(with_ending(url), folder_in(home, url), home)
    try:
        fetch(url, copy, beat)
        try:
            yield copy.file
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(copy.file), copy.shown_url)) from error
    finally:
        shutil.rmtree(copy.folder, ignore_errors=True)


def fetch(url: str, copy: LocalCopy, beat: Callable[[], None]) -> None:
    """Copy a checkpoint to its local file, in another thread, since a store may hang."""
    failures: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            retry(lambda: download(url, copy))
        except Exception as error:  # A store's package may raise anything.
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="gossip-fetch", daemon=True).start()
    shown_url = copy.shown_url
    while not done.wait(CHECK_PERIOD_S):
        beat()
        if copy.is_stalled:
            raise CheckpointError(
                f"Could not read {shown_url}: the store gives nothing for {copy.stall_s:g} s; look at it and at the "
                "network."
            )
    if not failures:
        return
    (error,) = failures
    reason = error_text(error, url)
    if isinstance(error, FileNotFoundError):
        raise CheckpointError(f"There is no checkpoint at {shown_url}; check the URL.") from error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise CheckpointError(
            f"Could not read {shown_url}: {reason} in {copy.home}, where it is copied first; free room there."
        ) from error
    if isinstance(error, PERMANENT):
        raise CheckpointError(
            f"The store refuses to give {shown_url} ({reason}); check its name, credentials and permissions."
        ) from error
    raise CheckpointError(f"Could not read {shown_url}: {reason}; check the URL, the store and the network.") from error


def download(url: str, copy: LocalCopy) -> None:
    """Copy a checkpoint to its local files: the one at ``copy.url``, else the one at ``url`` as the user gave it."""
    from fsspec.callbacks import Callback

    copy.on_moved()
    callback = Callback(hooks={"moved": copy.on_moved})
    store, path = open_store(copy.url)
    try:
        store.get_file(path, str(copy.file), callback=callback)
        if path.endswith(copy.file.name):  # A signed URL names one file.
            with contextlib.suppress(*PERMANENT):  # The weights name their save, so that a missing one is noticed.
                folder = path.removesuffix(copy.file.name)
                store.get_file(folder + copy.optimizer_file.name, str(copy.optimizer_file), callback=callback)
    except FileNotFoundError:
        if copy.url == url:
            raise
        store, path = open_store(url)  # Another program may have stored it, under a name without an ending.
        store.get_file(path, str(copy.file), callback=callback)
