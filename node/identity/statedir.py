"""What a node remembers over restarts, beside its key: whom it knew, and how many lives it has had."""

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
from gossip.wire.frames import pack_record, read_record
from gossip.wire.records import MAX_INT

__all__ = ["OF_THIS_PROCESS", "Memory", "StateDir"]

VERSION = 1  # of the address book; a newer one is another format, and not one with more values behind these
MAX_BOOK_BYTES = 8 << 20  # ten times BOOK_RECORDS of the largest
BOOK_RECORDS = 1_024  # what membership gives; enough to find any swarm again
MAX_EXTRA = 64  # values of newer versions
CHECKSUM_BYTES = 8
OF_THIS_PROCESS = "another node of this process"
HELD: set[Path] = set()  # by nodes of this process, between which the lock does not tell
os.register_at_fork(after_in_child=HELD.clear)


@dataclass(frozen=True, slots=True)
class Memory:
    """``incarnation`` of the last life, ``samples`` trained over all lives, and the members it knew. ``extra`` is what
    a newer version wrote behind these."""

    incarnation: int = 0
    samples: int = 0
    book: list[MemberRecord] = field(default_factory=list)
    extra: tuple[Any, ...] = ()


class NewerFormatError(ValueError):
    """Not damaged: written by a version that this one cannot read."""


class StateDir:
    """A directory with the address book ``members.bin``; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.damaged = ""
        self._failing = False  # the last write, and that was said
        self.holder = ""  # who holds the directory, where it is not us
        self._lock: int | None = None
        self._extra: tuple[Any, ...] = ()  # of a newer version that ran here before: written again as it was

    def take(self) -> bool:
        """Whether the directory is this node's alone from now on, until :meth:`release` or the end of the process.
        Two nodes with one key would each be told what the other did, and train alone beside each other."""
        if self.path is None or self._lock is not None:
            return True
        place = self.path.resolve()
        if place in HELD:
            self.holder = OF_THIS_PROCESS
            return False
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return True  # whoever writes the key there says what is wrong
        try:
            # Not flock: forked loader workers would hold it, some seconds longer than their node was alive.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = error.errno in (errno.EACCES, errno.EAGAIN)
            if taken:
                said = os.read(file, 200).decode(errors="replace").strip()
                self.holder = said if said.isprintable() and said else "another process"
            os.close(file)
            return not taken  # a filesystem without locks: then nobody can tell
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._lock = file
        HELD.add(place)
        return True

    def release(self) -> None:
        if self._lock is not None and self.path is not None:
            HELD.discard(self.path.resolve())
            os.close(self._lock)
            self._lock = None

    def read(self) -> Memory:
        """An absent book is an empty one. A damaged one is set aside (``damaged`` says so): the key is what counts, and
        a seed or a member who dials us brings the book back."""
        if self.path is None:
            return Memory()
        file = self.path / "members.bin"
        try:
            with file.open("rb") as opened:
                memory = parse(opened.read(MAX_BOOK_BYTES + 1))
        except FileNotFoundError:
            return Memory()
        except Exception as error:  # whatever a damaged file makes msgpack raise
            aside = file.with_suffix(".newer" if isinstance(error, NewerFormatError) else ".damaged")
            with contextlib.suppress(OSError):
                file.replace(aside)
            reason = str(error) if isinstance(error, NewerFormatError) else type(error).__name__
            self.damaged = (
                f"The address book {file} could not be read ({reason}) and was set aside as {aside.name}; this node "
                "needs a seed to find its swarm."
            )
            return Memory()
        self._extra = memory.extra
        return memory

    @property
    def ending(self) -> Path | None:
        """The file that says which run was finished here."""
        return None if self.path is None else self.path / "finished"

    @property
    def final(self) -> Path | None:
        """The checkpoint of the run that was finished here."""
        return None if self.path is None else self.path / "final.safetensors"

    def finished(self) -> bytes:
        """The genesis of the run that was finished here; empty where none was, or nobody can read which."""
        if self.ending is None:
            return b""
        try:
            with self.ending.open("rb") as file:
                return from_hex(file.read(64).decode("ascii").strip()) or b""
        except (OSError, ValueError):
            return b""

    def finish(self, genesis: bytes) -> str:
        """Remember that this run is finished.

        Returns:
            A sentence where that failed, as on a full disk; else nothing. What was remembered before stays then.
        """
        if self.ending is None:
            return ""
        try:
            replace(self.ending, (genesis.hex() + "\n").encode("ascii"))
        except OSError as error:
            return (
                f"That this run is finished cannot be written to {self.path} ({error.strerror}): a node that starts "
                "there alone trains again."
            )
        return ""

    def write(self, incarnation: int, samples: int, book: Sequence[MemberRecord]) -> str:
        """Atomically; a failure (a full disk) costs only the memory, never the training. Returns what to say of it: a
        sentence at the first that fails and at the first that works again, else nothing."""
        if self.path is None:
            return ""
        rows = [pack_record(record) for record in book[:BOOK_RECORDS]]
        incarnation, samples = min(incarnation, MAX_INT - 1), min(samples, MAX_INT - 1)
        data = msgpack.packb([VERSION, incarnation, samples, rows, *self._extra], use_bin_type=True)
        try:
            replace(self.path / "members.bin", data + checksum(data))
        except OSError as error:
            told, self._failing = self._failing, True
            text = (
                f"The address book in {self.path} cannot be written ({error.strerror}): training goes on, and what was "
            )
            return "" if told else text + "written last stays."
        told, self._failing = self._failing, False
        return f"The address book in {self.path} can be written again." if told else ""


def replace(file: Path, data: bytes) -> None:
    """Write the file whole or leave the one that is there. Raises OSError."""
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


def parse(data: bytes) -> Memory:
    """The contents of an address book; ValueError and whatever msgpack raises for one that was not written so."""
    body = data[:-CHECKSUM_BYTES]
    # A flipped bit in a count would be signed, and refused by everybody: what is not as it was written is not used.
    if len(data) > MAX_BOOK_BYTES or data[-CHECKSUM_BYTES:] != checksum(body):
        raise ValueError
    version, *values = msgpack.unpackb(body, raw=False, max_ext_len=0, max_array_len=20_000)
    if type(version) is not int or version > VERSION:
        raise NewerFormatError(f"it has format {version}, this version reads {VERSION}")
    incarnation, samples, rows, *extra = values
    if not all(type(number) is int and 0 <= number < MAX_INT for number in (incarnation, samples)):
        raise ValueError
    if len(extra) > MAX_EXTRA:
        raise ValueError
    return Memory(incarnation, samples, [read_record(row) for row in rows], tuple(extra))
