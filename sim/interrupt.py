"""^C and other ending signals during a simulation, deferred to the end of an event, so that a partial result agrees."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # Signals that may end a simulation.


class Interrupt:
    """The interrupt of this process: ^C, or a signal that ends it as ^C does."""

    def __init__(self) -> None:
        self.is_pending = False
        self.number: int = signal.SIGINT  # The signal that came last.

    @property
    def exit_code(self) -> int:
        """Return the exit code of a command that was interrupted, as of a shell: 130 after ^C."""
        return 128 + self.number

    @contextmanager
    def ending_on(self, *numbers: signal.Signals) -> Iterator[None]:
        """Let these signals raise KeyboardInterrupt, as ^C does, inside the ``with`` block or the decorated function.

        A signal that is ignored (nohup) or that has a handler keeps it, and so do all outside the main thread.
        """
        self.number = signal.SIGINT
        with self._handling([number for number in numbers if signal.getsignal(number) is signal.SIG_DFL], self._raise):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let ^C set :attr:`is_pending` inside the ``with`` block; a second one raises KeyboardInterrupt at once.

        Only signals that would raise KeyboardInterrupt are deferred.
        """
        ours = signal.default_int_handler, self._raise
        self.is_pending = False
        with self._handling([number for number in SIGNALS if signal.getsignal(number) in ours], self._note):
            try:
                yield
            finally:
                self.is_pending = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if ^C is pending."""
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt

    @contextmanager
    def _handling(self, numbers: list[signal.Signals], handler: Handler) -> Iterator[None]:
        """Give signals another handler for a while; only the main thread may."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, handler) for number in numbers if is_main}
        try:
            yield
        finally:
            for number, usual in before.items():
                signal.signal(number, usual)

    def _raise(self, number: int, _: FrameType | None) -> None:
        self.number = number
        raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            self._raise(number, frame)
        self.is_pending, self.number = True, number


interrupt = Interrupt()
