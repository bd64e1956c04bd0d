"""A node's model and optimizers in checkpoints: written whole, checked, and put back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gossip.errors import CheckpointError
from node.model import checkpoint
from node.model.checkpoint import Checkpoint
from node.model.optimizers import Optimizers
from node.model.state import State

__all__ = ["Archive"]


class Archive:
    """Of a model's ``state``, and of the ``optimizers`` that train it."""

    def __init__(self, state: State, optimizers: Optimizers) -> None:
        self.state, self.optimizers = state, optimizers

    def save(self, path: str | os.PathLike[str], figures: Mapping[str, Any]) -> None:
        """Write model, optimizers and these figures. Raises CheckpointError."""
        meta = {"format": 1, "fingerprint": self.state.layout.contents, **figures}
        checkpoint.save(path, self.state.tensors(), self.optimizers.state_dict(), meta)

    def load(self, path: str | os.PathLike[str]) -> Checkpoint:
        """What a file holds. Raises CheckpointError, also for one that names another model."""
        saved, ours = checkpoint.load(path), self.state.layout.contents
        if saved.meta.get("fingerprint", ours) != ours:
            raise CheckpointError(
                f"{path} holds another model than this node's: load it into the model it was saved from."
            )
        return saved

    def put(self, saved: Checkpoint, path: str | os.PathLike[str]) -> None:
        """Overwrite the live model with it, and the optimizers' state where the file has some. Raises CheckpointError
        before anything changes."""
        try:
            states = self.optimizers.states(saved.optimizer_state)
            self.state.load(saved.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not loaded: {error}") from error
        self.optimizers.joined()
        self.optimizers.load(states)  # after it: a momentum that the file has belongs to these weights
