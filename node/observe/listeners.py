"""Event listeners, which are called in a thread of their own, and a history of recent events."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from gossip.errors import ConfigError, did_you_mean
from node.observe import notices
from node.observe.events import NodeEvent
from node.observe.notices import LEVELS

MAX_HISTORY = 1_024  # Events in the history: half a megabyte, and minutes of a busy node's exchanges.
MAX_QUEUED_EVENTS = 1_024  # Events queued for slow callbacks, some seconds' worth; further ones are dropped.

Callback = Callable[[NodeEvent], object]


@dataclass(slots=True, eq=False)
class Listener:
    """A program's callback for the events of a kind, of a group of kinds, or of all ("*")."""

    kind: str
    callback: Callback
    is_failure_logged: bool = False  # An exception of the callback has been logged.

    def matches(self, event: NodeEvent) -> bool:
        return self.kind in ("*", event.kind) or event.kind.startswith(self.kind + ".")


class Listeners:
    """The event listeners of one node.

    Callbacks run one after another in one thread, which starts with the first event that has a listener. Neither the
    loop, which may stall, nor the network thread, which must survive, runs a program's code. A slow callback delays the
    others; events beyond the queue are dropped and counted. ``node_id`` returns the node's id, for logging.
    """

    def __init__(self, node_id: Callable[[], str]) -> None:
        self.node_id = node_id
        self.recent_events: deque[NodeEvent] = deque(maxlen=MAX_HISTORY)
        self.listeners: tuple[Listener, ...] = ()  # Replaced whole, because the network thread reads it.
        self.lock = threading.Lock()
        # Events, each with the listeners at its time; None ends the thread.
        self.queue: SimpleQueue[tuple[NodeEvent, tuple[Listener, ...]] | None] = SimpleQueue()
        self.dropped = 0  # The number of events that were dropped.
        self.thread: threading.Thread | None = None  # None before the first event that has a listener.

    def on(self, kind: str, callback: Callback) -> Callable[[], None]:
        """Call ``callback`` for each event of a kind, of a group of kinds ("exchange"), or of all ("*").

        Returns:
            A function that removes the callback.

        Raises:
            ConfigError: There is no such kind, or the callback cannot be called.
        """
        kinds = {"*", *LEVELS, *(name.partition(".")[0] for name in LEVELS)}
        if not isinstance(kind, str) or kind not in kinds:
            raise ConfigError(
                f"There is no event {kind!r}{did_you_mean(kind, kinds)}; there are {', '.join(sorted(kinds))}."
            )
        if not callable(callback):
            raise ConfigError(f"The callback for {kind!r} is {callback!r}, which cannot be called.")
        listener = Listener(kind, callback)
        with self.lock:
            self.listeners = (*self.listeners, listener)

        def remove() -> None:
            with self.lock:
                self.listeners = tuple(other for other in self.listeners if other is not listener)

        return remove

    def history(self) -> tuple[NodeEvent, ...]:
        """Return recent events, newest last."""
        with self.lock:
            return tuple(self.recent_events)

    # -- the network's thread ------------------------------------------------------------------------------------
    def post(self, event: NodeEvent) -> None:
        """Record an event and queue it for listeners. Never waits and never raises."""
        with self.lock:  # Others hold it only while they copy a thousand references.
            self.recent_events.append(event)
        if self.listeners:
            self.queue_event(event)

    def queue_event(self, event: NodeEvent) -> None:
        """Queue an event for listeners, whose thread starts with the first one; drop it if the queue is full."""
        if self.queue.qsize() >= MAX_QUEUED_EVENTS:
            self.dropped += 1
            if self.dropped == 1:
                text = "The callbacks of node.on are too slow: events are dropped, and counted."
                notices.log(self.node_id(), "callback", text, True)
            return
        self.queue.put((event, self.listeners))
        if self.thread is None:
            with contextlib.suppress(RuntimeError):  # No thread can be started now; try again at the next event.
                thread = threading.Thread(target=self.call_listeners, name="gossip-events", daemon=True)
                thread.start()
                self.thread = thread

    # -- the thread of its own -----------------------------------------------------------------------------------
    def call_listeners(self) -> None:
        while (item := self.queue.get()) is not None:
            event, listeners = item
            for listener in listeners:
                if listener.matches(event) and listener in self.listeners:  # It may have been removed since.
                    self.call_back(listener, event)

    def call_back(self, listener: Listener, event: NodeEvent) -> None:
        try:
            listener.callback(event)
        except BaseException as error:  # SystemExit too: it would end this thread alone.
            if not listener.is_failure_logged:
                listener.is_failure_logged = True
                text = f"The callback of node.on for {listener.kind!r} raised, and is called again."
                notices.log(self.node_id(), "callback", text, True, error)

    def close(self, within_s: float) -> None:
        """Deliver the events so far, waiting at most ``within_s`` seconds. May be called from a callback."""
        self.queue.put(None)  # The thread ends at it.
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(within_s)
