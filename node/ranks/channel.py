"""What the ranks of one node speak over: a process group of their own beside the user's, and bounded waits on it."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gossip.errors import ConfigError, LocalError

if TYPE_CHECKING:  # a torch without it has nodes of one process
    from torch.distributed import ProcessGroup

__all__ = ["Channel", "GroupChannel", "Waiting"]

PATIENCE = timedelta(minutes=30)  # torch's own, for a group that does not say how long it waits
PIECE_BYTES = (
    64 << 20
)  # of what goes over an accelerator: that much of its memory, and no more calls than a model of GB
SMALL_BYTES = 1 << 20  # sockets are as quick with that
WHY = "why"  # a rank has failed
SHORTEST_S, LONGEST_S = 20e-6, 1e-3  # between two looks at what is under way: signals are served between them


class Waiting(Protocol):
    """What is under way. Both raise RuntimeError, soon after its end, for what failed."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class Channel(Protocol):
    """Between the ranks of one node, of which this process is one. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def open(self) -> None:
        """Called by all. Raises RuntimeError where some rank does not come."""

    def close(self) -> None:
        """Called by any: what others wait for on it fails. A second call does nothing."""

    def sum(self, row: Tensor) -> Waiting:
        """``row``, int64 on the host, becomes the sum over all ranks."""

    def send(self, flat: Tensor) -> None:
        """``flat``, bytes on the host, becomes that of rank 0."""

    def write(self, sentence: str) -> None:
        """For the others to read where they find this rank gone: why."""

    def read(self) -> str:
        """What one that is gone has written, or nothing."""

    def wait(self, work: Waiting, seconds: float | None = None) -> bool:
        """Until it is done; or for so long, and then whether it is. Without, for as long as the ranks wait for each
        other. Raises RuntimeError for what failed."""


class GroupChannel:
    """Over the members of a torch process group. Its control group is gloo's whatever the user's is: between hosts'
    memories, so that a look at it waits for no accelerator and stands in no queue of one, and a rank that dies is
    noticed by the sockets that close. ``patience_s`` is the user's group's: who evaluates or saves alone for minutes
    keeps the others waiting as long as their gradients would.

    Vectors go over the user's group where that is NCCL's: from host to device, device to device, and back, which is an
    order of magnitude faster than sockets for a model of GB.
    """

    def __init__(self, group: object) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("group= needs torch.distributed: call init_process_group before making the Node.")
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"group is a {type(group).__name__}: give a process group that this process is a member of, as "
                "torch.distributed.group.WORLD."
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.first = dist.get_global_rank(group, 0)
        self.device: torch.device | None = None  # that vectors go over
        self.patience = patience_of(group)
        self.control: ProcessGroup | None = None

    def open(self) -> None:
        ranks = dist.get_process_group_ranks(self.group)
        self.control = dist.new_group(ranks, timeout=self.patience, backend="gloo", use_local_synchronization=True)
        if "cuda:nccl" in str(dist.get_backend_config(self.group)):
            self.device = torch.device("cuda", torch.cuda.current_device())

    def close(self) -> None:
        control, self.control = self.control, None
        if control is not None and dist.is_initialized():  # or the program has ended all groups already
            dist.destroy_process_group(control)

    def sum(self, row: Tensor) -> Waiting:
        work: Waiting = self.opened.allreduce([row])
        return work

    def send(self, flat: Tensor) -> None:
        if self.device is not None and flat.numel() > SMALL_BYTES:
            for piece in torch.split(flat, PIECE_BYTES):
                self.send_over(self.device, piece)
        else:
            work = dist.broadcast(flat, self.first, group=self.opened, async_op=True)
            assert work is not None
            self.wait(work)

    def send_over(self, device: torch.device, piece: Tensor) -> None:
        """In the current stream, behind the gradients of the last step."""
        there = piece.to(device) if self.rank == 0 else torch.empty_like(piece, device=device)
        dist.broadcast(there, self.first, group=self.group)
        if self.rank:
            piece.copy_(there)

    def wait(self, work: Waiting, seconds: float | None = None) -> bool:
        patience_s = self.patience.total_seconds()
        pause_s, until = SHORTEST_S, time.monotonic() + (patience_s if seconds is None else seconds)
        while not work.is_completed():
            if time.monotonic() > until:
                if seconds is None:
                    raise RuntimeError(f"Nothing came for {patience_s:g} s.")
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        work.wait()
        return True

    def write(self, sentence: str) -> None:
        if self.control is not None:
            with contextlib.suppress(AttributeError, RuntimeError):  # an older torch; or it has gone with rank 0
                self.control.get_group_store().set(WHY, sentence)

    def read(self) -> str:
        if self.control is not None:
            with contextlib.suppress(AttributeError, RuntimeError):
                store = self.control.get_group_store()
                if store.check([WHY]):
                    return bytes(store.get(WHY)).decode()
        return ""

    @property
    def opened(self) -> ProcessGroup:
        if self.control is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.control


def patience_of(group: ProcessGroup) -> timedelta:
    """How long its members wait for each other. Torch tells by names of its own alone."""
    try:
        kinds = {kind.type for kind in group._device_types}
        found = getattr(group._get_backend(torch.device(sorted(kinds)[0])).options, "_timeout", None)
    except (AttributeError, IndexError, RuntimeError):
        found = None
    return found if isinstance(found, timedelta) else PATIENCE
