"""The checkpoints of one node that are on their way to stores."""

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from gossip.errors import CheckpointError
from node.storage.copies import CHECK_PERIOD_S, FOLDER_PREFIX, PERMANENT, LocalCopy, retry
from node.storage.older import companion, keep_older_in_store
from node.storage.urls import BUCKETS, error_text, with_ending

ATOMIC: Final = BUCKETS
"""Protocols of stores whose objects appear whole or not at all. Elsewhere a file is renamed once it is complete."""
MAX_WAITING: Final = 4  # Checkpoints that wait for the one being sent. Each takes its size on the local disk.
QUIET_S: Final = 2.0  # Leaving takes about a second without an upload: say why it takes longer.
UNSENT: Final = "unsent.safetensors"  # The local name of the last checkpoint that could not be sent.


class CheckpointUploads:
    """The checkpoints of one node that are on their way to stores.

    One thread sends them one after another, and ends when there are none.

    Args:
        notice: Takes the kind of a notice and its sentence, in any thread.
    """

    def __init__(self, notice: Callable[[str, str], None]) -> None:
        self.notice = notice
        self.changed = threading.Condition()  # Guards the next three.
        self.waiting: dict[str, LocalCopy] = {}  # By URL, in the order of sending.
        self.sending: LocalCopy | None = None  # The copy that is being sent; None without one, as the thread.
        self.thread: threading.Thread | None = None
        self.failing_stores: set[str] = set()  # Stores whose failure was reported. It needs no bound: there are few.
        self.shifted_urls: set[str] = set()  # URLs whose older checkpoints have made room already.
        self.token = secrets.token_hex(4)  # Part of temporary names, since two nodes may write to one URL.

    @contextlib.contextmanager
    def spool(self, url: str, keep: int, home: Path) -> Iterator[Path]:
        """Yield the local path for a checkpoint. At the end of the block the file that was written there is queued.

        Args:
            url: Its URL.
            keep: The number of checkpoints to keep under this name.
            home: The folder for local files, which is this node's alone.

        Raises:
            CheckpointError: The URL cannot be used, or the file could not be written.
        """
        if self.thread is None:
            for leftover in home.glob(f"{FOLDER_PREFIX}*"):  # An earlier process was killed.
                shutil.rmtree(leftover, ignore_errors=True)
        upload = LocalCopy(url, home, keep)
        try:
            yield upload.file
        except BaseException as error:
            upload.remove()
            if isinstance(error, CheckpointError):
                both_places = f"{upload.file}, from where it goes to {upload.shown_url}"
                raise CheckpointError(str(error).replace(str(upload.file), both_places)) from error
            raise
        self.queue(upload)

    def queue(self, upload: LocalCopy) -> None:
        """Send this checkpoint. It replaces one of the same URL that still waits."""
        surplus = None
        with self.changed:
            if (replaced := self.waiting.pop(upload.url, None)) is not None:
                replaced.remove()
            self.waiting[upload.url] = upload
            if len(self.waiting) > MAX_WAITING:
                surplus = self.waiting.pop(next(iter(self.waiting)))
                surplus.remove()
            sending = self.sending
            if self.thread is None:
                self.thread = threading.Thread(target=self.send_queued, name="gossip-storage", daemon=True)
                self.thread.start()
        if surplus is not None:
            text = "is slower than the checkpoints come, and the oldest that waits is given up: save less often."
            self.report_failure(surplus, f"{surplus.store_name} {text}")
        self.report_stall(sending)

    def send_queued(self) -> None:
        """Send the checkpoints that wait until there are none. This is the work of the thread."""
        while True:
            with self.changed:
                if not self.waiting:
                    self.sending = self.thread = None
                    self.changed.notify_all()
                    return
                upload = self.sending = self.waiting.pop(next(iter(self.waiting)))
                upload.moved_at = time.monotonic()  # The store itself tells of nothing yet.
            error = retry(lambda: self.send(upload))  # noqa: B023 (called before the next one)
            if error is not None:
                self.on_failed(upload, error)
            else:
                self.on_sent(upload)

    def send(self, upload: LocalCopy) -> None:
        """Send the files of one checkpoint, and replace each as a whole, the weights last."""
        store, path, callback = upload.open_store(upload.url)
        is_atomic = not ATOMIC.isdisjoint([store.protocol] if isinstance(store.protocol, str) else store.protocol)
        folder = path[: len(path) - len(upload.file.name)]
        # An object store has no folders, and may take one for a bucket to make.
        if not is_atomic and folder.strip("/"):
            store.makedirs(folder.rstrip("/"), exist_ok=True)
        files = sorted(upload.folder.iterdir(), key=lambda file: file == upload.file)
        if upload.keep > 1 and upload.url not in self.shifted_urls:
            keep_older_in_store(store, path, upload.keep)
            self.shifted_urls.add(upload.url)  # A later attempt would push the older ones out.
        targets = [folder + file.name for file in files]
        places = targets if is_atomic else [f"{folder}.{file.name}.{self.token}.tmp" for file in files]
        try:
            for file, place in zip(files, places, strict=True):
                store.put_file(str(file), place, callback=callback)
            for place, target in zip(places, targets, strict=True):
                if place != target:
                    store.mv(place, target)
        except BaseException:
            for place in places if not is_atomic else ():
                with contextlib.suppress(Exception):
                    store.rm_file(place)
            raise
        self.shifted_urls.discard(upload.url)

    def on_sent(self, upload: LocalCopy) -> None:
        upload.remove()
        if upload.store_name in self.failing_stores:
            self.failing_stores.discard(upload.store_name)
            for name in (UNSENT, companion(UNSENT)):
                (upload.home / name).unlink(missing_ok=True)
            self.notice(
                "stored", f"Checkpoints are stored at {upload.store_name} again, the last as {upload.shown_url}."
            )

    def on_failed(self, upload: LocalCopy, error: Exception) -> None:
        """Keep the checkpoint here, in place of the last one that could not be sent, and tell the first time."""
        kept_file = upload.home / UNSENT
        try:
            if upload.optimizer_file.exists():
                os.replace(upload.optimizer_file, upload.home / companion(UNSENT))
            os.replace(upload.file, kept_file)
            upload.remove()
        except OSError:
            kept_file = upload.file
        url, reason = upload.shown_url, error_text(error, upload.url)
        if isinstance(error, PERMANENT):
            text = f"The store refuses {url} ({reason}): look at its name, credentials and permissions"
        else:
            text = f"The checkpoint cannot be stored at {url} ({reason}): look at the store and the network"
        self.report_failure(
            upload, f"{text}; training goes on, the next save tries again, and this one is kept in {kept_file}."
        )

    def report_failure(self, upload: LocalCopy, sentence: str) -> None:
        """Tell the user that a store fails, unless the user was told already."""
        if upload.store_name not in self.failing_stores:
            self.failing_stores.add(upload.store_name)
            self.notice("storage", sentence)

    def report_stall(self, upload: LocalCopy | None) -> bool:
        """Tell the user if the copy that is being sent is stalled, and return True then."""
        if upload is None or not upload.is_stalled:
            return False
        text = f"The store takes nothing of {upload.shown_url} for {upload.stall_s:g} s: look at it and at the network"
        self.report_failure(
            upload, f"{text}; training goes on, and the checkpoint is in {upload.file} while this program runs."
        )
        return True

    def wait(self, beat: Callable[[], None] = lambda: None, url: str | None = None) -> None:
        """Return when all checkpoints, or those of one URL, are sent or given up, or the store moves nothing.

        ``beat`` is called about ten times a second meanwhile.
        """
        wanted_url = None if url is None else with_ending(url)  # None waits for all.
        began, is_told = time.monotonic(), False
        while True:
            with self.changed:
                sending = self.sending
                unsent = [upload for upload in (sending, *self.waiting.values())
                          if upload is not None and wanted_url in (None, upload.url)]  # fmt: skip
                if self.thread is None or not unsent:
                    return
                self.changed.wait(CHECK_PERIOD_S)
            if self.report_stall(sending):
                return
            if not is_told and url is None and time.monotonic() - began > QUIET_S:
                is_told = True
                self.notice(
                    "storage",
                    f"This node has left, and its checkpoint is still on its way to {unsent[0].store_name}: the "
                    "program ends when it is there.",
                )
            beat()
