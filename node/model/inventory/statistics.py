"""The live statistics of a model, moved towards a partner's without waiting for their device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gossip.averaging.vectors import REACH, Statistics

ROUNDING = 1e-4  # By which the length of a vector of length 1 may differ.


class StatisticsMixer:
    """The statistics of one model: which of their elements local steps change, and their mixing.

    :mod:`gossip.averaging.vectors` has the rule.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None  # The values that the last mix left, flat.
        self._anchor: Tensor | None = None  # The values that the last local step left.
        self._directions: list[int] = []  # The places of vectors of length 1, as those of spectral normalisation.
        self._varies: Tensor | None = None  # For each element, whether local steps have changed it: bool (elements,).

    @torch.no_grad()
    def begin(self, live: Sequence[Tensor]) -> None:
        """Note the values that are there at the start, or that others have just written: no local step made them."""
        self._last = self._anchor = flat(live)
        self._directions = [
            place for place, tensor in enumerate(live)
            if tensor.dim() == 1 and tensor.numel() > 1 and abs(float(vector_norm(tensor)) - 1) < ROUNDING
        ]  # fmt: skip

    @torch.no_grad()
    def shift(self, live: Sequence[Tensor], statistics: Statistics) -> Tensor:
        """Return the shift of all statistics, flat float32 on their device, and count it as made."""
        now = flat(live)
        shift = self._mixed(now, live, statistics, torch.from_numpy(statistics.values).to(now.device)) - now
        self._last = now + shift
        return shift

    @torch.no_grad()
    def mix(self, live: Sequence[Tensor], statistics: Statistics, values: Tensor) -> None:
        """Move the live statistics, which stay between their own and the partner's values.

        ``values`` are those of ``statistics`` on the device of the live ones.
        """
        now = flat(live)
        self._last = self._mixed(now, live, statistics, values)
        parts = torch.split(self._last, [tensor.numel() for tensor in live])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, live, strict=True)]
        with self.keeping(live):
            torch._foreach_copy_(list(live), views)

    @contextmanager
    def keeping(self, live: Sequence[Tensor]) -> Iterator[None]:
        """Keep float64 constants as they are if they are written in this block as the float32 that they round to."""
        before = {place: tensor.clone() for place, tensor in enumerate(live) if tensor.dtype == torch.float64}
        yield
        for place, old in before.items():
            tensor, is_kept = live[place], old.float() == live[place]
            if self._varies is not None:
                varies = torch.split(self._varies, [each.numel() for each in live])[place]
                is_kept &= ~varies.view(tensor.shape).to(tensor.device)
            tensor.copy_(torch.where(is_kept, old, tensor))

    def _mixed(self, now: Tensor, live: Sequence[Tensor], statistics: Statistics, target: Tensor) -> Tensor:
        """Return the mixed statistics, flat; ``now`` are the live ones."""
        if self._varies is None or self._varies.numel() != now.numel():
            self._varies = torch.zeros_like(now, dtype=torch.bool)
        if self._last is None or self._anchor is None or self._last.numel() != now.numel():
            self._last = self._anchor = now
        # The program may have moved the model to another device.
        varies, last, anchor = (each.to(now.device) for each in (self._varies, self._last, self._anchor))
        changed = now != last
        self._varies = varies | changed
        anchor = self._anchor = torch.where(changed.any(), now, anchor)
        # The largest element of each tensor, spread over its elements.
        peaks = torch.cat([
            part.abs().amax().expand(part.numel()) if part.numel() else part
            for part in torch.split(anchor, [tensor.numel() for tensor in live])
        ])  # fmt: skip
        reach = torch.where(peaks > 0, REACH * peaks, 1.0)
        moves = (self._varies | statistics.moves_all) & ~target.isnan()
        # Both sides of a pair with equal weights get the same bits: w x + w p, and not x + w (p - x).
        near = torch.minimum(torch.maximum(target, anchor - reach), anchor + reach)
        mixed = torch.where(moves, (1.0 - statistics.weight) * now + statistics.weight * near, now)
        parts = [torch.split(each, [tensor.numel() for tensor in live]) for each in (mixed, now, target)]
        for place in self._directions:  # The mean of two is shorter: it gets their length, unless they are opposite.
            length, own = vector_norm(parts[0][place]), vector_norm(parts[1][place])
            is_short = (length > 0.5) & (length < 1 - ROUNDING) & ((own - 1).abs() < ROUNDING)
            parts[0][place].div_(torch.where(is_short & ~parts[2][place].isnan().any(), length, 1.0))
        return mixed


def flat(live: Sequence[Tensor]) -> Tensor:
    """Return a copy of the statistics, one after the other, float32 on their device."""
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in live]) if live else torch.empty(0, device="cpu")
