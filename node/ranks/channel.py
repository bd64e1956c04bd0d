"""What the ranks of one node speak over: a process group of their own beside the user's, and bounded waits on it."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gossip.errors import ConfigError, LocalError
from node.ranks.plain import line_of

if TYPE_CHECKING:  # a torch without it has nodes of one process
    from torch.distributed import ProcessGroup

__all__ = ["Channel", "GroupChannel", "Silence", "Waiting"]

PATIENCE = timedelta(minutes=30)  # torch's own, for a group that does not say how long it waits
PIECE_BYTES = (
    64 << 20
)  # of what goes over an accelerator: that much of its memory, and no more calls than a model of GB
SMALL_BYTES = 1 << 20  # sockets are as quick with that
WHY = "why"  # a rank has failed
OPENED: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # how many channels each group has had in this process
READ_S = 5.0  # the store answers within milliseconds, or its process stands still
SHORTEST_S, LONGEST_S = 20e-6, 1e-3  # between two looks at what is under way: signals are served between them


class Silence(RuntimeError):
    """Another rank did nothing for as long as the ranks of a group wait for each other: so many seconds."""


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
        other. Raises RuntimeError for what failed, and Silence for what did not end in that time."""


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
        self.store: Any = None  # torch's stubs know neither stores nor what a gloo group can do
        self.control: Any = None

    def open(self) -> None:
        """Connect the ranks. ``dist.new_group`` would not do: it gives a group the name of one that was destroyed, and
        the second Node of a program would find in the store where the ranks of the first one were."""
        number = OPENED[self.group] = OPENED.get(self.group, 0) + 1
        self.store = prefixed(f"gossip/{number}", store_of(self.group))
        self.control = dist.ProcessGroupGloo(self.store, self.rank, self.size, self.patience)
        if "cuda:nccl" in str(dist.get_backend_config(self.group)):
            self.device = torch.device("cuda", torch.cuda.current_device())

    def close(self) -> None:
        self.store = self.control = None

    def sum(self, row: Tensor) -> Waiting:
        work: Waiting = self.opened.allreduce([row])
        return work

    def send(self, flat: Tensor) -> None:
        if self.device is not None and flat.numel() > SMALL_BYTES:
            for piece in torch.split(flat, PIECE_BYTES):
                self.send_over(self.device, piece)
        else:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self.wait(self.opened.broadcast([flat], options))

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
                    raise Silence(f"{patience_s:g}")
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        try:
            work.wait()
        except RuntimeError as error:
            if "Timed out" in str(error):  # gloo's own clock, which is as patient, was first
                raise Silence(f"{patience_s:g}") from error
            raise
        return True

    def write(self, sentence: str) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # it has gone with rank 0
                self.store.set(WHY, line_of(sentence))

    def read(self) -> str:
        """Return what another rank wrote. A store whose process stands still answers never, so a thread asks it."""
        found: list[bytes] = []

        def ask(store: Any) -> None:
            with contextlib.suppress(RuntimeError):
                if store.check([WHY]):
                    found.append(bytes(store.get(WHY)))

        if self.store is not None:
            asking = threading.Thread(target=ask, args=(self.store,), name="gossip-why", daemon=True)
            asking.start()
            asking.join(READ_S)
        return line_of(found[0].decode(errors="replace")) if found else ""

    @property
    def opened(self) -> Any:
        if self.control is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.control


def store_of(group: ProcessGroup) -> Any:
    """Return the store through which the members of a group find each other."""
    try:
        return group.get_group_store()
    except AttributeError:  # an older torch
        return prefixed(group.group_name, dist.distributed_c10d._get_default_store())


def prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def patience_of(group: ProcessGroup) -> timedelta:
    """How long its members wait for each other. Torch tells by names of its own alone."""
    try:
        kinds = {kind.type for kind in group._device_types}
        found = getattr(group._get_backend(torch.device(sorted(kinds)[0])).options, "_timeout", None)
    except (AttributeError, IndexError, RuntimeError):
        found = None
    return found if isinstance(found, timedelta) else PATIENCE
