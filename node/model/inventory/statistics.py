"""The live statistics of a model, moved towards a partner's without waiting for their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossip.arithmetic.statistics import PEAK_SHARE, Statistics

__all__ = ["StatisticsMixer"]


class StatisticsMixer:
    """The statistics of one model: which of their elements local steps change, and their mixing.

    :mod:`gossip.arithmetic.statistics` has the rule.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None  # The values that the last mix left, flat.
        self._varies: Tensor | None = None  # For each element, whether local steps have changed it: bool (elements,).

    def forget(self) -> None:
        """Forget the last values, since others have replaced them."""
        self._last = None

    @torch.no_grad()
    def shift(self, live: Sequence[Tensor], statistics: Statistics) -> Tensor:
        """Return the shift of all statistics, flat float32 on their device, and count it as made."""
        now = torch.cat([tensor.detach().reshape(-1).float() for tensor in live])
        shift = self._mixed(now, live, statistics) - now
        self._last = now + shift
        return shift

    @torch.no_grad()
    def mix(self, live: Sequence[Tensor], statistics: Statistics) -> None:
        """Move the live statistics, which stay between their own and the partner's values."""
        now = torch.cat([tensor.detach().reshape(-1).float() for tensor in live])
        self._last = self._mixed(now, live, statistics)
        parts = torch.split(self._last, [tensor.numel() for tensor in live])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, live, strict=True)]
        torch._foreach_copy_(list(live), views)

    def _mixed(self, now: Tensor, live: Sequence[Tensor], statistics: Statistics) -> Tensor:
        """Return the mixed statistics, flat; ``now`` are the live ones."""
        if self._varies is None or self._varies.numel() != now.numel():
            self._varies = torch.zeros_like(now, dtype=torch.bool)
        if self._last is not None and self._last.numel() == now.numel():
            self._varies |= now != self._last
        # The largest element of each tensor, spread over its elements.
        peaks = torch.cat([
            part.abs().amax().expand(part.numel()) if part.numel() else part
            for part in torch.split(now, [tensor.numel() for tensor in live])
        ])  # fmt: skip
        limit = torch.where(peaks > 0, torch.maximum(now.abs(), PEAK_SHARE * peaks), 1.0)
        target = torch.from_numpy(statistics.values).to(now.device)
        moves = self._varies | statistics.moves_all
        if statistics.positions is not None:
            places = torch.from_numpy(statistics.positions).to(now.device)
            moves = torch.zeros_like(moves).index_copy(0, places, moves[places])
            target = now.index_copy(0, places, target)
        # Both sides of a pair with equal weights get the same bits: w x + w p, and not x + w (p - x).
        near = torch.minimum(torch.maximum(target, now - limit), now + limit)
        mixed = (1.0 - statistics.weight) * now + statistics.weight * near
        return torch.where(moves, mixed, now)
