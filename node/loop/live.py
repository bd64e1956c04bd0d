"""The live model of a node: its tensors and optimizers, the step boundary and the outer step.

The training thread owns it. At the *step boundary*, between two steps, it fulfils the requests of the network thread.
Jobs of that thread also move the outer step, the momentum of mixes
(:class:`gossip.arithmetic.outer_step.OuterStep`), under ``outer_lock``.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from gossip.arithmetic.correction import Correction, fresh_zeros
from gossip.arithmetic.moments import MomentForm
from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.boundary import Boundary
from gossip.config import Config
from gossip.errors import LayoutError
from node.model.backup import KeptWeights
from node.model.checkpoint import Archive
from node.model.inventory.items import Choices
from node.model.optimizers import Optimizers
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.model.state import Floats, State
from node.network.hints import WakeEvent

OptimizerReport: TypeAlias = tuple[tuple[str, ...], tuple[tuple[str, float], ...], MomentForm | None]
"""The keys of an optimizer's state, its scalars by name, and the form of its moments that are mixed."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The model and the optimizers that a program gives a node to train.

    Attributes:
        model: A torch module, a mapping of names to tensors or arrays, or a state.
        optimizers: The optimizers of the model.
        choices: The treatments of tensors that the user chose.
        given_state: The state of the model if it exists already, as for a sharded model.
    """

    model: nn.Module | Mapping[str, Any] | State
    optimizers: Optimizers
    choices: Choices = field(default_factory=Choices)
    given_state: State | None = None

    def make_state(self) -> State:
        """Return the state that reads and writes the model as a flat vector."""
        if self.given_state is not None:
            return self.given_state
        return self.model if isinstance(self.model, State) else ModelState(self.model, self.optimizers, self.choices)


def correction_vector(state: State, elements: int) -> Floats:
    """Return zeros for a correction: page-locked if the model's vectors are, because each addition is an upload."""
    if not state.locks:
        return fresh_zeros(elements)
    vector = state.buffer(elements)
    vector.fill(0.0)
    return vector


class LiveModel:
    """The model that one training loop trains, and everything that depends on its weights.

    Args:
        trained: The model and its optimizers.
        config: The node's configuration.
        make_boundary: Makes the step boundary.
        is_single_rank: True if no other process (rank) trains this model. Only then does the node learn a correction
            for the bias of its data (:class:`~gossip.arithmetic.correction.Correction`), and upload updates to a device
            ahead of the boundary that adds them.
    """

    def __init__(
        self, trained: Trained, config: Config, make_boundary: Callable[..., Boundary] = Boundary,
        is_single_rank: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.optimizers = trained.model, trained.optimizers
        self.state = trained.make_state()
        self.state.check()
        self.pool = VectorPool(self.state)
        self.wake = WakeEvent()  # Wakes a training loop that only waits (joining, settling).
        self.backup = KeptWeights(self.state, self.optimizers)
        self.boundary = make_boundary(
            self.state, self.pool, self.backup, config.conserves, threading.Lock(), self.wake.set, self.wake.clear
        )
        # With max_version_gap the loop waits at its boundary for the update, so it is not uploaded ahead.
        self.boundary.uploads_updates = is_single_rank and config.max_version_gap is None
        self.outer = OuterStep(self.state.layout.parameters, *config.outer, config.averaged, config.measures_momentum)
        interval_steps = config.first_interval  # Steps between the first mixes; None if a clock times the mixes.
        if config.kappa and interval_steps is not None and is_single_rank:  # `kappa` is the correction's strength.
            self.outer.correction = Correction(
                self.state.layout.exchanged, self.state.layout.parameters, config.kappa, interval_steps
            )
            self.outer.correction.zeros = partial(correction_vector, self.state)
        self.state.mix_state = config.mix_state
        self.outer_lock = threading.Lock()  # The training thread resets the outer step that the network's threads move.
        self.archive = Archive(self.state, self.optimizers)
        self.has_weights = False  # True once mixing has started from weights, the node's own or others'.

    def begin_mixing(self) -> None:
        """Start mixing from the current weights."""
        self.has_weights = True
        if not self.outer.is_plain:
            self.reset_outer()

    def reset_outer(self) -> None:
        """Start the outer step from the current weights."""
        vector = self.pool.take()
        self.state.read(vector.array)
        with self.outer_lock:
            self.outer.reset(vector.array)
        self.pool.give(vector)

    def optimizer_report(self) -> OptimizerReport | None:
        """Return the keys and scalars of the optimizer state that newcomers get.

        Both are empty if the optimizer has more tensors than may be exchanged. The result is None while the scalars are
        on their way from a device.
        """
        try:
            scalars = self.state.recent_optimizer_scalars()
            return (
                None
                if scalars is None
                else (self.state.optimizer_keys, tuple(scalars.items()), self.state.moment_form())
            )
        except LayoutError:
            return (), (), None

    def on_replaced(self, vector: Any) -> None:
        """Reset everything that depends on the old weights, after ``vector`` has replaced them."""
        self.has_weights = True
        with self.outer_lock:
            if self.outer.has_weights:
                self.outer.replace(vector)
            else:
                self.outer.take_over(vector)
