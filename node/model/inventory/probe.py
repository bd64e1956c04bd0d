"""A probe that notices mixes which the next local step undoes, as an optimizer does that keeps the weights itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from node.model.inventory.examples import DeviceScalars, ScalarCopy

__all__ = ["MixProbe"]

SAMPLED_ELEMENTS = 16  # Elements of the largest tensor that are followed: an optimizer undoes all alike.
MIXES = 16  # Mixes of one verdict. One alone could be undone by chance.
# Of the displacement of a mix, the share that the next step takes back. A step towards the optimum of a node's own data
# takes back a few percent, and a copy of the weights all of it.
UNDONE_SHARE = 0.8
MAX_VERDICTS = 4  # Then the program has shown what it does.


class MixProbe:
    """The displacements of the last mixes, and how much of each the next step has taken back. Costs some 20 us a mix.

    Args:
        tensors: Returns the live tensors that are mixed.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        self._tensors = tensors
        self._place: int | None = None  # The index of the largest tensor.
        self._displacement: Tensor | None = None
        self._after: Tensor | None = None  # The sample just after a mix whose next step is awaited.
        self._shares: list[Tensor] = []  # They stay on the device until a verdict.
        self._verdict: ScalarCopy | None = None  # The median share of some mixes, on its way from the device.
        self.verdicts = 0

    @property
    def is_waiting(self) -> bool:
        """Return True if the next step is to be looked at."""
        return self._after is not None or self._verdict is not None

    @contextmanager
    def mixing(self) -> Iterator[None]:
        """Note the displacement of the weights inside the block."""
        if self.verdicts >= MAX_VERDICTS:
            yield
            return
        before = None
        with suppress(torch.OutOfMemoryError):
            before = self.sample() if self._after is None else None  # Of several at one boundary, the first counts.
        yield
        if before is not None:
            with suppress(torch.OutOfMemoryError):
                after = self.sample()
                self._displacement = after - before
                self._after = after

    def on_step(self) -> bool:
        """Look at the weights after the step that follows a mix. Return True if mixes turn out to be undone."""
        if self._verdict is not None and self._verdict.done():
            verdict, self._verdict = self._verdict, None
            self.verdicts += 1
            if verdict.scalars()["undone"] > UNDONE_SHARE:
                self.verdicts = MAX_VERDICTS
                return True
        after, displacement = self._after, self._displacement
        self._after = None
        if after is None or displacement is None:
            return False
        length_sq = displacement.dot(displacement)
        self._shares.append(-(self.sample() - after).dot(displacement) / length_sq)  # NaN if nothing was mixed.
        if len(self._shares) == MIXES:
            median = torch.stack(self._shares).nanmedian().reshape(1)
            self._shares, self._verdict = [], ScalarCopy(DeviceScalars(("undone",), median))
        return False

    @torch.no_grad()
    def sample(self) -> Tensor:
        """Return a copy of some elements of the largest tensor, float32 on its device."""
        tensors = self._tensors()
        if self._place is None:
            self._place = max(range(len(tensors)), key=lambda index: tensors[index].numel())
        flat = tensors[self._place].detach().reshape(-1)
        return flat[:: max(1, -(-flat.numel() // SAMPLED_ELEMENTS))].float().clone()
