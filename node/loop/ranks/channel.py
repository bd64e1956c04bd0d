"""The channel between the ranks of one node: a process group next to the user's, with bounded waits."""

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
from node.loop.ranks.plain import line_of

if TYPE_CHECKING:  # A torch without it has nodes of one process.
    from torch.distributed import ProcessGroup

__all__ = ["Channel", "GroupChannel", "Silence", "Waiting"]

PATIENCE = timedelta(minutes=30)  # torch's default, for a group that does not reveal its timeout.
# Bytes per call over an accelerator: that much of its memory, and few calls for a model of several GB.
PIECE_BYTES = 64 << 20
SMALL_BYTES = 1 << 20  # Up to here sockets are as fast as an accelerator's group.
WHY = "why"  # The key under which a failed rank leaves its reason.
# The number of channels that each group has had in this process.
OPENED: WeakKeyDictionary[object, int] = WeakKeyDictionary()
READ_S = 5.0  # The store answers within milliseconds, or its process is suspended.
SHORTEST_S, LONGEST_S = 20e-6, 1e-3  # The poll interval of pending work; signals are served in between.


class Silence(RuntimeError):
    """Another rank did nothing for the group's timeout, which is the message, in seconds."""


class Waiting(Protocol):
    """A pending collective. Both methods raise RuntimeError soon after a failure."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class Channel(Protocol):
    """A channel between the ranks of one node. All ranks make the same calls in the same order."""

    rank: int
    size: int
    place: torch.device | None
    """The device of this rank's model, set before the channel opens; None for the host."""

    def open(self) -> None:
        """Open the channel; all ranks call this. Raises RuntimeError if a rank does not come."""

    def close(self) -> None:
        """Close the channel, so that pending work on other ranks fails. A second call does nothing."""

    def sum(self, row: Tensor) -> Waiting:
        """All-reduce ``row``, int64 on the host, to its sum over all ranks."""

    def send(self, flat: Tensor) -> None:
        """Broadcast ``flat``, bytes on the host, from rank 0."""

    def write(self, sentence: str) -> None:
        """Leave the reason for which this rank ends, for the others to read."""

    def read(self) -> str:
        """Return the reason that an ended rank left, or an empty text."""

    def wait(self, work: Waiting, seconds: float | None = None) -> bool:
        """Wait until the work is done.

        With ``seconds`` it returns after that time, True if the work is done. Without, it waits for the group's timeout
        and then raises Silence. Raises RuntimeError if the work failed.
        """


class GroupChannel:
    """A channel over the members of a torch process group.

    The control group is always gloo, between the hosts' memories. So a look at it waits for no accelerator, and a rank
    that dies is noticed when its sockets close. The timeout is that of the user's group: a rank that evaluates or saves
    alone for minutes delays the others as long as their gradients would.

    If the user's group is NCCL's, vectors go over it: from host to device, device to device, and back. For a model of
    several GB that is an order of magnitude faster than sockets.
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
        self.device: torch.device | None = None  # The device for vectors, if any.
        self.place: torch.device | None = None  # The model's device.
        self.patience = patience_of(group)
        self.store: Any = None  # torch's stubs know neither stores nor the methods of a gloo group.
        self.control: Any = None

    def open(self) -> None:
        """Connect the ranks.

        ``dist.new_group`` would not do. It reuses the name of a destroyed group. So the second Node of a program would
        find the addresses of the first one's ranks in the store.
        """
        number = OPENED[self.group] = OPENED.get(self.group, 0) + 1
        self.store = prefixed(f"gossip/{number}", store_of(self.group))
        self.control = dist.ProcessGroupGloo(self.store, self.rank, self.size, self.patience)
        if "cuda:nccl" in str(dist.get_backend_config(self.group)):
            # Without torch.cuda.set_device the current device is the first, on every rank.
            self.device = self.place or torch.device("cuda", torch.cuda.current_device())

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
        """Broadcast in the current stream, after the gradients of the last step."""
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
            if "Timed out" in str(error):  # gloo's own timer, with the same timeout, fired first.
                raise Silence(f"{patience_s:g}") from error
            raise
        return True

    def write(self, sentence: str) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # The store has ended with rank 0.
                self.store.set(WHY, line_of(sentence))

    def read(self) -> str:
        """Return the reason that another rank left.

        A store whose process is suspended never answers, so a thread asks it.
        """
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
    except AttributeError:  # An older torch.
        return prefixed(group.group_name, dist.distributed_c10d._get_default_store())


def prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def patience_of(group: ProcessGroup) -> timedelta:
    """Return the group's timeout, for which torch has private names only."""
    try:
        kinds = {kind.type for kind in group._device_types}
        found = getattr(group._get_backend(torch.device(sorted(kinds)[0])).options, "_timeout", None)
    except (AttributeError, IndexError, RuntimeError):
        found = None
    return found if isinstance(found, timedelta) else PATIENCE
