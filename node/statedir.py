"""What a node remembers over restarts, beside its key: whom it knew, and how many lives it has had."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from gossip.frames import pack_record, read_record
from gossip.ids import MemberRecord

__all__ = ["Memory", "StateDir"]

MAX_BOOK_BYTES = 8 << 20  # twice the 10,000 members of a full table
BOOK_RECORDS = 1_024  # what membership gives; enough to find any swarm again


@dataclass(frozen=True, slots=True)
class Memory:
    """``incarnation`` of the last life, ``samples`` trained over all lives, and the members it knew."""

    incarnation: int = 0
    samples: int = 0
    book: list[MemberRecord] = field(default_factory=list)


class StateDir:
    """A directory with the address book ``members.bin``; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.damaged = ""

    def read(self) -> Memory:
        """An absent book is an empty one. A damaged one is set aside (``damaged`` says so): the key is what counts, and
        a seed or a member who dials us brings the book back."""
        if self.path is None:
            return Memory()
        file = self.path / "members.bin"
        try:
            with file.open("rb") as opened:
                data = opened.read(MAX_BOOK_BYTES + 1)
            if len(data) > MAX_BOOK_BYTES:
                raise ValueError
            incarnation, samples, rows = msgpack.unpackb(data, raw=False, max_ext_len=0, max_array_len=20_000)
            if not isinstance(incarnation, int) or not isinstance(samples, int):
                raise ValueError
            return Memory(incarnation, samples, [read_record(row) for row in rows])
        except FileNotFoundError:
            return Memory()
        except Exception as error:  # whatever a damaged file makes msgpack raise
            aside = file.with_suffix(".damaged")
            with contextlib.suppress(OSError):
                file.replace(aside)
            self.damaged = (
                f"The address book {file} could not be read ({type(error).__name__}) and was set aside as "
                f"{aside.name}; this node needs a seed to find its swarm."
            )
            return Memory()

    def write(self, incarnation: int, samples: int, book: Sequence[MemberRecord]) -> None:
        """Atomically; a failure (a full disk) costs only the memory, never the training."""
        if self.path is None:
            return
        rows = [pack_record(record) for record in book[:BOOK_RECORDS]]
        temporary = self.path / f"members.{os.getpid()}.tmp"
        try:
            temporary.write_bytes(msgpack.packb([incarnation, samples, rows], use_bin_type=True))
            temporary.replace(self.path / "members.bin")
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
