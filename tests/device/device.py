"""A simulated accelerator: streams, memory, and the waits of the host that a program did not ask for."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.device.memory import Block, Memory, Pinned
from tests.device.queues import Queue, Queues

HERE = Path(__file__).parent
MACHINERY = (*(str(HERE / name) for name in ("cuda.py", "device.py", "tensors.py")), str(Path(torch.__file__).parent))
OURS = tuple(str(HERE.parents[1] / package) for package in ("node", "gossip"))


@dataclass(frozen=True, slots=True)
class Wait:
    """A moment at which the host waited for the device."""

    what: str
    at: str
    """File and line outside torch that waited."""
    ours: str
    """The innermost line of node or gossip that led there; empty if there is none."""
    thread: str


@dataclass(slots=True)
class Graph:
    """Captured work, and the memory that it uses at every replay."""

    work: list[Callable[[], object]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


class Device:
    """One device of the given type.

    Args:
        kind: ``cuda``, or ``mps`` for a device without streams: each call finishes before it returns.
        seed: Seeds the order of what runs on different streams.
    """

    def __init__(self, kind: str = "cuda", seed: int = 0) -> None:
        self.kind, self.torch = kind, torch.device(kind, 0)
        self.queues = Queues(seed)
        self.memory, self.pinned = Memory(self.queues), Pinned()
        self.default = self.queues.new("default")
        self.here = threading.local()  # Each thread has a current stream.
        self.waits: list[Wait] = []
        self.locking_bytes = 256 << 10  # Page-locking so much takes long, and may wait for the device.
        self.strict = False  # torch.cuda.set_sync_debug_mode("error")
        self.crossed_bytes = {"down": 0, "up": 0}  # Bytes of copies from the device to the host, and to the device.

    @property
    def current(self) -> Queue:
        return getattr(self.here, "stream", self.default)

    @property
    def graph(self) -> Graph | None:
        """Return the graph that this thread captures."""
        return getattr(self.here, "graph", None)

    def run(self, work: Callable[[], object], queue: Queue | None = None) -> None:
        """Queue work on a stream, the current one by default."""
        if self.graph is not None:
            self.graph.work.append(work)
            return
        queue = queue or self.current
        with self.queues.lock:
            self.queues.put(queue, "run", work)
            if self.kind != "cuda":
                self.queues.finish(self.queues.mark(queue))
            else:
                self.queues.drift()

    def block(self, base: torch.Tensor) -> Block:
        """Make a block of this memory for the current stream."""
        block = self.memory.block(base, self.current)
        if self.graph is not None:
            self.graph.blocks.append(block)
        return block

    def wait(self, what: str, queue: Queue | None = None) -> None:
        """Let the host wait for a stream, and count it."""
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.kind == "cuda":
            self.waits.append(noted(what))
            if self.strict:
                raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        self.queues.finish(self.queues.mark(queue or self.current))

    def page_lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember fresh page-locked memory. It counts as a wait, except in a worker thread of trio."""
        is_worker = " from " in threading.current_thread().name
        if self.kind == "cuda" and tensor.nbytes >= self.locking_bytes and not is_worker:
            self.waits.append(noted("page-locking"))
        return self.pinned.add(tensor)

    def synchronize(self) -> None:
        with self.queues.lock:
            marks = [self.queues.mark(queue) for queue in self.queues.all if queue.name != "freed"]
        for mark in marks:
            self.queues.finish(mark)


def noted(what: str) -> Wait:
    frame, at, ours = sys._getframe(1), "", ""
    while frame is not None and not (at and ours):
        name, line = frame.f_code.co_filename, frame.f_lineno
        if not at and not name.startswith(MACHINERY):
            at = f"{name}:{line}"
        if not ours and name.startswith(OURS):
            ours = f"{name}:{line}"
        frame = frame.f_back
    return Wait(what, at, ours, threading.current_thread().name)
