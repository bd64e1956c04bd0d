"""The channel between the ranks of one node: a process group next to the user's, with bounded waits."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gossip.errors import ConfigError, LocalError
from node.ranks.plain import one_line

if TYPE_CHECKING:  # A torch without it has nodes of one process.
    from torch.distributed import ProcessGroup, Work

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default, for a group that does not reveal its timeout.
PIECE_BYTES = 64 << 20  # Bytes per call over an accelerator: little of its memory, and few calls for several GB.
SMALL_BYTES = 1 << 20  # Up to this size sockets are as fast as an accelerator's group.
NOT_RUNNING = "This Node is not running: use it inside its with block."
REASON_KEY = "why"  # The store's key under which a failed rank leaves its reason.
# The number of channels that each group has had in this process.
CHANNEL_COUNTS: WeakKeyDictionary[object, int] = WeakKeyDictionary()
REASON_S = 5.0  # Time for the store's answer, which takes milliseconds unless the store's process is suspended.
SHORTEST_POLL_S, LONGEST_POLL_S = 20e-6, 1e-3  # The poll interval grows between these; Python serves signals meanwhile.


class Silence(RuntimeError):
    """Another rank did nothing for the group's timeout. The message is that timeout in seconds."""


class Channel:
    """A channel between the ranks of one node, over a torch process group. All ranks make the same calls in order.

    Sums and commands go over a gloo group of its own, between the hosts' memories. So polling it waits for no
    accelerator, and a rank that dies is noticed when its sockets close. The timeout is that of the user's group: a rank
    that evaluates or saves alone for minutes delays the others as long as their gradients would.

    If the user's group is NCCL's, large vectors go over that group, from device to device. For a model of several GB
    this is an order of magnitude faster than sockets.
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
        self.first_rank = dist.get_global_rank(group, 0)  # The number of this group's rank 0 among all processes.
        self.vector_device: torch.device | None = None  # The device over which large vectors go, if any.
        self.device: torch.device | None = None  # The model's device, set before the channel opens; None for the host.
        self.timeout = timeout_of(group)
        # Both are None unless the channel is open. Any, because torch's stubs know neither of their types.
        self.store: Any = None  # The key-value store by which the ranks find each other.
        self.control: Any = None  # The gloo group for sums and commands.
        self.pairs: dict[int, Any] = {}  # For each rank that this one sends to or receives from: a gloo group of both.

    def open(self) -> None:
        """Connect the ranks, which all call this. Raises RuntimeError if one does not come.

        ``dist.new_group`` is not used, because it reuses the name of a destroyed group. The second Node of a program
        would then find the addresses of the first one's ranks in the store.
        """
        number = CHANNEL_COUNTS[self.group] = CHANNEL_COUNTS.get(self.group, 0) + 1
        self.store = prefixed(f"gossip/{number}", store_of(self.group))
        self.control = dist.ProcessGroupGloo(self.store, self.rank, self.size, self.timeout)
        if "cuda:nccl" in str(dist.get_backend_config(self.group)):
            # The current device is only a guess: on every rank it is the first, unless the program has set another.
            self.vector_device = self.device or torch.device("cuda", torch.cuda.current_device())

    def close(self) -> None:
        """Close the channel, so that pending work on other ranks fails. A second call does nothing."""
        self.store = self.control = None
        self.pairs.clear()

    def sum(self, row: Tensor) -> Work:
        """All-reduce ``row``, int64 on the host, to its sum over all ranks."""
        work: Work = self.open_group.allreduce([row])
        return work

    def broadcast(self, flat: Tensor) -> None:
        """Broadcast ``flat``, bytes on the host, from rank 0."""
        if self.vector_device is not None and self.relays(flat.numel()):
            for piece in torch.split(flat, PIECE_BYTES):
                self.broadcast_over(self.vector_device, piece)
        else:
            self.wait(self.open_group.broadcast([flat], broadcast_from(0)))

    def send(self, flat: Tensor, rank: int) -> None:
        """Send ``flat``, bytes on the host, from rank 0 to another rank or the reverse, which receives them."""
        self.wait(self.pair_with(rank).broadcast([flat], broadcast_from(place_in_pair(self.rank))))

    def receive(self, flat: Tensor, rank: int) -> None:
        self.wait(self.pair_with(rank).broadcast([flat], broadcast_from(place_in_pair(rank))))

    def pair_with(self, rank: int) -> Any:
        """Return the gloo group of rank 0 and another rank; both connect at their first message.

        The group of all ranks could send between two as well, but nothing says when such a message is done: Python
        would wait in torch and serve no signals.
        """
        assert 0 in (self.rank, rank), "others than rank 0 have nothing for each other"
        if self.control is None:
            raise LocalError(NOT_RUNNING)
        if rank not in self.pairs:
            store = prefixed(f"pair/{max(self.rank, rank)}", self.store)
            self.pairs[rank] = dist.ProcessGroupGloo(store, place_in_pair(self.rank), 2, self.timeout)
        return self.pairs[rank]

    def broadcast_over(self, device: torch.device, piece: Tensor) -> None:
        """Broadcast a piece over the device, in the current stream after the gradients of the last step."""
        on_device = piece.to(device) if self.rank == 0 else torch.empty_like(piece, device=device)
        self.relay(on_device)
        if self.rank:
            piece.copy_(on_device)

    def relays(self, size: int) -> bool:
        """Return True if a vector of ``size`` bytes goes from device to device, by :meth:`relay`."""
        return self.vector_device is not None and size > SMALL_BYTES

    def relay(self, values: Tensor) -> None:
        """Broadcast ``values`` on the device from rank 0, in the order of the current stream. No host waits for it."""
        dist.broadcast(values, self.first_rank, group=self.group)

    def wait(self, work: Work, seconds: float | None = None) -> bool:
        """Wait until the work is done, for ``seconds`` or else for the group's timeout.

        Returns:
            True if the work is done; False after ``seconds``.

        Raises:
            Silence: The group's timeout has passed.
            RuntimeError: The work failed.
        """
        timeout_s = self.timeout.total_seconds()
        pause_s, until = SHORTEST_POLL_S, time.monotonic() + (timeout_s if seconds is None else seconds)
        while not work.is_completed():
            if time.monotonic() > until:
                if seconds is None:
                    raise Silence(f"{timeout_s:g}")
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            if "Timed out" in str(error):  # gloo's own timer has the same timeout, and has fired first.
                raise Silence(f"{timeout_s:g}") from error
            raise
        return True

    def leave_reason(self, sentence: str) -> None:
        """Store the reason for which this rank ends, for the other ranks to read."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # The store may have ended with rank 0.
                self.store.set(REASON_KEY, one_line(sentence))

    def read_reason(self) -> str:
        """Return the reason that another rank left, or an empty text.

        A thread asks the store, because a store whose process is suspended never answers.
        """
        answers: list[bytes] = []  # At most one.

        def ask(store: Any) -> None:
            with contextlib.suppress(RuntimeError):
                if store.check([REASON_KEY]):
                    answers.append(bytes(store.get(REASON_KEY)))

        if self.store is not None:
            asking = threading.Thread(target=ask, args=(self.store,), name="gossip-why", daemon=True)
            asking.start()
            asking.join(REASON_S)
        return one_line(answers[0].decode(errors="replace")) if answers else ""

    @property
    def open_group(self) -> Any:
        if self.control is None:
            raise LocalError(NOT_RUNNING)
        return self.control


def place_in_pair(rank: int) -> int:
    """Return the place of a rank in the group of rank 0 and one other rank: 0 and 1."""
    return int(rank != 0)


def broadcast_from(root: int) -> Any:
    """Return the options of a broadcast from this rank of its group."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def store_of(group: ProcessGroup) -> Any:
    """Return the store through which the members of a group find each other."""
    try:
        return group.get_group_store()
    except AttributeError:  # An older torch.
        return prefixed(group.group_name, dist.distributed_c10d._get_default_store())


def prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the group's timeout, for which torch has private names only."""
    try:
        kinds = {kind.type for kind in group._device_types}
        timeout = getattr(group._get_backend(torch.device(sorted(kinds)[0])).options, "_timeout", None)
    except (AttributeError, IndexError, RuntimeError):
        timeout = None
    return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT
