"""The protocol between the ranks of one node: all-reduces between steps, and commands at some boundaries.

The *ranks* are the processes of torch.distributed that train one model and form one node. A *boundary* is the moment
between two steps, where a model may change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from gossip.errors import LocalError
from node.ranks.channel import Channel, Silence
from node.ranks.plain import MAX_BYTES, pack_value, unpack_value, unreadable_error
from node.running import CLOSED, USED

if TYPE_CHECKING:
    from torch.distributed import Work

HEARTBEAT_S = 1.0  # The interval at which rank 0 reports that it still waits for its swarm.
FAREWELL_S = 2.0  # Time for the other ranks to end the step that this rank has ended, since they shared its gradients.
MAX_GAP_STEPS = 16  # The most steps between two all-reduces, in case steps suddenly become longer.
FRAME_BYTES = 512  # A value up to this size, its length included, is one message; a longer one takes two.
LENGTH_BYTES = 8  # The length of a value, little-endian, at the beginning of its frame.


class Call(IntEnum):
    """The call of the node that a rank is in. All ranks meet in it, so they must make the same call."""

    START, STEP, SETTLE, FINISH, LOAD, LOAD_STATE_DICT, MERGE, REDUCE, SAVE, EXPORT, LEAVE = range(1, 12)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The result of an all-reduce: the first two fields combine all ranks, the others come from rank 0."""

    samples: int = 0  # The samples that all ranks have trained on since the last summary.
    is_report_wanted: bool = False  # A rank has read values that only a SwarmReport has.
    must_stop: bool = False  # All ranks stay at this boundary, for commands of rank 0.
    # Samples that the weights of the run were trained on, when this node itself had trained ``own_samples``.
    swarm_samples: int = 0
    own_samples: int = 0
    sharers: int = 1  # Members of the run.
    finished: bool = False
    gap_steps: int = 1  # Steps from here to the next summary.

    @property
    def is_valid(self) -> bool:
        """Return True if correct ranks can have sent it. A larger gap would let the other ranks wait in vain."""
        counts = self.samples, self.swarm_samples, self.own_samples, self.sharers
        return 0 <= self.gap_steps <= MAX_GAP_STEPS and min(counts) >= 0


@dataclass(frozen=True, slots=True)
class Command:
    """A command from rank 0 while all ranks stand at a boundary."""

    kind: str
    payload: Any = None  # Plain data, which the receiver checks against the type that the kind needs.


class Ranks:
    """This process among the ranks of its node.

    An **all-reduce** begins at a step and is read one step later, when it has long finished. It brings rank 0's
    announcements to all ranks and sums their samples. It also reveals a rank that is in another call of the Node, and
    fails if a rank has ended. **Commands** go from rank 0 to all others, while all ranks stand at one boundary.

    Methods raise LocalError if a rank has failed. The error names that rank, as far as it is known.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.size, self.leads = channel.rank, channel.size, channel.rank == 0
        self.pending_sum: tuple[Call, Tensor, Work] | None = None  # The all-reduce in progress, if any.
        self.is_standing = False  # All ranks are at one boundary, where rank 0 sends commands.
        self.is_open = False
        self.failure = ""  # The reason why nothing can be sent any more; empty until then.
        self.commanded_at = 0.0  # The time of the last command, by time.monotonic.

    def open(self) -> None:
        if self.failure or self.is_open:
            raise LocalError(USED)
        with self.using_channel():
            self.channel.open()
        self.is_open = True

    # -- sums ----------------------------------------------------------------------------------------------------
    def begin_summary(
        self, call: Call, samples: int = 0, is_report_wanted: bool = False, announced: StepSummary | None = None
    ) -> None:
        """Begin an all-reduce of this rank's counts; ``announced`` is rank 0's part."""
        assert self.pending_sum is None, "the last all-reduce was not finished"
        announced = announced or StepSummary(sharers=0, gap_steps=0)  # Other ranks add 0 to rank 0's part.
        row = torch.tensor([
            call, call * call, samples, is_report_wanted, announced.must_stop, announced.swarm_samples,
            announced.own_samples, announced.sharers, announced.finished, announced.gap_steps,
        ])  # fmt: skip
        with self.using_channel():
            self.pending_sum = call, row, self.channel.sum(row)

    def finish_summary(self) -> StepSummary | None:
        """Wait for the pending all-reduce and return its summary; None if none is pending."""
        if self.pending_sum is None:
            return None
        row = self.wait_for_sum()
        self.pending_sum = None
        # The row of `begin_summary` without the call and its square, which `wait_for_sum` has checked.
        summary = StepSummary(row[2], row[3] > 0, row[4] > 0, row[5], row[6], row[7], row[8] > 0, row[9])
        if not summary.is_valid:
            raise unreadable_error(f"a sum of {row[2:]}")
        return summary

    def wait_for_sum(self) -> list[int]:
        """Wait for the pending all-reduce, and return the sums. Raises LocalError if ranks are in different calls."""
        assert self.pending_sum is not None
        call, row, work = self.pending_sum
        with self.using_channel():
            self.channel.wait(work)
        values: list[int] = row.tolist()
        # The sum of the calls and that of their squares are both right only if all ranks made this call.
        if values[0] != call * self.size or values[1] != call * call * self.size:
            raise self.fail(
                f"The ranks of this node's group are in different calls, this one in {call.name.lower()}: every rank "
                "must call step, settle, finish, load and the others of a Node together."
            )
        return values

    def sum_values(self, values: list[int]) -> list[int]:
        """Return the sums of these values over all ranks. All of them call this at one boundary, and wait."""
        row = torch.tensor(values, device="cpu")
        with self.using_channel():
            self.channel.wait(self.channel.sum(row))
        sums: list[int] = row.tolist()
        return sums

    # -- commands, and messages between rank 0 and one other rank ------------------------------------------------------
    def send_command(self, kind: str, payload: Any = None) -> None:
        """Send a command from rank 0 to all others."""
        self.send_value([kind, payload])
        self.commanded_at = time.monotonic()

    def receive_command(self) -> Command:
        """Receive the next command."""
        row = self.receive_value(list[Any])
        if len(row) != 2 or not isinstance(row[0], str):
            raise unreadable_error("no command")
        return Command(*row)

    def send_heartbeat(self) -> None:
        """Tell the other ranks that rank 0 still waits, if it has sent no command for a while."""
        if self.is_standing and time.monotonic() - self.commanded_at > HEARTBEAT_S:
            self.send_command("wait")

    def send_value(self, value: Any, rank: int | None = None) -> None:
        """Send plain data to a rank, by default from rank 0 to all others."""
        data = pack_value(value)
        framed = torch.frombuffer(bytearray(len(data).to_bytes(LENGTH_BYTES, "little") + data), dtype=torch.uint8)
        is_short = framed.numel() <= FRAME_BYTES
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        filled = framed.numel() if is_short else LENGTH_BYTES
        frame[:filled] = framed[:filled]
        self.send(frame, rank)
        if not is_short:
            self.send(framed[LENGTH_BYTES:], rank)

    def receive_value(self, hint: Any, rank: int | None = None) -> Any:
        """Receive plain data, which must fit the annotation, from a rank, by default what rank 0 sends to all."""
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        self.receive(frame, rank)
        size = int.from_bytes(frame[:LENGTH_BYTES].numpy().tobytes(), "little")
        if size > MAX_BYTES:
            raise unreadable_error(f"{size} bytes at once")
        data = frame[LENGTH_BYTES : LENGTH_BYTES + size]
        if size > FRAME_BYTES - LENGTH_BYTES:
            data = torch.zeros(size, dtype=torch.uint8, device="cpu")
            self.receive(data, rank)
        return unpack_value(data.numpy().tobytes(), hint)

    # -- tensors: contiguous, on the host, of any type and of a size that both sides know ------------------------------
    def broadcast_array(self, array: NDArray[Any]) -> None:
        """Broadcast ``array`` from rank 0."""
        self.broadcast(torch.from_numpy(array))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a tensor from rank 0."""
        with self.using_channel():
            if tensor.numel():
                self.channel.broadcast(bytes_of(tensor))

    def send(self, tensor: Tensor, rank: int | None = None) -> None:
        """Send a tensor between rank 0 and this rank, or from rank 0 to all others."""
        if rank is None:
            self.broadcast(tensor)
        elif tensor.numel():
            with self.using_channel():
                self.channel.send(bytes_of(tensor), rank)

    def receive(self, tensor: Tensor, rank: int | None = None) -> None:
        """Receive a tensor from this rank, or the one that rank 0 sends to all others."""
        if rank is None:
            self.broadcast(tensor)
        elif tensor.numel():
            with self.using_channel():
                self.channel.receive(bytes_of(tensor), rank)

    def relays(self, size: int) -> bool:
        """Return True if a vector of ``size`` bytes goes from device to device, by :meth:`relay`."""
        return self.channel.relays(size)

    def relay(self, values: Tensor) -> None:
        """Broadcast a tensor on the device from rank 0, in the order of the current stream."""
        with self.using_channel():
            self.channel.relay(values)

    # -- ends ----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def using_channel(self) -> Iterator[None]:
        """Raise LocalError if a rank has failed, or fails during the block."""
        self.check_alive()
        try:
            yield
        except RuntimeError as error:
            raise self.on_channel_error(error) from error

    @property
    def is_up(self) -> bool:
        """Return True if the channel is open and no rank has failed."""
        return self.is_open and not self.failure

    def check_alive(self) -> None:
        """Raise LocalError if a rank has failed."""
        if self.failure:
            raise LocalError(self.failure)

    def on_channel_error(self, error: BaseException | None = None) -> LocalError:
        """Handle a failed collective: return the error to raise.

        Its text is the reason that another rank has left in the channel, or else a description of ``error``.
        """
        if self.failure:
            return LocalError(self.failure)
        other = "A rank" if self.size > 2 else f"Rank {1 - self.rank}"
        ended = f"{other} of this node's group has ended, was killed, or left its Node before this one did"
        if isinstance(error, Silence):
            waited = f"{error} s, as long as the ranks of this group wait for each other"
            ended = f"{other} of this node's group did nothing for {waited}"
        return self.fail(self.channel.read_reason() or f"{ended}, and the others end with it: start all of them again.")

    def fail(self, sentence: str) -> LocalError:
        """Send nothing from here on; return the error to raise, which is that of the first failure."""
        self.failure = self.failure or sentence
        return LocalError(self.failure)

    def leave(self, error: BaseException | None) -> None:
        """Close the channel, and leave the other ranks the reason if there was an ``error``.

        Raises:
            LocalError: The error came from torch because another rank has ended. torch's own messages are long and name
                no rank.
        """
        if self.is_open:
            self.is_open = False
            pending, self.pending_sum = self.pending_sum, None
            with contextlib.suppress(RuntimeError):
                if pending is not None:  # Other ranks are about to end the step that this rank has ended.
                    self.channel.wait(pending[2], FAREWELL_S)  # A group with pending work does not end.
            del pending  # The channel closes only if nothing holds the work.
            lost = self.on_channel_error() if is_channel_error(error) else None
            if error is not None and not self.failure:
                self.channel.leave_reason(
                    f"Rank {self.rank} of this node's group has failed ({type(error).__name__}: {error}), and the "
                    "others end with it."
                )
            self.failure = self.failure or CLOSED
            self.channel.close()
            if lost is not None:
                raise lost from error

    @contextlib.contextmanager
    def at_one_boundary(self) -> Iterator[None]:
        """Note that all ranks stand at one boundary during the block."""
        self.is_standing = True
        yield
        self.is_standing = False


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, flat, in the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def is_channel_error(error: BaseException | None) -> bool:
    """Return True for the errors that torch raises if gradients wait for a rank that has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
