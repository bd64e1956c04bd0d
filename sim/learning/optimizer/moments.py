"""The optimizer's moments of simulated peers: which they mix, and how, with the arithmetic of real nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gossip.arithmetic.moments import MomentForm
from gossip.averaging.vectors import REACH, Floats, Moments, Vector
from sim.arrays import F32, I64


@dataclass(frozen=True, slots=True)
class MomentPlan:
    """The moments of all peers' optimizers.

    Attributes:
        form: Their form.
        arrays: The optimizer's state tensors, float32 (peers, elements).
        tensors: For each parameter of the model its first element, the element behind its last, and for each moment the
            array that holds it, None if the parameter has none.
    """

    form: MomentForm
    arrays: Sequence[Floats]
    tensors: Sequence[tuple[int, int, tuple[int | None, ...]]]

    def of_row(self, row: int) -> RowMoments:
        """Return the moments of one peer, which are views of the arrays."""
        return RowMoments(self, [array[row] for array in self.arrays])


class RowMoments:
    """The moments of one peer; ``arrays`` are the optimizer's state tensors, float32 (elements,) each."""

    __slots__ = ("arrays", "form", "tensors")

    def __init__(self, plan: MomentPlan, arrays: Sequence[Floats]) -> None:
        self.form, self.tensors, self.arrays = plan.form, plan.tensors, arrays

    def read(self, rows: Floats, start: int, stop: int) -> None:
        """Set the row of each moment to its elements [start, stop)."""
        for first, last, places in self.tensors:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                for row, place in zip(rows, places, strict=True):
                    row[begin - start : end - start] = 0.0 if place is None else self.arrays[place][begin:end]

    def mix(self, moments: Moments) -> None:
        """Mix a partner's moments, by the rule of :class:`Moments`."""
        for first, last, places in self.tensors:
            begin, end = max(first, moments.start), min(last, moments.stop)
            if begin < end:
                own = [None if place is None else self.arrays[place][begin:end] for place in places]
                mix_tensor(own, moments.rows[:, begin - moments.start : end - moments.start])


class MomentMixer:
    """The moments of all peers at the fast level: after an exchange each side mixes a part of its partner's.

    A real node fetches the part after the exchange. Here it is that of the partner's snapshot, which is a step or two
    older, and its stream takes no time; its bytes count.
    """

    def __init__(self, plan: MomentPlan, peers: int) -> None:
        self.plan, self.form = plan, plan.form
        self.next_start = [0] * peers  # The first element of each peer's next part.
        self.parts = self.encoded_bytes = 0  # The number of all parts so far, and their bytes.

    def copies(self, rows: I64) -> list[F32]:
        """Return a copy of these rows of the optimizer's state tensors, float32 (rows, elements) each."""
        return [array[rows] for array in self.plan.arrays]

    def mix(self, row: int, partners: Sequence[F32], seed: int, interval_steps: int) -> None:
        """Mix the next part of a partner's moments into a row.

        Args:
            row: The row.
            partners: The partner's state tensors, float32 (elements,) each.
            seed: The seed of the codecs' dither.
            interval_steps: The row's local steps from one mix to the next.
        """
        form = self.form
        start, stop = form.next_part(self.next_start[row], interval_steps)
        sent = np.zeros(form.vector_elements(stop - start), np.float32)
        RowMoments(self.plan, partners).read(form.split(sent)[0], start, stop)
        if not form.encode(sent):
            return  # The partner has diverged.
        codec, vector = form.codec(stop - start), np.empty_like(sent)
        codec.quantised(sent, vector, seed)
        self.parts += 1
        self.encoded_bytes += codec.encoded_bytes(vector.size)
        if form.decode(vector):
            self.plan.of_row(row).mix(Moments(Vector(vector), form, start, stop))
            self.next_start[row] = stop


def mix_tensor(own: Sequence[Floats | None], theirs: Floats) -> None:
    """Mix into the moments of one tensor, in place; None is a moment that it lacks."""
    for values, target in zip(own, theirs, strict=True):
        if values is not None:
            limit = np.float32(REACH) * np.abs(values).max()
            values += np.clip(target, -limit, limit)
            values *= np.float32(0.5)
