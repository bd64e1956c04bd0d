"""The state that a node keeps across restarts besides its key: address book, incarnation, samples and finished run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from gossip.ids import MemberRecord, from_hex
from gossip.wire.frames import read_record, write_record
from gossip.wire.records import MAX_COUNT

VERSION = 1  # The format of the address book. A compatible change appends values; another one raises the number.
MAX_BOOK_BYTES = 8 << 20  # Ten times BOOK_RECORDS records of the largest size.
BOOK_RECORDS = 1_024  # As many as membership saves, enough to find any swarm again.
MAX_EXTRA = 64  # Values that newer versions may append.
CHECKSUM_BYTES = 8
HOLDER_BYTES = 200  # Bytes of the lock file that are read: its holder's process and host.
OF_THIS_PROCESS = "another node of this process"
# Locked directories of this process's nodes, which the file lock cannot tell apart.
LOCKED_FOLDERS: dict[Path, StateDir] = {}
os.register_at_fork(after_in_child=LOCKED_FOLDERS.clear)


@dataclass(frozen=True, slots=True)
class Memory:
    """A node's memory of earlier lives; each start begins a new one, with a higher *incarnation*.

    Attributes:
        incarnation: The incarnation of the last life.
        samples: Samples trained over all lives.
        book: The members it knew.
        extra: Values that a newer version appended.
    """

    incarnation: int = 0
    samples: int = 0
    book: list[MemberRecord] = field(default_factory=list)
    extra: tuple[Any, ...] = ()


class NewerFormatError(ValueError):
    """A file that is not damaged, but written by a version that this one cannot read."""


class StateDir:
    """A directory with the address book ``members.bin`` and other files of one node; with None nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.damage = ""  # A sentence about an address book that could not be read; empty if there was none.
        self._is_failing = False  # The last write failed, and that was reported.
        self.holder = ""  # The node that holds the directory, in words; empty unless :meth:`lock` has failed.
        self.is_closing = False  # Its node ends, and releases the directory once its last write is done.
        self._lock_file: int | None = None  # The descriptor of the locked file.
        self._extra: tuple[Any, ...] = ()  # Values of a newer version that ran here before, written back unchanged.

    def lock(self) -> bool:
        """Lock the directory until :meth:`release` or the end of the process; return False if another node has it.

        The swarm would take two nodes with one key for one member, and each would train alone.
        """
        if self.path is None or self._lock_file is not None:
            return True
        folder = self.path.resolve()
        if folder in LOCKED_FOLDERS:
            self.holder = OF_THIS_PROCESS
            return False
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return True  # Writing the key there reports the error.
        try:
            # Not flock: forked loader workers would hold it for some seconds after their node's end.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = error.errno in (errno.EACCES, errno.EAGAIN)
            if is_taken:
                holder = os.read(file, HOLDER_BYTES).decode(errors="replace").strip()
                self.holder = holder if holder.isprintable() and holder else "another process"
            os.close(file)
            return not is_taken  # On a filesystem without locks the check is impossible.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._lock_file = file
        LOCKED_FOLDERS[folder] = self
        return True

    @property
    def is_handed_over(self) -> bool:
        """Return True if a node of this process holds the directory, and is closing."""
        holder = None if self.path is None else LOCKED_FOLDERS.get(self.path.resolve())
        return holder is not None and holder.is_closing

    def release(self) -> None:
        if self._lock_file is not None and self.path is not None:
            LOCKED_FOLDERS.pop(self.path.resolve(), None)
            os.close(self._lock_file)
            self._lock_file = None

    def read(self) -> Memory:
        """Return the stored memory, which is empty if there is none.

        A damaged book is set aside, and ``damage`` describes it. Only the key is essential: a seed, or a member that
        dials us, restores the book.
        """
        if self.path is None:
            return Memory()
        file = self.path / "members.bin"
        try:
            with file.open("rb") as opened:
                memory = parse_book(opened.read(MAX_BOOK_BYTES + 1))
        except FileNotFoundError:
            return Memory()
        except Exception as error:  # A damaged file can make msgpack raise anything.
            new_name = file.with_suffix(".newer" if isinstance(error, NewerFormatError) else ".damaged")
            with contextlib.suppress(OSError):
                file.replace(new_name)
            reason = str(error) if isinstance(error, NewerFormatError) else type(error).__name__
            self.damage = (
                f"The address book {file} could not be read ({reason}) and was set aside as {new_name.name}; this node "
                "needs a seed to find its swarm."
            )
            return Memory()
        self._extra = memory.extra
        return memory

    @property
    def finished_file(self) -> Path | None:
        """Return the file that names the run that was finished here."""
        return None if self.path is None else self.path / "finished"

    @property
    def final_checkpoint(self) -> Path | None:
        """Return the file of that run's checkpoint."""
        return None if self.path is None else self.path / "final.safetensors"

    def finished_run(self) -> bytes:
        """Return the id of the run that was finished here; empty if there is none, or the file cannot be read."""
        if self.finished_file is None:
            return b""
        try:
            with self.finished_file.open("rb") as file:
                return from_hex(file.read(64).decode("ascii").strip()) or b""
        except (OSError, ValueError):
            return b""

    def store_finished(self, run_id: bytes) -> str:
        """Store that this run is finished.

        Returns:
            A sentence if that failed, for example on a full disk; the stored state then stays. Otherwise an empty text.
        """
        if self.finished_file is None:
            return ""
        try:
            write_whole(self.finished_file, (run_id.hex() + "\n").encode("ascii"))
        except OSError as error:
            return (
                f"The end of this run cannot be written to {self.path} ({error.strerror}): a node that starts "
                "there alone trains again."
            )
        return ""

    def write(self, incarnation: int, samples: int, book: Sequence[MemberRecord]) -> str:
        """Write the book atomically. A failure, like a full disk, loses only this state and never stops training.

        Returns:
            A sentence at the first failure and at the first success after one; otherwise an empty text.
        """
        if self.path is None:
            return ""
        rows = [write_record(record) for record in book[:BOOK_RECORDS]]
        incarnation, samples = min(incarnation, MAX_COUNT - 1), min(samples, MAX_COUNT - 1)
        data = msgpack.packb([VERSION, incarnation, samples, rows, *self._extra], use_bin_type=True)
        try:
            write_whole(self.path / "members.bin", data + checksum(data))
        except OSError as error:
            was_failing, self._is_failing = self._is_failing, True
            text = f"The address book in {self.path} cannot be written ({error.strerror}): training goes on, and the "
            return "" if was_failing else text + "book written last stays."
        was_failing, self._is_failing = self._is_failing, False
        return f"The address book in {self.path} can be written again." if was_failing else ""


def write_whole(file: Path, data: bytes) -> None:
    """Write the file whole, or leave the old one. Raises OSError."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def parse_book(data: bytes) -> Memory:
    """Return the contents of an address book; raise ValueError, or an error of msgpack, for damaged data."""
    body = data[:-CHECKSUM_BYTES]
    # Without the checksum a flipped bit in a count would get into our signed record, which all members would refuse.
    if len(data) > MAX_BOOK_BYTES or data[-CHECKSUM_BYTES:] != checksum(body):
        raise ValueError
    version, *values = msgpack.unpackb(body, raw=False, max_ext_len=0, max_array_len=20_000)
    if type(version) is not int or version > VERSION:
        raise NewerFormatError(f"it has format {version}, this version reads {VERSION}")
    incarnation, samples, rows, *extra = values
    if not all(type(number) is int and 0 <= number < MAX_COUNT for number in (incarnation, samples)):
        raise ValueError
    if len(extra) > MAX_EXTRA:
        raise ValueError
    return Memory(incarnation, samples, [read_record(row) for row in rows], tuple(extra))
