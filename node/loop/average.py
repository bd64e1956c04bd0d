"""The average of a node's weights over its last mixes: the model to evaluate, apart from the trained one.

A node is nearest to its swarm's average just after a mix, and each mix approaches it from another side. The average of
its weights ``x`` at these moments is nearer than any of them, and costs no traffic (docs/decisions/0097):

    e <- e + max(1 - FACTOR, 1/n) (x - e)        just after mix n since the average began

This is the plain mean of the first mixes, then an exponential average over about five. If a mix covers a part of the
model, only that part is averaged: local steps have moved the other elements. The average starts again whenever other
weights replace the node's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gossip.arithmetic.layout import Layout, Segment
from gossip.errors import LayoutError, LocalError
from node.model.snapshot import ModelState
from node.model.state import Positions, State

__all__ = ["FACTOR", "Average", "Part"]

Part: TypeAlias = Positions | None
"""The elements of a mix, ascending; None for all."""

FACTOR = 0.8  # Share of the average that a mix leaves: 0.9 lags where mixes are rare, 0.5 keeps more noise.

NOT_KEPT = (
    "This node keeps no average: make it with Node(..., keep_average=True), which takes one more vector of the model's "
    "size."
)


class Average:
    """The average of one node, or of one rank of a node; empty unless it is ``kept``.

    Only the training thread uses it. Inside :meth:`shown` the model holds the average. Code that changes the training
    weights calls :meth:`check` first.
    """

    def __init__(self, state: State, kept: bool) -> None:
        self._store: Store | None = None
        if kept:
            self._store = TensorStore(state) if isinstance(state, ModelState) else VectorStore(state)
        self._size = max(state.layout.exchanged, 1)
        self._taken = 0  # Elements that were mixed since the average began.
        self._depth = 0  # Depth of nested :meth:`shown` blocks.

    @property
    def mixes(self) -> int:
        """Return the number of mixes of all elements since the average began, rounded up; 0 means that it is empty."""
        return -(-self._taken // self._size)

    def mixed(self, parts: Sequence[Part]) -> None:
        """Add the weights just after exchanges changed these parts, all at the same boundary."""
        if self._store is None:
            return
        for part in (None,) if any(part is None for part in parts) else parts:
            begins = not self._taken
            self._taken += self._size if part is None else part.size
            self._store.take(max(1.0 - FACTOR, 1.0 / self.mixes), None if begins else part)

    def forget(self) -> None:
        """Start again: other weights have replaced those that were averaged."""
        self._taken = 0

    def settled(self, before: int) -> None:
        """Start again if mixes without training have followed the first ``before`` mixes.

        The last of them is better than an average that includes earlier ones.
        """
        if self.mixes > before:
            self.forget()

    def check(self, call: str) -> None:
        """Raise LocalError if the model does not hold the training weights."""
        if self._depth:
            raise LocalError(
                f"node.{call} was called inside `with node.averaged():`, where the model does not hold the weights "
                "that are trained: call it after the block."
            )

    def require(self) -> None:
        """Raise LocalError if no average is kept."""
        if self._store is None:
            raise LocalError(NOT_KEPT)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the model hold the average inside the block, and restore the training weights at its end."""
        store = self._store if self._taken and not self._depth else None
        self._depth += 1
        try:
            if store is not None:
                store.show()
            yield
        finally:
            try:
                if store is not None:
                    put_back(store)
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def in_checkpoint(self) -> Iterator[dict[str, Tensor]]:
        """Let the model hold the average inside the block, and yield the training weights by name.

        Without an average, the model holds the training weights, and the mapping is empty.
        """
        if self._store is None or not self._taken:
            yield {}
            return
        with self.shown():
            yield self._store.training()

    def restore(self, tensors: Mapping[str, Tensor], mixes: int) -> None:
        """Continue with a checkpoint's average; start with none if it lacks a tensor."""
        self.forget()
        if self._store is not None and mixes > 0 and self._store.load(tensors):
            self._taken = mixes * self._size


def put_back(store: Store) -> None:
    """Restore the training weights, even if a signal raises in the middle (^C, SIGTERM); then raise it again."""
    try:
        store.put_back()
    except (KeyboardInterrupt, SystemExit):
        store.put_back()
        raise


class Store(Protocol):
    """The storage of an average, which can also put it into the model."""

    def take(self, share: float, part: Part) -> None:
        """Set ``average += share (weights - average)`` for a part. A share of 1 replaces the average."""

    def show(self) -> None:
        """Back up the training weights and let the model hold the average."""

    def put_back(self) -> None:
        """Let the model hold the training weights again. After an interruption a second call completes the first."""

    def training(self) -> dict[str, Tensor]:
        """Return the training weights by name, while the average is shown."""

    def load(self, tensors: Mapping[str, Tensor]) -> bool:
        """Use these tensors as the average. Return False if one is missing or has another shape."""


class TensorStore:
    """The average of a model's tensors, each in float32 or its own wider type, on its tensor's device.

    While the average is shown, an average that has its tensor's type exists only in the model, and the backup of the
    training weights takes its place in memory. For half-precision tensors the average stays too, so that the backup
    needs memory of its own, half as much again.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        # By place; None while only the model holds it.
        self._averages: list[Tensor | None] = [beside(tensor) for tensor in state.exchanged()]
        self._kept: dict[int, Tensor] = {}  # Training weights, by place, while the average is shown.

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, share: float, part: Part) -> None:
        live = self._state.exchanged()
        if part is not None:
            self._take_part(live, share, part)
            return
        averages = [self._average(place, tensor) for place, tensor in enumerate(live)]
        if share == 1.0:
            torch._foreach_copy_(averages, live)  # Copy: the old average may not be finite.
            return
        pairs = list(zip(averages, live, strict=True))
        alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if alike:
            torch._foreach_lerp_([average for average, _ in alike], [tensor for _, tensor in alike], share)
        for average, tensor in pairs if len(alike) < len(pairs) else ():
            if average.dtype != tensor.dtype:  # One after the other, since each needs temporary memory.
                average.lerp_(tensor.to(average.dtype), share)

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self) -> None:
        for place, tensor in enumerate(self._state.exchanged()):
            average = self._average(place, tensor)
            self._kept[place] = tensor.clone()
            tensor.copy_(average)
            if average.dtype == tensor.dtype:
                self._averages[place] = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def put_back(self) -> None:
        live = self._state.exchanged()
        for place in list(self._kept):
            if self._averages[place] is None:
                self._averages[place] = live[place].clone(memory_format=torch.contiguous_format)
            live[place].copy_(self._kept[place])
            del self._kept[place]

    def training(self) -> dict[str, Tensor]:
        return {segment.name: self._kept[place] for place, segment in enumerate(exchanged(self._state.layout))}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> bool:
        given = fitting(tensors, self._state.layout)
        for place, (tensor, live) in enumerate(zip(given, self._state.exchanged(), strict=False)):
            self._average(place, live).copy_(tensor)
        return bool(given)

    def _take_part(self, live: list[Tensor], share: float, part: Positions) -> None:
        ends = np.cumsum([tensor.numel() for tensor in live])
        bounds = [0, *np.searchsorted(part, ends).tolist()]
        for place in np.flatnonzero(np.diff(bounds)).tolist():
            tensor, start = live[place], int(ends[place]) - live[place].numel()
            at = torch.from_numpy(part[bounds[place] : bounds[place + 1]] - start).to(tensor.device)
            average = self._average(place, tensor).view(-1)
            now = tensor.reshape(-1).index_select(0, at).to(average.dtype)
            average.index_copy_(0, at, now if share == 1.0 else average.index_select(0, at).lerp_(now, share))

    def _average(self, place: int, tensor: Tensor) -> Tensor:
        """Return the average of this tensor, after following it to its device."""
        average = self._averages[place]
        assert average is not None, "the model holds the average"
        if average.device != tensor.device:
            average = self._averages[place] = average.to(tensor.device)
        return average


class VectorStore:
    """The average of a model whose State is not :class:`ModelState`: one float32 vector on the host.

    While it is shown, the training weights are kept as a checkpoint would hold them.

    Raises:
        LayoutError: The state's checkpoints would round its weights.
    """

    def __init__(self, state: State) -> None:
        wide = [segment.name for segment in exchanged(state.layout) if segment.dtype == "float64"]
        if wide and type(state).tensors is State.tensors:
            raise LayoutError(
                f"Tensor {wide[0]!r} is float64, and {type(state).__name__} would put it back rounded to float32: give "
                "it tensors() and load() of its own, or leave out keep_average."
            )
        self._state, self._average = state, np.zeros(state.layout.exchanged, np.float32)
        self._kept: dict[str, Tensor] = {}  # Training weights, by name, while the average is shown.

    def take(self, share: float, part: Part) -> None:
        weights = np.empty_like(self._average)
        self._state.read(weights)
        if part is not None:
            apart = weights[part] - self._average[part]
            self._average[part] = weights[part] if share == 1.0 else self._average[part] + np.float32(share) * apart
        elif share == 1.0:
            self._average = weights
        else:
            torch.from_numpy(self._average).lerp_(torch.from_numpy(weights), share)

    def show(self) -> None:
        vector = np.empty(self._state.layout.size, np.float32)
        if vector.size > self._average.size:
            self._state.read(vector)  # Frozen weights stay as they are.
        vector[: self._average.size] = self._average
        self._kept = {name: tensor.clone() for name, tensor in self._state.tensors().items()}
        self._state.write(vector)

    def put_back(self) -> None:
        if self._kept:
            self._state.load(self._kept)
            self._kept = {}

    def training(self) -> dict[str, Tensor]:
        names = {segment.name for segment in exchanged(self._state.layout)}
        return {name: tensor for name, tensor in self._kept.items() if name in names}

    def load(self, tensors: Mapping[str, Tensor]) -> bool:
        given = fitting(tensors, self._state.layout)
        if given:
            self._average = torch.cat([tensor.to(torch.float32).reshape(-1) for tensor in given]).numpy()
        return bool(given)


def beside(tensor: Tensor) -> Tensor:
    """Return uninitialised memory for this tensor's average."""
    return torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)


def exchanged(layout: Layout) -> list[Segment]:
    """Return the segments that exchanges carry, in their order."""
    return [segment for segment in layout.segments if segment.kind != "frozen"]


def fitting(tensors: Mapping[str, Tensor], layout: Layout) -> list[Tensor]:
    """Return the tensors of the exchanged segments, or none if one is missing or has another shape."""
    given = [(tensors.get(segment.name), segment.shape) for segment in exchanged(layout)]
    found = [tensor for tensor, shape in given if tensor is not None and tuple(tensor.shape) == shape]
    return found if len(found) == len(given) else []
