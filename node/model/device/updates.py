"""Updates whose values reach a model's device ahead of their addition, or by way of another rank's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from gossip.averaging.model import Upload
from node.model.device.copies import Copies
from node.model.device.uploads import Change, Uploading, Work
from node.model.flat import add, merge

__all__ = ["RelayedUpdate", "UpdateUpload", "change_of"]


def change_of(ratio: float | None) -> Change:
    """Return the change that merges values at this ratio, or adds them if it is None."""
    return add if ratio is None else partial(merge, weight=ratio)


class UpdateUpload(Upload):
    """An update's values that are being copied to the model's devices.

    Args:
        apply: Applies a change with the values; its second argument says whether the change takes as much memory again.
        parts: The upload for each run of the model's devices; None for a run that has none.
    """

    def __init__(self, apply: Callable[[Change, bool], Copies], parts: Sequence[Uploading | None]) -> None:
        self._apply, self._parts = apply, parts

    def done(self) -> bool:
        """Return True once applying the values does not wait. Any thread may call it."""
        return all(part.event.query() for part in self._parts if part is not None)  # type: ignore[no-untyped-call]

    def add(self) -> Copies:
        """Add the values, as :meth:`ModelState.add`."""
        return self._apply(change_of(None), False)

    def merge(self, ratio: float) -> Copies:
        """Merge the values, as :meth:`ModelState.merge`."""
        return self._apply(change_of(ratio), True)


class RelayedUpdate(Upload):
    """An update whose values rank 0 has, and sends from its device to those of the other ranks.

    It has its memory already, so that no rank that has announced it fails for want of some.

    Args:
        work: Applies the update, portion by portion.
        portions: The sizes of the portions, which are the same on all ranks.
    """

    def __init__(self, work: Work, portions: Sequence[int]) -> None:
        self._work, self.portions = work, tuple(portions)

    def done(self) -> bool:
        return True

    @torch.no_grad()
    def add(self) -> Copies:
        """Apply the update; later work of the device sees it. The host waits for nothing."""
        return Copies(tuple(self._work()))

    def merge(self, ratio: float) -> Copies:
        """Apply the update, which was prepared with this ratio."""
        return self.add()
