"""^C during a simulation, deferred to the end of an event so that the figures of the partial result agree."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Interrupt", "interrupt"]


class Interrupt:
    """The pending ^C of this process."""

    def __init__(self) -> None:
        self.is_pending = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let ^C set :attr:`is_pending` inside the ``with`` block; a second ^C raises KeyboardInterrupt at once.

        Only the main thread may set handlers, and only signals that would raise KeyboardInterrupt are deferred.
        """
        deferred = list[signal.Signals]()
        if threading.current_thread() is threading.main_thread():
            deferred = [
                number for number in (signal.SIGINT, signal.SIGTERM)
                if signal.getsignal(number) is signal.default_int_handler
            ]  # fmt: skip
        self.is_pending = False
        for number in deferred:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in deferred:
                signal.signal(number, signal.default_int_handler)
            self.is_pending = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if ^C is pending."""
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt

    def _on_signal(self, *_: object) -> None:
        if self.is_pending:
            raise KeyboardInterrupt
        self.is_pending = True


interrupt = Interrupt()
