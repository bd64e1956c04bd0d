"""A live model as one flat vector, its backup, and a pool of vectors: what a step boundary and an averager need.

The classes implement the protocols of :mod:`gossip.averaging.model` and :mod:`gossip.averaging.vectors`, which define
the methods.
"""

from collections.abc import Callable

import numpy as np

from gossip.arithmetic.mixing import subtract
from gossip.arithmetic.moments import MomentForm
from gossip.averaging.vectors import REACH, Cut, Floats, Moments, Positions, Statistics, Vector
from sim.learning.optimizer.moments import RowMoments

__all__ = ["Floats", "HostVectors", "KeptVector", "VectorModel"]


class VectorModel:
    """A flat float32 model. Its optimizer has ``moments``, if these are mixed; newcomers take no other state of it."""

    finite = None  # Reads are never checked for values that are not finite.
    adds_weighted = False  # Differences come multiplied by their weight.

    def __init__(self, vector: Floats, moments: RowMoments | None = None) -> None:
        self.vector, self.moments = vector, moments

    def size(self) -> int:
        return self.vector.size

    def tensor_at(self, position: int) -> str:
        return ""

    def optimizer_range(self) -> range:
        return range(self.vector.size, self.vector.size)

    def begin_read(self, out: Floats) -> None:
        out[:] = self.vector

    def begin_read_optimizer(self, out: Floats, start: int) -> None:
        assert not out.size, "simulated peers have no optimizer state to share"

    def begin_read_moments(self, rows: Floats, form: MomentForm, start: int, stop: int) -> None:
        assert self.moments is not None, "the peer mixes no moments"
        self.moments.read(rows, start, stop)

    def mix_moments(self, moments: Moments) -> None:
        assert self.moments is not None, "the peer mixes no moments"
        self.moments.mix(moments)

    def begin_read_at(self, out: Floats, positions: Positions) -> None:
        out[:] = self.vector[positions]

    def begin_read_piece(self, out: Floats, start: int) -> None:
        out[:] = self.vector[start : start + out.size]

    read_frozen = begin_read_piece

    def add(self, values: Floats) -> None:
        self.vector += values

    def mix_statistics(self, statistics: Statistics) -> None:
        """Mix as real nodes do, but with one reach for all statistics, since their tensors are unknown here."""
        live = self.vector[statistics.start :]
        peak = np.abs(live).max()
        reach = np.float32(REACH) * peak if peak else np.float32(1.0)
        near = np.clip(statistics.values, live - reach, live + reach)
        weight = np.float32(statistics.weight)
        mixed = (np.float32(1.0) - weight) * live + weight * near
        live[:] = np.where(np.isnan(near), live, mixed)

    def add_weighted(self, values: Floats, weight: float) -> None:
        self.vector += np.float32(weight) * values

    def add_read(self, values: Floats, weight: float) -> bool:
        self.vector += values if weight == 1.0 else np.float32(weight) * values
        values[:] = self.vector
        return True

    def add_at(self, values: Floats, positions: Positions) -> None:
        self.vector[positions] += values

    def merge(self, vector: Floats, ratio: float) -> None:
        self.vector += np.float32(ratio) * (vector - self.vector)

    def begin_upload(self, values: Floats) -> None:
        """Return None: the model lies on the host."""

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        self.vector[:] = vector

    adopt_exchanged = adopt  # Nothing is frozen.


class KeptVector:
    """A backup of the weights while another run's weights are on trial; ``backup`` is None when there is no trial."""

    def __init__(self, vector: Floats) -> None:
        self.vector, self.why_not = vector, ""  # A backup never fails here, so there is no reason to state.
        self.backup: Floats | None = None

    @property
    def holds(self) -> bool:
        return self.backup is not None

    def keep(self) -> bool:
        self.backup = self.vector.copy()
        return True

    def distance(self, theirs: Floats) -> tuple[float, float]:
        backup = self.backup
        assert backup is not None
        return subtract(theirs, backup, np.empty_like(backup))

    def put_back(self) -> Floats:
        assert self.backup is not None
        self.vector[:], self.backup = self.backup, None
        return self.vector

    def forget(self) -> None:
        self.backup = None


class HostVectors:
    """A vector pool that allocates fresh arrays and keeps none.

    :meth:`take_last_snapshot` copies the model instead, by ``copy_model``, which returns None if it is too late.
    """

    def __init__(self, copy_model: Callable[[], Floats | None]) -> None:
        self.copy_model = copy_model

    def take(self, elements: int) -> Vector:
        return Vector(np.empty(elements, np.float32))

    def take_scratch(self, elements: int) -> Vector:
        return self.take(elements)

    def has_free(self, elements: int, cut: Cut | None = None) -> bool:
        return True

    def reserve(self, elements: int, cut: Cut | None = None) -> None:
        """Do nothing: memory is always at hand."""

    def take_transient(self, elements: int) -> Vector:
        return Vector(np.empty(elements, np.float32), is_transient=True)

    def take_mapped(self, elements: int) -> Vector:
        return Vector.mapped(elements)

    def give(self, vector: Vector) -> None:
        """Do nothing: Python frees the array."""

    def keep_snapshot(self, vector: Vector) -> None:
        """Do nothing: the model itself can be copied later."""

    def take_last_snapshot(self) -> Vector | None:
        copy = self.copy_model()
        return None if copy is None else Vector(copy)

    def forget_snapshot(self) -> None:
        """Do nothing: no vector is kept."""
