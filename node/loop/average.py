"""The average of a node's weights over its last mixes: the model to evaluate, apart from the trained one.

A node is nearest to its swarm's average just after a mix, and each mix approaches it from another side. The average e
of its weights x at these moments is nearer than any of them, and costs no traffic (docs/decisions/0097):

    e <- e + max(1 - FACTOR, 1/n) (x - e)        just after mix n since the average began

This is the plain mean of the first mixes, then an exponential average over about five. If a mix covers a part of the
model, only that part is averaged: local steps have moved the other elements. The average starts again whenever other
weights replace the node's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gossip.arithmetic.layout import Layout, Segment
from gossip.errors import LayoutError, LocalError
from node.model.snapshot import ModelState
from node.model.state import Positions, State

__all__ = ["FACTOR", "Average", "Part"]

Part: TypeAlias = Positions | None
"""The positions of the elements that a mix covers, ascending; None if it covers all."""

FACTOR = 0.8  # The weight of the old average at a mix. 0.9 would lag where mixes are rare, and 0.5 keep more noise.

NOT_KEPT = (
    "This node keeps no average: make it with Node(..., keep_average=True), which takes one more vector of the model's "
    "size."
)


class Average:
    """The average of one node, or of one of the processes (ranks) that form a node; always empty unless ``is_kept``.

    Only the training thread uses it. Inside :meth:`shown` the model holds the average. Code that changes the training
    weights calls :meth:`check_not_shown` first.
    """

    def __init__(self, state: State, is_kept: bool) -> None:
        self._store: TensorStore | VectorStore | None = None  # None if no average is kept.
        if is_kept:
            self._store = TensorStore(state) if isinstance(state, ModelState) else VectorStore(state)
        self._exchanged_elements = max(state.layout.exchanged, 1)
        self._mixed_elements = 0  # The elements that mixes have covered since the average began, each mix counted.
        self._shown_depth = 0  # The number of nested :meth:`shown` blocks.

    @property
    def mixes(self) -> int:
        """Return the mixes since the average began, rounded up; mixes of parts add up. 0 if the average is empty."""
        return -(-self._mixed_elements // self._exchanged_elements)

    def on_mixed(self, parts: Sequence[Part]) -> None:
        """Add the present weights to the average, after exchanges changed these parts, all at one boundary."""
        if self._store is None:
            return
        for part in (None,) if any(part is None for part in parts) else parts:
            is_first = not self._mixed_elements
            self._mixed_elements += self._exchanged_elements if part is None else part.size
            # The first mix fills the whole average, since there are no older values for the other elements.
            self._store.mix_in(max(1.0 - FACTOR, 1.0 / self.mixes), None if is_first else part)

    def forget(self) -> None:
        """Start again: other weights have replaced those that were averaged."""
        self._mixed_elements = 0

    def on_settled(self, mixes_before: int) -> None:
        """Start again if the loop has mixed without training, after ``mixes_before`` mixes.

        The weights after such mixes are better than an average that includes earlier ones.
        """
        if self.mixes > mixes_before:
            self.forget()

    def check_not_shown(self, call: str) -> None:
        """Raise LocalError if the model does not hold the training weights."""
        if self._shown_depth:
            raise LocalError(
                f"node.{call} was called inside `with node.averaged():`, where the model does not hold the weights "
                "that are trained: call it after the block."
            )

    def check_kept(self) -> None:
        """Raise LocalError if no average is kept."""
        if self._store is None:
            raise LocalError(NOT_KEPT)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the model hold the average inside the block, and restore the training weights at its end."""
        store = self._store if self._mixed_elements and not self._shown_depth else None
        self._shown_depth += 1
        try:
            if store is not None:
                store.show()
            yield
        finally:
            try:
                if store is not None:
                    put_back(store)
            finally:
                self._shown_depth -= 1

    @contextlib.contextmanager
    def in_checkpoint(self) -> Iterator[dict[str, Tensor]]:
        """Let the model hold the average inside the block, and yield the training weights by name.

        Without an average, the model holds the training weights, and the mapping is empty.
        """
        if self._store is None or not self._mixed_elements:
            yield {}
            return
        with self.shown():
            yield self._store.training_weights()

    def restore(self, tensors: Mapping[str, Tensor], mixes: int) -> None:
        """Continue with a checkpoint's average; start with none if it lacks a tensor."""
        self.forget()
        if self._store is not None and mixes > 0 and self._store.load(tensors):
            self._mixed_elements = mixes * self._exchanged_elements


def put_back(store: TensorStore | VectorStore) -> None:
    """Restore the training weights, even if a signal raises in the middle (^C, SIGTERM); then raise it again."""
    try:
        store.put_back()
    except (KeyboardInterrupt, SystemExit):
        store.put_back()
        raise


class TensorStore:
    """The average of a model's tensors, each in float32 or its own wider type, on its tensor's device.

    Like :class:`VectorStore`, it can also swap the average with the model's weights.

    While the average is shown, a float32 tensor's average exists only in the model, and the backup of the training
    weights takes its place in memory. A half-precision tensor's average stays too, because the model rounds it.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        # By the tensor's index in the layout; None while only the model holds the average.
        self._averages: list[Tensor | None] = [
            torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
            for tensor in state.exchanged_tensors()
        ]
        self._backup: dict[int, Tensor] = {}  # Training weights by index, while the average is shown.

    @torch.inference_mode(False)
    @torch.no_grad()
    def mix_in(self, share: float, part: Part) -> None:
        """Set ``average += share (weights - average)`` for a part. A share of 1 replaces the average."""
        live = self._state.exchanged_tensors()
        if part is not None:
            self._mix_in_part(live, share, part)
            return
        averages = [self._average(index, tensor) for index, tensor in enumerate(live)]
        if share == 1.0:
            torch._foreach_copy_(averages, live)  # Copy: the old average may not be finite.
            return
        pairs = list(zip(averages, live, strict=True))
        same_type = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if same_type:
            torch._foreach_lerp_([average for average, _ in same_type], [tensor for _, tensor in same_type], share)
        for average, tensor in pairs if len(same_type) < len(pairs) else ():
            if average.dtype != tensor.dtype:  # One after the other, since each needs temporary memory.
                average.lerp_(tensor.to(average.dtype), share)

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self) -> None:
        """Back up the training weights, and let the model hold the average."""
        for index, tensor in enumerate(self._state.exchanged_tensors()):
            average = self._average(index, tensor)
            self._backup[index] = tensor.clone()
            tensor.copy_(average)
            if average.dtype == tensor.dtype:
                self._averages[index] = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def put_back(self) -> None:
        """Let the model hold the training weights again. After an interruption a second call completes the first."""
        live = self._state.exchanged_tensors()
        for index in list(self._backup):
            if self._averages[index] is None:
                self._averages[index] = live[index].clone(memory_format=torch.contiguous_format)
            live[index].copy_(self._backup[index])
            del self._backup[index]

    def training_weights(self) -> dict[str, Tensor]:
        return {
            segment.name: self._backup[index] for index, segment in enumerate(exchanged_segments(self._state.layout))
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> bool:
        fitting = fitting_tensors(tensors, self._state.layout)  # Empty if one does not fit.
        for index, (tensor, live) in enumerate(zip(fitting, self._state.exchanged_tensors(), strict=False)):
            self._average(index, live).copy_(tensor)
        return bool(fitting)

    def _mix_in_part(self, live: list[Tensor], share: float, part: Positions) -> None:
        for index, positions in self._state.positions_by_tensor(part):
            tensor = live[index]
            average = self._average(index, tensor).view(-1)
            weights = tensor.reshape(-1).index_select(0, positions).to(average.dtype)
            mixed = weights if share == 1.0 else average.index_select(0, positions).lerp_(weights, share)
            average.index_copy_(0, positions, mixed)

    def _average(self, index: int, tensor: Tensor) -> Tensor:
        """Return the average of this tensor, after following it to its device."""
        average = self._averages[index]
        assert average is not None, "the model holds the average"
        if average.device != tensor.device:
            average = self._averages[index] = average.to(tensor.device)
        return average


class VectorStore:
    """The average of a model whose State is not :class:`ModelState`: one float32 vector on the host.

    While it is shown, the backup holds the training weights as a checkpoint would.

    Raises:
        LayoutError: The state's checkpoints would round its weights.
    """

    def __init__(self, state: State) -> None:
        wide = [segment.name for segment in exchanged_segments(state.layout) if segment.dtype == "float64"]
        if wide and type(state).tensors is State.tensors:
            raise LayoutError(
                f"Tensor {wide[0]!r} is float64, and {type(state).__name__} would put it back rounded to float32: give "
                "it tensors() and load() of its own, or leave out keep_average."
            )
        self._state, self._average = state, np.zeros(state.layout.exchanged, np.float32)
        self._backup: dict[str, Tensor] = {}  # Training weights by name, while the average is shown.

    def mix_in(self, share: float, part: Part) -> None:
        weights = np.empty_like(self._average)
        self._state.read(weights)
        if part is not None:
            difference = weights[part] - self._average[part]
            self._average[part] = (
                weights[part] if share == 1.0 else self._average[part] + np.float32(share) * difference
            )
        elif share == 1.0:
            self._average = weights
        else:
            torch.from_numpy(self._average).lerp_(torch.from_numpy(weights), share)

    def show(self) -> None:
        vector = np.empty(self._state.layout.size, np.float32)
        if vector.size > self._average.size:
            self._state.read(vector)  # The frozen weights at its end stay as they are.
        vector[: self._average.size] = self._average
        self._backup = {name: tensor.clone() for name, tensor in self._state.tensors().items()}
        self._state.write(vector)

    def put_back(self) -> None:
        if self._backup:
            self._state.load(self._backup)
            self._backup = {}

    def training_weights(self) -> dict[str, Tensor]:
        names = {segment.name for segment in exchanged_segments(self._state.layout)}
        return {name: tensor for name, tensor in self._backup.items() if name in names}

    def load(self, tensors: Mapping[str, Tensor]) -> bool:
        fitting = fitting_tensors(tensors, self._state.layout)
        if fitting:
            self._average = torch.cat([tensor.to(torch.float32).reshape(-1) for tensor in fitting]).numpy()
        return bool(fitting)


def exchanged_segments(layout: Layout) -> list[Segment]:
    """Return the segments that exchanges carry, in their order."""
    return [segment for segment in layout.segments if segment.kind != "frozen"]


def fitting_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> list[Tensor]:
    """Return the tensors of the exchanged segments, or none if one is missing or has another shape."""
    candidates = [(tensors.get(segment.name), segment.shape) for segment in exchanged_segments(layout)]
    fitting = [tensor for tensor, shape in candidates if tensor is not None and tuple(tensor.shape) == shape]
    return fitting if len(fitting) == len(candidates) else []
