"""A node's model and optimizer in checkpoints: written whole, checked, and put back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossip.errors import CheckpointError
from node.model import checkpoint
from node.model.checkpoint import Checkpoint
from node.model.tensors import plain_name

__all__ = ["Archive"]


class Archive:
    """``fingerprint``: of the model's layout."""

    def __init__(
        self, model: nn.Module | Mapping[str, Any], optimizer: torch.optim.Optimizer | None, fingerprint: str
    ) -> None:
        self.model, self.optimizer, self.fingerprint = model, optimizer, fingerprint

    def save(self, path: str | os.PathLike[str], figures: Mapping[str, Any]) -> None:
        """Write model, optimizer and these figures. Raises CheckpointError."""
        tensors = self.model.state_dict() if isinstance(self.model, nn.Module) else dict(self.model)
        tensors = {plain_name(name): torch.as_tensor(value) for name, value in tensors.items()}
        meta = {"format": 1, "fingerprint": self.fingerprint, **figures}
        checkpoint.save(path, tensors, self.optimizer.state_dict() if self.optimizer is not None else None, meta)

    def load(self, path: str | os.PathLike[str]) -> Checkpoint:
        """What a file holds. Raises CheckpointError, also for one that names another model."""
        saved = checkpoint.load(path)
        if saved.meta.get("fingerprint", self.fingerprint) != self.fingerprint:
            raise CheckpointError(
                f"{path} holds another model than this node's: load it into the model it was saved from."
            )
        return saved

    @torch.no_grad()
    def put(self, saved: Checkpoint) -> None:
        """Overwrite the live model with it, and the optimizer's state where the file has some."""
        self._put_tensors(saved.tensors)
        if self.optimizer is not None and saved.optimizer_state is not None:
            self.optimizer.load_state_dict(saved.optimizer_state)

    def _put_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if isinstance(self.model, nn.Module):
            named = {plain_name(name): name for name in self.model.state_dict()}  # compiled or not: the same model
            self.model.load_state_dict({named.get(plain_name(name), name): value for name, value in tensors.items()})
            return
        for name, value in self.model.items():
            target = value if isinstance(value, Tensor) else torch.as_tensor(value)
            target.copy_(tensors[name])
