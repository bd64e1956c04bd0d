"""Faults of this library: contained if they end one link or exchange, counted if they end the network side."""

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import trio

from gossip.errors import LocalError

MAX_LOGGED_PLACES = 64  # Distinct places that are logged, once each: an attacker could trigger faults all the time.
RESTARTS, WITHIN_S = 3, 600.0  # After this many restarts within this time the pauses before further ones are long.
SOON_S, LATER_S = 0.1, 60.0  # The short and the long pause before a restart.
MAX_CHARACTERS = 200  # Characters of an exception's text, which only the log shows.
MAX_FRAMES = 40  # Frames of a traceback: a recursion has a thousand.


class Faults:
    """The faults of one node. ``on_event`` logs them, without the exception's text, which may contain a peer's bytes.

    Attributes:
        count: Faults that ended a link or an exchange and nothing else.
        restarts: Faults that ended the network side, after each of which it restarts.
    """

    def __init__(self, on_event: Callable[[str, str], None]) -> None:
        self.on_event = on_event
        self.logged_places: set[str] = set()
        self.count = self.restarts = 0
        self._restarted_at: deque[float] = deque(maxlen=RESTARTS)

    def contain(self, error: BaseException, activity: str, consequence: str) -> None:
        """Count and log a fault in an activity, like "The page"; ``consequence`` is a clause that says what follows.

        A LocalError is for the user, and a cancellation or interrupt must not be stopped: both are raised again.
        """
        for leaf in leaf_errors(error):
            if isinstance(leaf, LocalError) or not isinstance(leaf, Exception):
                raise error
            self.count += 1
            place = place_of(leaf)
            if place not in self.logged_places and len(self.logged_places) < MAX_LOGGED_PLACES:
                self.logged_places.add(place)
                self.on_event(
                    "fault",
                    f"{activity} raised {type(leaf).__name__} in {place}, a fault of this library; {consequence}.",
                )

    def count_restart(self, now: float) -> float:
        """Count a fault that ended the network side.

        Args:
            now: Seconds on a monotonic clock.

        Returns:
            The seconds to wait before the restart: ``SOON_S``, or ``LATER_S`` after ``RESTARTS`` restarts within
                ``WITHIN_S``.
        """
        self.restarts += 1
        is_frequent = len(self._restarted_at) == RESTARTS and now - self._restarted_at[0] < WITHIN_S
        self._restarted_at.append(now)
        return LATER_S if is_frequent else SOON_S


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside the exception groups that nurseries make, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error


def first_cause(error: BaseException) -> BaseException:
    """Return the error on which the user can act.

    It is neither a nursery's group, nor trio's wrapper, nor a cancellation that accompanies the error. A LocalError is
    preferred to others.
    """
    leaves = list(leaf_errors(error))
    for kind in (LocalError, Exception, BaseException):
        cause = next((leaf for leaf in leaves if isinstance(leaf, kind)), None)
        if cause is not None:
            break
    assert cause is not None, "a group holds an error"
    if isinstance(cause, trio.TrioInternalError) and cause.__cause__:
        return first_cause(cause.__cause__)
    return cause


def place_of(error: BaseException) -> str:
    """Return the file and line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"


def trace_of(error: BaseException) -> str:
    """Return the traceback of an error, for the log. Its text is escaped, since a peer may have chosen it."""
    frames = "".join(traceback.format_tb(error.__traceback__)[-MAX_FRAMES:])
    return f"{frames}{type(error).__name__}: {str(error)[:MAX_CHARACTERS]!a}"


def report_to() -> str:
    """Return where to report faults, as a clause: the issue tracker of the installed package, if it names one."""
    try:
        urls = metadata.metadata("gossip-trainer").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    named_urls = (url.partition(",") for url in urls)  # "Issues, https://..."
    places = (f"at {url.strip()}" for name, _, url in named_urls if name.strip() == "Issues")
    return next(places, "to its maintainers")
