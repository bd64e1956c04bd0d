"""Who is told of events, in a thread of its own; and the events of late, for who asks."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from gossip.errors import ConfigError
from node.observe import notices
from node.observe.events import NodeEvent
from node.observe.notices import LEVELS

__all__ = ["Callback", "Listeners"]

KEPT = 1_024  # events that can be asked for: half a megabyte, and minutes of a busy node's exchanges
WAITING = 1_024  # that slow callbacks may be behind by, seconds of them; what comes on top is dropped

Callback = Callable[[NodeEvent], object]


@dataclass(slots=True, eq=False)
class Listener:
    kind: str
    callback: Callback
    told: bool = False  # that it raised

    def hears(self, event: NodeEvent) -> bool:
        return self.kind in ("*", event.kind) or event.kind.startswith(self.kind + ".")


class Listeners:
    """Of one node. Callbacks are called one after another in one thread, which begins with the first event that one is
    waiting for: neither the loop, which may stand, nor the network's thread, whose life must not hang on them, runs
    what is a program's. One that is slow holds up the others, and what is then too much is dropped and counted.
    ``node_id`` is who they are of, for logging."""

    def __init__(self, node_id: Callable[[], str]) -> None:
        self.node_id = node_id
        self.late: deque[NodeEvent] = deque(maxlen=KEPT)
        self.listeners: tuple[Listener, ...] = ()  # replaced whole: the network's thread reads it
        self.changing = threading.Lock()
        self.queue: SimpleQueue[tuple[NodeEvent, tuple[Listener, ...]] | None] = SimpleQueue()
        self.dropped = 0
        self.thread: threading.Thread | None = None

    def on(self, kind: str, callback: Callback) -> Callable[[], None]:
        """Call ``callback`` with every event of this kind, of those below it ("exchange"), or of all ("*"); returns
        what takes it back. Raises ConfigError for a kind that there is not, or what cannot be called."""
        kinds = {"*", *LEVELS, *(one.partition(".")[0] for one in LEVELS)}
        if kind not in kinds:
            raise ConfigError(f"There is no event {kind!r}; there are {', '.join(sorted(kinds))}.")
        if not callable(callback):
            raise ConfigError(f"The callback for {kind!r} is {callback!r}, which cannot be called.")
        one = Listener(kind, callback)
        with self.changing:
            self.listeners = (*self.listeners, one)

        def take_back() -> None:
            with self.changing:
                self.listeners = tuple(other for other in self.listeners if other is not one)

        return take_back

    def history(self) -> tuple[NodeEvent, ...]:
        """The last so many, newest last."""
        with self.changing:
            return tuple(self.late)

    # -- the network's thread ------------------------------------------------------------------------------------
    def post(self, event: NodeEvent) -> None:
        """Something happened. It waits for nobody, and raises nothing."""
        with self.changing:  # held by others for as long as a thousand references are copied
            self.late.append(event)
        if self.listeners:
            self.hand_on(event)

    def hand_on(self, event: NodeEvent) -> None:
        if self.queue.qsize() >= WAITING:
            self.dropped += 1
            if self.dropped == 1:
                text = "The callbacks of node.on are slower than what happens: events are dropped, and counted."
                notices.log(self.node_id(), "callback", text, True)
            return
        self.queue.put((event, self.listeners))
        if self.thread is None:
            with contextlib.suppress(RuntimeError):  # no thread can be had now; perhaps at the next event
                thread = threading.Thread(target=self.run, name="gossip-events", daemon=True)
                thread.start()
                self.thread = thread

    # -- the thread of its own -----------------------------------------------------------------------------------
    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            event, listeners = item
            for one in listeners:
                if one.hears(event) and one in self.listeners:
                    self.call(one, event)

    def call(self, one: Listener, event: NodeEvent) -> None:
        try:
            one.callback(event)
        except BaseException as error:  # SystemExit too: it is this thread's alone
            if not one.told:
                one.told = True
                text = f"The callback of node.on for {one.kind!r} raised, and is called again."
                notices.log(self.node_id(), "callback", text, True, error)

    def close(self, within_s: float) -> None:
        """What happened until now is still told, as far as that takes no longer. May be called from a callback."""
        self.queue.put(None)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(within_s)
