"""The interfaces behind a step boundary: the live weights, their backup, and copies in progress."""

from abc import abstractmethod
from typing import Protocol

from gossip.arithmetic.moments import MomentForm
from gossip.averaging.vectors import Floats, Moments, Positions, Statistics


class Pending(Protocol):
    """A copy in progress. Implementations inherit from this class, and so state only what differs from its defaults.

    Until the copy is done, its target must not be read and its source must not be written. If the copy
    :attr:`is_narrow`, its target must not be read until :meth:`widen` has returned either.
    """

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Return True if the copy has ended, whatever it brought."""

    @property
    def finite(self) -> bool | None:
        """Return True if a finished copy brought finite values only; None if they were not checked."""
        return None

    @property
    def torn(self) -> bool:
        """Return True if the weights changed during a finished copy, which is of no use then."""
        return False

    @property
    def failure(self) -> str:
        """Return the reason why a finished copy holds no weights, or an empty text."""
        return ""

    @property
    def is_narrow(self) -> bool:
        """Return True if the copy has brought, or will bring, half-precision values that are still to be widened."""
        return False

    def widen(self) -> None:
        """Widen the half-precision values of a finished copy, if any. That takes as long as a copy of its target."""
        return


class Upload(Pending, Protocol):
    """An update's values on their way to the model's device. Once they are there, applying them does not wait."""

    __slots__ = ()

    def add(self) -> Pending | None:
        """Begin ``weights += values``."""

    def merge(self, ratio: float) -> Pending | None:
        """Begin ``weights += ratio (values - weights)``."""


class Model(Protocol):
    """The live weights, and the optimizer's state behind them, which only the training loop changes.

    Methods return None if the copy is done already, or if there is nothing to do. They raise MemoryError if the model's
    device has no memory for the copy; nothing has changed then. Frozen weights, which no exchange
    carries, lie behind the others.
    """

    @property
    def finite(self) -> bool | None:
        """Return True if all values of the last read were finite, None if they were not checked."""

    @property
    def adds_weighted(self) -> bool:
        """Return True if a difference may come with its weight, which then costs no extra pass."""

    def size(self) -> int:
        """Return the number of weights that exchanges carry."""

    def tensor_at(self, position: int) -> str:
        """Return the name of the tensor of this position in the vector; empty if tensors have no names."""

    def optimizer_range(self) -> range:
        """Return the range of the optimizer's state, behind all weights, in the vector that newcomers take."""

    def begin_read(self, out: Floats) -> Pending | None:
        """Begin ``out[:] = weights``."""

    def begin_read_optimizer(self, out: Floats, start: int) -> Pending | None:
        """Begin to set ``out[:]`` to optimizer state, from position ``start`` of the vector that newcomers take."""

    def begin_read_moments(self, rows: Floats, form: MomentForm, start: int, stop: int) -> Pending | None:
        """Begin to set the row of each moment to its elements [start, stop), and the rest of the row to 0."""

    def mix_moments(self, moments: Moments) -> Pending | None:
        """Move the optimizer's moments towards a partner's, unless the optimizer's moments have another form by now."""

    def begin_read_piece(self, out: Floats, start: int) -> Pending | None:
        """Begin to set ``out[:]`` to the weights from ``start`` on, none of them frozen."""

    def begin_read_at(self, out: Floats, positions: Positions) -> Pending | None:
        """Begin ``out[:] = weights[positions]``."""

    def read_frozen(self, out: Floats, start: int) -> None:
        """Set ``out[:]`` to the frozen weights from ``start`` on. Any thread may call this."""

    def add(self, values: Floats) -> Pending | None:
        """Begin ``weights += values``."""

    def mix_statistics(self, statistics: Statistics) -> Pending | None:
        """Begin to move the live statistics towards a partner's (:mod:`gossip.averaging.vectors`)."""

    def add_weighted(self, values: Floats, weight: float) -> Pending | None:
        """Begin ``weights += weight values``, if the model :attr:`adds_weighted`; ``values`` may be overwritten."""

    def add_read(self, values: Floats, weight: float) -> bool:
        """Add ``weight values``, then set ``values[:] = weights``, in one pass; if impossible, only return False."""

    def add_at(self, values: Floats, positions: Positions) -> Pending | None:
        """Begin ``weights[positions] += values``."""

    def merge(self, vector: Floats, ratio: float) -> Pending | None:
        """Begin ``weights += ratio (vector - weights)``; ``vector`` may be overwritten."""

    def begin_upload(self, values: Floats) -> Upload | None:
        """Begin to bring an update of all elements to the model's device. Any thread may call this.

        Return None if the model has no device of its own, or no memory there.
        """

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """Overwrite the weights, and the optimizer's state if this optimizer keeps these keys."""

    def adopt_exchanged(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """Overwrite as :meth:`adopt`, but leave the frozen weights, whose place in ``vector`` may hold anything."""


class Backup(Protocol):
    """A backup of the weights while others are on trial."""

    why_not: str

    @property
    def holds(self) -> bool:
        """Return True if there is a backup."""

    def keep(self) -> bool:
        """Back up the weights. Return False, with the reason in ``why_not``, if that is not possible."""

    def distance(self, theirs: Floats) -> tuple[float, float]:
        """Return ``|theirs - kept|^2`` and ``|kept|^2``."""

    def put_back(self) -> Floats:
        """Overwrite the live weights with the backup, and return it."""

    def forget(self) -> None:
        """Discard the backup."""
