"""The protocol between the ranks of one node: an all-reduce at each step, and commands at some boundaries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from gossip.errors import LocalError
from node.loop.ranks.channel import Channel, Silence, Waiting
from node.loop.ranks.plain import MOST_BYTES, packed, unpacked, unreadable
from node.running import CLOSED, USED

__all__ = ["LONGEST_GAP", "Call", "Command", "Ranks", "StepSummary"]

BEAT_S = 1.0  # The interval at which rank 0 reports that it still waits for its swarm.
FAREWELL_S = 2.0  # Time for the other ranks to end the step that this rank has ended, since they shared its gradients.
LONGEST_GAP = 16  # The most steps between two all-reduces, in case steps suddenly become longer.
FRAME_BYTES = 512  # A command of this size goes out in one call; longer ones take two.


class Call(IntEnum):
    """The call of the node that a rank is in. All ranks meet in it, so they must make the same call."""

    START, STEP, SETTLE, FINISH, LOAD, MERGE, REDUCE, SAVE = range(1, 9)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The step summary, an all-reduce: ``samples`` and ``asked`` combine all ranks, the rest is rank 0's."""

    samples: int = 0
    asked: bool = False  # A rank has read values that are not in the summary.
    stop: bool = False  # All ranks stay at the next boundary, for commands of rank 0.
    swarm_samples: int = 0  # Samples behind the weights of the run, when this node had trained ``own_samples``.
    own_samples: int = 0
    sharers: int = 1  # Members of the run.
    finished: bool = False
    gap: int = 1  # Steps from here to the next summary.

    @property
    def sound(self) -> bool:
        """Return True if correct ranks can have sent it. With a larger gap the others would wait in vain."""
        counts = self.samples, self.swarm_samples, self.own_samples, self.sharers
        return 0 <= self.gap <= LONGEST_GAP and min(counts) >= 0


@dataclass(frozen=True, slots=True)
class Command:
    """A command from rank 0 while all ranks stand at a boundary."""

    kind: str
    what: Any = None


class Ranks:
    """This process among the ranks of its node.

    An **all-reduce** begins at a step and is read one step later, when it has long finished. It carries rank 0's
    announcements and counts everyone's samples. It also reveals a rank that is in another call, and fails if a rank has
    ended. **Commands** follow one another at a boundary, from rank 0 to all, until the last.

    Raises LocalError, which names the rank that failed, as far as known.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.size, self.leads = channel.rank, channel.size, channel.rank == 0
        self.begun: tuple[Call, Tensor, Waiting] | None = None  # The pending all-reduce.
        self.standing = False  # All ranks are at one boundary, where rank 0 sends commands.
        self.is_open = False
        self.lost = ""  # The reason why nothing can be sent any more; empty until then.
        self.said_at = 0.0

    def open(self) -> None:
        if self.lost or self.is_open:
            raise LocalError(USED)
        try:
            self.channel.open()
            self.is_open = True
        except RuntimeError as error:
            raise self.gone(error) from error

    # -- sums ----------------------------------------------------------------------------------------------------
    def begin(self, call: Call, samples: int = 0, asked: bool = False, told: StepSummary | None = None) -> None:
        """Begin an all-reduce of this rank's counts; ``told`` is rank 0's part."""
        assert self.begun is None, "the last all-reduce was not taken"
        told = told or StepSummary(sharers=0, gap=0)  # Other ranks add 0 to rank 0's part.
        row = torch.tensor([
            call, call * call, samples, asked, told.stop, told.swarm_samples, told.own_samples, told.sharers,
            told.finished, told.gap,
        ])  # fmt: skip
        self.check()
        try:
            self.begun = call, row, self.channel.sum(row)
        except RuntimeError as error:
            raise self.gone(error) from error

    def take(self) -> StepSummary | None:
        """Return the pending all-reduce's summary; None if none is pending."""
        if self.begun is None:
            return None
        row = self.wait()
        self.begun = None
        told = StepSummary(row[2], row[3] > 0, row[4] > 0, row[5], row[6], row[7], row[8] > 0, row[9])
        if not told.sound:
            raise unreadable(f"a sum of {row[2:]}")
        return told

    def wait(self) -> list[int]:
        assert self.begun is not None
        call, row, work = self.begun
        self.check()
        try:
            self.channel.wait(work)
        except RuntimeError as error:
            raise self.gone(error) from error
        values: list[int] = row.tolist()
        # The sums of the calls and of their squares fit both only if all ranks made this call.
        if values[0] != call * self.size or values[1] != call * call * self.size:
            raise self.fail(
                f"The ranks of this node's group are in different calls, this one in {call.name.lower()}: every rank "
                "must call step, settle, finish, load and the others of a Node together."
            )
        return values

    def agree(self, values: list[int]) -> list[int]:
        """Return the sums of these values over all ranks, which make this call at one boundary and wait for it."""
        self.check()
        row = torch.tensor(values)
        try:
            self.channel.wait(self.channel.sum(row))
        except RuntimeError as error:
            raise self.gone(error) from error
        sums: list[int] = row.tolist()
        return sums

    # -- commands ------------------------------------------------------------------------------------------------
    def tell(self, kind: str, what: Any = None) -> None:
        """Send a command from rank 0 to all others."""
        data = packed([kind, what])
        frame = np.zeros(FRAME_BYTES, np.uint8)
        frame[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        short = len(data) <= FRAME_BYTES - 8
        if short:
            frame[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self.send(frame)
        if not short:
            self.send(np.frombuffer(bytearray(data), np.uint8))
        self.said_at = time.monotonic()

    def hear(self) -> Command:
        """Receive the next command."""
        frame = np.zeros(FRAME_BYTES, np.uint8)
        self.send(frame)
        size = int.from_bytes(frame[:8].tobytes(), "little")
        if size > MOST_BYTES:
            raise unreadable(f"{size} bytes at once")
        data = frame[8 : 8 + size]
        if size > FRAME_BYTES - 8:
            data = np.zeros(size, np.uint8)
            self.send(data)
        row = unpacked(data.tobytes(), list[Any])
        if len(row) != 2 or not isinstance(row[0], str):
            raise unreadable("no command")
        return Command(*row)

    def beat(self) -> None:
        """Tell the other ranks that rank 0 still waits, if its last command is long ago."""
        if self.standing and time.monotonic() - self.said_at > BEAT_S:
            self.tell("wait")

    def send(self, array: NDArray[Any]) -> None:
        """Broadcast ``array`` from rank 0."""
        self.send_tensor(torch.from_numpy(array))

    def send_tensor(self, tensor: Tensor) -> None:
        """Broadcast a contiguous tensor on the host, of any type, from rank 0."""
        self.check()
        try:
            if tensor.numel():
                self.channel.send(tensor.reshape(-1).view(torch.uint8))
        except RuntimeError as error:
            raise self.gone(error) from error

    # -- ends ----------------------------------------------------------------------------------------------------
    def check(self) -> None:
        if self.lost:
            raise LocalError(self.lost)

    def gone(self, error: BaseException | None = None) -> LocalError:
        """Return the error for a rank that ended: the reason that it left, or else a description of ``error``."""
        if self.lost:
            return LocalError(self.lost)
        one = "A rank" if self.size > 2 else f"Rank {1 - self.rank}"
        ended = f"{one} of this node's group has ended, was killed, or left its Node before this one did"
        if isinstance(error, Silence):
            waited = f"{error} s, as long as the ranks of this group wait for each other"
            ended = f"{one} of this node's group did nothing for {waited}"
        return self.fail(self.channel.read() or f"{ended}, and the others end with it: start all of them again.")

    def fail(self, sentence: str) -> LocalError:
        self.lost = self.lost or sentence
        return LocalError(self.lost)

    def leave(self, error: BaseException | None) -> None:
        """Part from the others, and leave them the reason if there was an ``error``.

        It waits only for ranks that are about to end the step that this rank has ended. If a lost rank broke this
        rank's gradients, LocalError is raised from the error: torch's own messages are long and name no rank.
        """
        if self.is_open:
            self.is_open = False
            begun, self.begun = self.begun, None
            with contextlib.suppress(RuntimeError):
                if begun is not None:
                    self.channel.wait(begun[2], FAREWELL_S)  # A group with pending work does not end.
            del begun
            lost = self.gone() if of_the_channel(error) else None
            if error is not None and not self.lost:
                self.channel.write(
                    f"Rank {self.rank} of this node's group has failed ({type(error).__name__}: {error}), and the "
                    "others end with it."
                )
            self.lost = self.lost or CLOSED
            self.channel.close()
            if lost is not None:
                raise lost from error

    @contextlib.contextmanager
    def stand(self) -> Iterator[None]:
        """Mark the time in which all ranks stand at one boundary."""
        self.standing = True
        yield
        self.standing = False


def of_the_channel(error: BaseException | None) -> bool:
    """Return True for the errors that torch raises if gradients wait for a rank that has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
