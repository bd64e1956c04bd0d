"""An update that is uploaded before the step boundary that applies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from node.model.device.copies import Copies
from node.model.device.uploads import Uploading
from node.model.flat import add, merge

__all__ = ["UpdateUpload"]


class UpdateUpload:
    """An update's values that are being copied to the model's devices. A :class:`gossip.averaging.model.Upload`.

    The host vector with the values must not change until this is done.

    Args:
        apply: Changes the model by the values: a function of the change, and of ``scratch`` as for `Uploads.prepare`.
        parts: The upload for each run of the model's devices; None for a run that has none.
    """

    def __init__(self, apply: Callable[..., Copies], parts: Sequence[Uploading | None]) -> None:
        self.apply, self.parts = apply, parts

    def done(self) -> bool:
        """Return True once applying the values does not wait. Any thread may call it."""
        return all(part.event.query() for part in self.parts if part is not None)  # type: ignore[no-untyped-call]

    def add(self) -> Copies:
        """Add the values, as :meth:`ModelState.add`."""
        return self.apply(add)

    def merge(self, ratio: float) -> Copies:
        """Merge the values, as :meth:`ModelState.merge`."""
        return self.apply(partial(merge, weight=ratio), scratch=True)
