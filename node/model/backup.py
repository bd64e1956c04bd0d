"""A backup of the weights that a node replaces with another run's, until a trial shows whether the others are better.

The backup is in memory and can be restored at once. A checkpoint on disk is written with it, for later use.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from gossip.arithmetic.correction import fresh_zeros
from gossip.arithmetic.mixing import subtract
from gossip.errors import CheckpointError
from node.model.optimizers import Optimizers
from node.model.state import Floats, State

T = TypeVar("T")


class KeptWeights:
    """A backup of the model and the optimizers. Only the training thread uses it.

    Args:
        state: The model.
        optimizers: Its optimizers.
        save: Writes the checkpoint. If that fails, no backup is made, and the weights may not be replaced.

    Attributes:
        weights: The weights in the backup, float32; None if there is no backup.
        optimizers: The ``state_dict()`` of each optimizer in the backup.
        why_not: The reason why the last backup failed; empty if none has.
    """

    def __init__(
        self, state: State, optimizers: Optimizers | None = None, save: Callable[[], None] = lambda: None
    ) -> None:
        self.state, self.live_optimizers, self.save = state, optimizers or Optimizers(), save
        self.weights: Floats | None = None
        self.optimizers: list[dict[str, Any]] = []
        self.why_not = ""

    @property
    def holds(self) -> bool:
        """Return True if there is a backup now."""
        return self.weights is not None

    def keep(self) -> bool:
        """Make the backup. Return True if the live weights may be overwritten now."""
        try:
            self.save()
        except CheckpointError as error:
            self.why_not = str(error)
            return False
        weights = fresh_zeros(self.state.layout.size)
        self.state.read(weights)
        self.optimizers = copy_to_host(self.live_optimizers.split_state(self.live_optimizers.state_dict()))
        self.weights = weights  # Last, so that there is a backup of both or of neither.
        return True

    def distance(self, theirs: Floats) -> tuple[float, float]:
        """Return ``|theirs - backup|^2`` and ``|backup|^2``, over the weights that exchanges carry."""
        assert self.weights is not None
        ours = self.weights[: self.state.layout.exchanged]
        return subtract(theirs[: ours.size], ours, np.empty_like(ours))

    def put_back(self) -> Floats:
        """Restore the live weights and the optimizers' state from the backup, and discard it; return the weights."""
        weights, self.weights = self.weights, None
        assert weights is not None
        self.state.write(weights)
        self.live_optimizers.load(self.optimizers)
        self.optimizers = []
        return weights

    def forget(self) -> None:
        """Discard the backup."""
        self.weights, self.optimizers = None, []


def copy_to_host(value: T) -> T:
    """Return a copy of nested data with all tensors on the host, as a device may have no room for them twice."""
    copied: Any = value
    if isinstance(value, Tensor):
        copied = value.detach().to("cpu", copy=True)
    elif isinstance(value, Mapping):
        copied = {key: copy_to_host(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        items = [copy_to_host(item) for item in value]
        copied = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # A namedtuple takes each.
    result: T = copied
    return result
