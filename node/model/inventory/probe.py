"""A probe that notices mixes which the next local step undoes, as an optimizer does that keeps the weights itself."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from node.model.scalars import HostCopy, beside, largest
from node.model.tensors import local_part

SAMPLED_ELEMENTS = 16  # Elements of each followed tensor: an optimizer undoes all of one kind alike.
MAX_TENSORS = 4  # Tensors that are followed: the largest of each kind.
MIXES = 32  # Mixes of one verdict.
# A copy of the weights takes back all of a mix at the next step. An ordinary step takes back any share, of either sign;
# one towards the optimum of a node's own data a half, if the nodes mix at every second step.
UNDONE_SHARE = 0.6
UNDONE_MIXES = 0.85  # Of a verdict's mixes, those of which the next step takes back more than this share.
# So nearly all is never taken back by ordinary steps, which a few mixes show: a short run has no more.
FEW_MIXES, WHOLE_SHARE = 8, (0.9, 1.1)
MAX_STEP = 2.0  # Length of the longest step that counts, as a multiple of the mix's: a longer one hides its share.
MAX_VERDICTS = 4  # Then the program has shown what it does.


class MixProbe:
    """The displacements of the last mixes, and how much of each the next step has taken back.

    It costs some 20 us a mix for each tensor that it follows.

    Args:
        tensors: Returns the live tensors that are mixed.
        kinds: Returns the kind of each of these tensors: an optimizer may keep copies of one kind alone.
    """

    def __init__(
        self, tensors: Callable[[], Sequence[Tensor]], kinds: Callable[[Sequence[Tensor]], Sequence[Hashable]]
    ) -> None:
        self._tensors, self._kinds = tensors, kinds
        self._places: list[int] = []  # The indices of the largest tensors of each kind.
        self._before: list[Tensor] = []  # The samples before the first mix since the last step.
        self._after: list[Tensor] | None = None  # Those just after the last mix whose next step is awaited.
        self._shares: list[list[Tensor]] = []  # Of each mix and tensor. They stay on the device until a verdict.
        self._verdict: HostCopy | None = None  # Which part of some mixes is undone, on its way from the device.
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
        is_noted = self._after is not None  # Of several between two steps, as in settling, the sum counts.
        with suppress(torch.OutOfMemoryError):
            self._before = self._before if is_noted else self.sample()
            is_noted = True
        yield
        if is_noted:
            with suppress(torch.OutOfMemoryError):
                self._after = self.sample()

    def on_step(self) -> bool:
        """Look at the weights after the step that follows a mix. Return True if mixes turn out to be undone."""
        if self._verdict is not None and self._verdict.done():
            verdict, self._verdict = self._verdict, None
            if verdict.values > UNDONE_MIXES:
                self.verdicts = MAX_VERDICTS
                return True
        after, self._after = self._after, None
        if after is None:
            return False
        now = self.sample()
        before, after = beside(self._before, now), beside(after, now)
        displacement = [mixed - then for mixed, then in zip(after, before, strict=True)]
        moved = [late - then for late, then in zip(now, after, strict=True)]
        self._shares.append([
            # NaN if nothing was mixed, or if the step is so much longer than the mix that the share says nothing.
            torch.where(step.dot(step) <= MAX_STEP**2 * mix.dot(mix), -step.dot(mix) / mix.dot(mix), math.nan)
            for step, mix in zip(moved, displacement, strict=True)
        ])  # fmt: skip
        if len(self._shares) % FEW_MIXES == 0:
            is_last = len(self._shares) == MIXES
            low, high = (UNDONE_SHARE, math.inf) if is_last else WHOLE_SHARE
            parts = [undone_part(shares, low, high) for shares in zip(*self._shares, strict=True)]
            self._shares, self._verdict = [] if is_last else self._shares, HostCopy(largest(parts))
            self.verdicts += is_last
        return False

    @torch.no_grad()
    def sample(self) -> list[Tensor]:
        """Return copies of some elements of the largest tensor of each kind, float32 on their devices."""
        tensors = self._tensors()
        if not self._places:
            kinds = self._kinds(tensors)
            by_size = sorted(range(len(tensors)), key=lambda index: tensors[index].numel())
            self._places = sorted({kinds[index]: index for index in by_size}.values())[:MAX_TENSORS]
        flat = [local_part(tensors[place]).detach().reshape(-1) for place in self._places]
        return [each[:: max(1, -(-each.numel() // SAMPLED_ELEMENTS))].float().clone() for each in flat]


def undone_part(each: Sequence[Tensor], low: float, high: float) -> Tensor:
    """Return the part of the counted mixes of which such a share was undone, 0 if less than half of all count."""
    shares = torch.stack([share.to(each[-1].device) for share in each])
    counted = shares.isfinite().sum()
    return torch.where(2 * counted >= len(shares), ((shares > low) & (shares < high)).sum() / counted, 0.0)
