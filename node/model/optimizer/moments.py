"""The moments of the optimizers of one model: which are mixed, and how a partner's are mixed into the live ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gossip.arithmetic.moments import MAX_RATIO, MomentForm, Role
from gossip.averaging.vectors import REACH, Floats, Moments
from node.model.device.copies import Copies, combined
from node.model.optimizer.optimizer_state import OF_GRADIENTS, OptimizerState, state_tensor
from node.model.tensors import local_part

# By their names in torch's optimizers, and in others that take them over.
SECOND = frozenset({"acc_delta", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "moment2", "square_avg", "sum"})
FIRST = {"exp_avg": "exp_avg_sq", "moment1": "moment2"}
# The largest ratio of a moment to another of its parameter that one history of gradients can make, and whether to that
# one's root: exp_avg (docs/algorithms.md) and Adamax's, with the usual decays, and the mean of centred RMSprop.
BOUNDS: dict[str, dict[str, tuple[float, bool]]] = {
    "exp_avg": {"exp_avg_sq": (MAX_RATIO, True), "exp_inf": (2.0, False)},
    "moment1": {"moment2": (MAX_RATIO, True)},
    "grad_avg": {"square_avg": (1.0, True)},
}
# Optimizers whose steps have one length whatever the gradients' is, by a part of their classes' names. The momentum of
# SGD gains nothing from being mixed.
NORMALISED = ("muon", "lion", "sign", "shampoo")


class LiveMoments:
    """The moments of a model's optimizers, whose state is ``state``."""

    def __init__(self, state: OptimizerState) -> None:
        self.state = state
        self.current: MomentForm | None = None  # As of the last :meth:`form`.
        # The trained parameters with their optimizers, and their first elements in each moment, as of then.
        self._trained: list[tuple[Tensor, list[torch.optim.Optimizer]]] = []
        self._starts: list[int] = []
        self._seconds: dict[str, bool] = {}  # For each name that no table has: it is a mean of squares, by its values.

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all moments at present, whether or not they are mixed."""
        return tuple(key for key in self.state.keys if not self.state.is_follower(key))

    def form(self, mix_state: str) -> MomentForm | None:
        """Return the form of the moments at present; None if none are mixed, under ``Config.mix_state``."""
        roles = self.roles(self.names, mix_state)
        elements = self.state.trained_elements
        self.use(MomentForm(tuple(roles), tuple(roles.values()), elements) if roles else None)
        return self.current

    def use(self, form: MomentForm | None) -> None:
        """Use this form from now on, with the parameters as they are trained now."""
        self.current = form
        self._trained = [] if form is None else self.state.holders_of_trained()
        self._starts = [0, *accumulate(parameter.numel() for parameter, _ in self._trained)][: len(self._trained)]

    def roles(self, names: Iterable[str], mix_state: str) -> dict[str, Role]:
        """Return the roles of those of these names whose moments are mixed, in the same order."""
        names = list(names)
        seconds = {name for name in names if name in SECOND or (name not in OF_GRADIENTS and self.is_second(name))}
        classes = " ".join(type(optimizer).__name__.lower() for optimizer in self.state.givers)
        is_normalised = bool(seconds) or any(part in classes for part in NORMALISED)
        if mix_state == "off" or not (is_normalised or mix_state == "on"):
            return {}
        return {
            name: "second" if name in seconds else "first" if FIRST.get(name) in seconds else "plain" for name in names
        }

    @torch.no_grad()
    def bound(self) -> None:
        """Bring all moments into the bounds that one history of gradients keeps.

        State that comes from several donors, or from one at several times, may have a first moment over a second one
        of 0. Adam's next step would then be thousands of times as long as usual.
        """
        names = self.names
        roles = self.roles(names, "on")
        for _, states in self.state.rows():
            for state in states:
                bound_values({name: local_part(state[name]) for name in names if name in state}, roles)

    def mixed_names(self, keys: Iterable[str], mix_state: str) -> set[str]:
        """Return those of an optimizer's keys whose moments are mixed, or will be once it has stepped."""
        current = set() if self.current is None else set(self.current.names)
        return current.intersection(keys) | set(self.roles(OF_GRADIENTS.intersection(keys), mix_state))

    @torch.no_grad()
    def is_second(self, name: str) -> bool:
        """Return True if no value under this name is below 0, and some are above; decided once."""
        if name not in self._seconds:
            tensors = [local_part(state[name]) for _, states in self.state.rows() for state in states if name in state]
            self._seconds[name] = all(bool((tensor >= 0).all()) for tensor in tensors) and any(
                bool((tensor > 0).any()) for tensor in tensors
            )
        return self._seconds[name]

    def begin_read(self, read: Callable[[list[Tensor], Floats], Copies], rows: Floats, start: int, stop: int) -> Copies:
        """Begin to read elements [start, stop) of each moment into its row, by ``read``."""
        pieces = list(self.pieces(start, stop))
        names = () if self.current is None else self.current.names
        live = [[state_tensor(piece.parameter, piece.states(), name).reshape(-1)[piece.where] for piece in pieces]
                for name in names]  # fmt: skip
        return combined([read(tensors, row[: stop - start]) for tensors, row in zip(live, rows, strict=True)])

    @torch.no_grad()
    def mix(self, moments: Moments, flat: Tensor) -> None:
        """Mix a partner's moments, whose rows are ``flat`` on our device, by the rule of :class:`Moments`."""
        form, position = moments.form, 0
        rows = flat.view(len(form.names), -1)
        for piece in self.pieces(moments.start, moments.stop):
            states, elements = piece.states(), piece.where.stop - piece.where.start
            own = [next((state[name] for state in states if name in state), None) for name in form.names]
            theirs = rows[:, position : position + elements].to(piece.parameter.device)
            mix_tensor(own, theirs, piece.where)
            position += elements
        if "grad_avg" in form.names:
            self.bound()  # Its square must not exceed the mean of squares, and it is rounded on the way.

    def pieces(self, start: int, stop: int) -> Iterator[TensorPiece]:
        """Yield the elements [start, stop) of the moments, a piece of each parameter, as of the last :meth:`form`."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        for place in range(first, len(self._starts)):
            begin = self._starts[place]
            if begin >= stop:
                return
            parameter, optimizers = self._trained[place]
            where = slice(max(start - begin, 0), min(stop - begin, parameter.numel()))
            if where.start < where.stop:
                yield TensorPiece(parameter, optimizers, where)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The elements ``where`` of a trained parameter's moments, which its optimizers hold."""

    parameter: Tensor
    optimizers: Sequence[torch.optim.Optimizer]
    where: slice

    def states(self) -> list[Mapping[str, Any]]:
        """Return the states of the parameter, one of each optimizer that has any."""
        return [state for optimizer in self.optimizers if (state := optimizer.state.get(self.parameter))]


def mix_tensor(own: Sequence[Tensor | None], theirs: Tensor, where: slice) -> None:
    """Mix into these elements of the moments of one parameter, in place; None is a moment that it lacks."""
    for tensor, target in zip(own, theirs, strict=True):
        if tensor is None:
            continue
        flat = tensor.reshape(-1)  # A view of contiguous memory.
        mix_values(flat[where], target)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def mix_values(own: Tensor, theirs: Tensor) -> None:
    """Mix into elements of a moment, in place; ``theirs`` are float32 of the same shape."""
    limit = (REACH * own.abs().amax()).float()
    own.add_(torch.minimum(torch.maximum(theirs, -limit), limit).to(own.dtype)).mul_(0.5)


def bound_values(values: Mapping[str, Tensor], roles: Mapping[str, Role]) -> None:
    """Bring the moments of one parameter into their bounds, in place. Without a known one, 0 where a second one is."""
    for name, own in values.items():
        if roles.get(name) == "second":
            continue
        bounds = BOUNDS.get(name, {})
        for other, limit in values.items():
            if other in bounds:
                ratio, is_root = bounds[other]
                limit = ratio * (limit.clamp_min(0.0).sqrt() if is_root else limit)
                own.copy_(torch.minimum(torch.maximum(own, -limit.to(own.dtype)), limit.to(own.dtype)))
            elif roles.get(other) == "second":
                own.masked_fill_(limit == 0.0, 0.0)
