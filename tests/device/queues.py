"""Streams as queues of work that runs late, in any order that their events allow."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], object]
MOST_PENDING = 200  # Pieces of work on all streams: beyond, the device catches up, as a real one's queue is bounded.


@dataclass(slots=True, eq=False)
class Mark:
    """A place in a queue, as an event records it."""

    done: bool = False
    at_s: float = 0.0  # When it was reached.


@dataclass(slots=True, eq=False)
class Queue:
    """The pending work of one stream, the oldest first: work to do, a mark to set, or a mark to wait for."""

    name: str
    pending: deque[tuple[str, object]] = field(default_factory=deque)

    @property
    def ready(self) -> bool:
        """Return True if the oldest piece of work can run now."""
        if not self.pending:
            return False
        kind, what = self.pending[0]
        return kind != "wait" or what.done


class Queues:
    """All streams of a device. A seed decides which of the possible orders happens.

    Args:
        seed: Seeds the order.
        pace: How often a piece of work runs when another one is queued, 0 to 1: less is later.
    """

    def __init__(self, seed: int, pace: float = 0.7) -> None:
        self.random, self.pace = random.Random(seed), pace
        self.lock = threading.RLock()
        self.all: list[Queue] = []

    def new(self, name: str) -> Queue:
        with self.lock:
            queue = Queue(name)
            self.all.append(queue)
            return queue

    def put(self, queue: Queue, kind: str, what: object) -> None:
        with self.lock:
            queue.pending.append((kind, what))

    def mark(self, queue: Queue) -> Mark:
        mark = Mark()
        self.put(queue, "mark", mark)
        return mark

    def drift(self) -> None:
        """Let some work happen, as it does while the host does something else."""
        with self.lock:
            while self.random.random() < self.pace and self.run_one():
                """Go on."""
            while sum(len(queue.pending) for queue in self.all) > MOST_PENDING:
                self.run_one()

    def finish(self, mark: Mark) -> None:
        """Run work until this place is reached. Streams that it does not wait for advance at random."""
        with self.lock:
            while not mark.done:
                assert self.run_one(), "the streams wait for each other"

    def run_one(self) -> bool:
        """Run the oldest piece of work of a random stream. Return False if there is none."""
        ready = [queue for queue in self.all if queue.ready]
        if not ready:
            return False
        queue = self.random.choice(ready)
        kind, what = queue.pending.popleft()
        if queue.name == "freed" and not queue.pending:
            self.all.remove(queue)
        if kind == "mark":
            what.done, what.at_s = True, time.time()
        elif kind == "run":
            what()
        return True
