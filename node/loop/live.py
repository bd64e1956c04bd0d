"""The live model of a node: its tensors and optimizers, the step boundary, the outer step and the average.

The training thread owns it. The network thread's jobs move the outer step under ``outer_lock``, and ask the boundary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gossip.arithmetic.correction import Correction
from gossip.arithmetic.mixing import OuterStep
from gossip.averaging.boundary import Boundary, Update
from gossip.config import Config
from node.loop.average import Average
from node.model.backup import KeptWeights
from node.model.checkpoint import Archive
from node.model.optimizers import Optimizers
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.model.state import State
from node.network.hints import WakeEvent
from node.storage.vectors import FileVectors

__all__ = ["LiveModel", "Trained"]


@dataclass(frozen=True, slots=True)
class Trained:
    """The model and the optimizers that a program gives a node to train.

    Attributes:
        model: A torch module, a mapping of names to tensors or arrays, or a state.
        optimizers: Its optimizers.
        frozen: Also exchange parameters that require no gradient while others do.
        keep_average: Keep the average over the last mixes.
        brought: The state to use, if something else has made it.
    """

    model: nn.Module | Mapping[str, Any] | State
    optimizers: Optimizers
    frozen: bool = False
    keep_average: bool = False
    brought: State | None = None

    def state(self) -> State:
        """Return the model as a flat vector."""
        model = self.model if self.brought is None else self.brought
        return model if isinstance(model, State) else ModelState(model, self.optimizers, self.frozen)


class LiveModel:
    """The model that one training loop trains, and all that depends on its weights.

    ``make_boundary`` makes the step boundary. ``alone``: no other ranks train this model. Only then does the node learn
    a correction for the bias of its data, and do updates go to a device ahead of their boundary. ``folder`` is where
    host vectors lie in files; None: in memory.
    """

    def __init__(
        self,
        trained: Trained,
        config: Config,
        make_boundary: Callable[..., Boundary] = Boundary,
        alone: bool = True,
        folder: Path | None = None,
    ) -> None:
        self.model, self.optimizers = trained.model, trained.optimizers
        self.state = trained.state()
        self.state.check()
        self.average = Average(self.state, trained.keep_average)
        files = None if folder is None else FileVectors(folder, self.elements(config))
        self.pool = VectorPool(self.state, files)
        self.wake = WakeEvent()  # Wakes a training loop that only waits (joining, settling).
        self.backup = KeptWeights(self.state, self.optimizers)
        self.boundary = make_boundary(
            self.state, self.pool, self.backup, config.conserves, threading.Lock(), self.wake.set, self.wake.clear
        )
        # With max_version_gap the loop waits at its boundary for the update, so it is not uploaded ahead.
        self.boundary.uploads = alone and config.max_version_gap is None
        self.outer = OuterStep(self.state.layout.parameters, *config.outer, config.averaged)
        every = config.first_interval
        if config.kappa and every is not None and alone:
            self.outer.correction = Correction(
                self.state.layout.exchanged, self.state.layout.parameters, config.kappa, every
            )
        if files is not None:
            self.outer.zeros = self.backup.zeros = files.zeros
            if self.outer.correction is not None:
                self.outer.correction.zeros = files.zeros
        self.outer_lock = threading.Lock()  # The training thread resets the outer step that the network's threads move.
        self.archive = Archive(self.state, self.optimizers)
        self.begun = False  # There are weights, its own or others', from which mixing starts.

    def elements(self, config: Config) -> int:
        """Return the elements of the vectors that this node holds all the time: see docs/operating.md."""
        vectors = 2 + (0 if config.plain else 2) + bool(config.kappa)
        return vectors * self.state.layout.exchanged

    def mix_from_here(self) -> None:
        """Start mixing from the current weights."""
        self.begun = True
        if not self.outer.plain:
            self.reset_outer()

    def reset_outer(self) -> None:
        """Start the outer step from the current weights."""
        vector = self.pool.take()
        self.state.read(vector.array)
        with self.outer_lock:
            self.outer.reset(vector.array)
        self.pool.give(vector)

    def mixed(self, updates: Sequence[Update]) -> None:
        """Note that updates of exchanges were added to the model."""
        self.optimizers.mixed()
        self.average.mixed([update.positions for update in updates])

    def replaced(self, vector: Any) -> None:
        """Reset all that depends on the old weights; the model now holds ``vector``."""
        # The donor may use another optimizer, whose state has the same size and is not taken.
        if self.optimizers.quasi_global:
            self.optimizers.joined(keep=self.state.holds(vector))
        self.average.forget()
        self.begun = True
        with self.outer_lock:
            if self.outer.begun:
                self.outer.replace(vector)
            else:
                self.outer.begin(vector)
