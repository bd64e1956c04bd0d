"""This node's share of data files, for datasets that are read as streams."""

import itertools
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from gossip.errors import DataError, checked_whole
from node.data.division import Pass, Sharers, rank_share

T = TypeVar("T")
Files: TypeAlias = Iterable[str] | os.PathLike[str]

MAX_WORKERS = 1_024  # Workers of a DataLoader with a pass number of their own; each takes 8 bytes.
ENDLESS = (
    "These files come without end, so they have no length and make no list: iterate over them (docs/node.md has it for "
    "webdataset), or give epochs=1 for the files of one pass."
)


class FileShards(Iterable[str]):
    """This node's share of ``files``, one name at a time, divided again as members come and go.

    Each ``iter`` is one pass (:class:`node.data.division.Pass`), in which no file comes twice at this node. From the
    next file after a change of members on, a dead member's files are included and a newcomer's are left out. A node
    whose share is empty, because there are hardly more files than members, gets one file of its own choice, which
    another member reads too: no node is without data. Across the swarm a file is read at least once per pass, not
    exactly once.

    In a worker process of a DataLoader each worker gets its part of the share. If passes come without end, a worker
    without a part gets one file of its own choice. The members are those at the time when
    the worker started, so that workers which start with each pass follow the swarm, and persistent ones do not.

    Args:
        files: As for :meth:`node.node.Node.shards`, as are ``epochs``, ``shuffle`` and ``samples``.
        sharers: The members that share the files.
        passes_begun: Raised when a pass begins, shape (1,), in memory that forked processes share.

    Raises:
        DataError: There are no files.
        ConfigError: A number is impossible.
    """

    def __init__(
        self, files: Files, epochs: int | None, shuffle: bool, samples: int | None, sharers: Sharers,
        passes_begun: Tensor | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(files, Iterable | os.PathLike):
            raise DataError(f"A {type(files).__name__} has no files to divide: give their names.")
        self.files = [str(file) for file in ([files] if isinstance(files, str | os.PathLike) else files)]
        if not self.files:
            raise DataError("There are no files to divide: give their names.")
        if epochs is not None:
            epochs = checked_whole("epochs", epochs, "ask for at least 1 pass, or for None, which never ends.")
        if samples is not None:
            samples = checked_whole("samples", samples, "give how many all files hold, or leave it out.")
        self.epochs, self.seed, self.samples, self.sharers = epochs, 0 if shuffle else None, samples, sharers
        self.passes_begun = shared_zeros(1) if passes_begun is None else passes_begun
        # The number of the next pass in each worker of a DataLoader, in memory that all processes share: workers that
        # start with each pass would begin at 0 again. The first is also this process's.
        self.next_numbers = shared_zeros(MAX_WORKERS)

    def __len__(self) -> int:
        """Return the number of all files, of this node and of others. Raise TypeError if they come without end."""
        if self.epochs is None:
            raise TypeError(ENDLESS)
        return len(self.files)

    def __length_hint__(self) -> int:
        """Return the same, for ``list``, which asks before it begins: an endless list would fill the memory.

        Raises:
            DataError: The files come without end. Unlike a TypeError it ends ``list``.
        """
        if self.epochs is None:
            raise DataError(ENDLESS)
        return len(self.files)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        passes: Iterable[int] = itertools.count() if self.epochs is None else range(self.epochs)
        for _ in passes:
            yield from self.pass_files(self.begin_pass())

    def begin_pass(self) -> int:
        """Return the number of the pass that begins now. It is counted at once, so that ``break`` skips the rest."""
        self.passes_begun += 1
        worker = get_worker_info()
        place = 0 if worker is None else worker.id % MAX_WORKERS
        number = int(self.next_numbers[place])
        if self.samples is not None:
            number = max(number, self.sharers.swarm_samples() // self.samples)
        self.next_numbers[place] = number + 1
        return number

    def pass_files(self, number: int) -> Iterator[str]:
        """Yield the files of one pass for this process: its rank of the node, and its worker of the rank."""
        sharers, worker = self.sharers, get_worker_info()
        rank, ranks = sharers.rank, sharers.ranks
        file_pass = Pass(len(self.files), number, self.seed, sharers)
        worker_count, worker_number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        turn = 0  # The number of files so far: the workers of a rank take turns.
        while len(taken := file_pass.take(ranks)):
            if turn % worker_count == worker_number:
                yield self.files[int(rank_share(taken, rank, ranks)[0])]
            turn += 1
        # Without a file of its own the first worker reads any file, and so does every worker in endless passes: one
        # that yields nothing would never return to its loader.
        if turn <= worker_number and (self.epochs is None or not worker_number):
            choice = int.from_bytes(sharers.me()[:8], "little") + number + rank * worker_count + worker_number
            yield self.files[choice % len(self.files)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a process that is spawned: the members as they are now. It counts as one that reads."""
        self.passes_begun += 1
        return self.__dict__ | {"sharers": frozen(self.sharers)}


def shared_zeros(count: int) -> Tensor:
    """Return so many zeros, int64 (count,), in memory that processes share."""
    return torch.zeros(count, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def frozen(sharers: Sharers) -> Sharers:
    """Return the sharers as they are now, for another process."""
    me, members, samples = sharers.me(), tuple(sharers.members()), sharers.swarm_samples()
    return Sharers(
        partial(constant, me), partial(constant, members), partial(constant, 0), partial(constant, samples),
        partial(constant, 0), sharers.rank, sharers.ranks,
    )  # fmt: skip


def constant(value: T) -> T:
    return value
