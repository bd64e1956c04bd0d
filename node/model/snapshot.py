"""A live model <-> one flat float32 host vector, at a step boundary.

The training thread calls in here between two steps; nobody else ever touches live tensors. A copy is two or three large
calls: one C++ call cuts the flat buffer into tensors of the right shapes, one foreach call moves them all. (Cutting
takes 1 us a tensor, so the pieces are not kept: a cache of them would pin every buffer it ever saw.)

The CUDA branch is written for, and tested as far as CPU allows; it is not yet measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossip.averaging.vectors import Vector
from gossip.errors import CheckpointError, LayoutError
from node.model.flat import add, add_at, cut, elements, host_of, in_one_pass, merge, plain, runs, stretch, worth
from node.model.optimizer_state import OptimizerState
from node.model.optimizers import Optimizers
from node.model.state import Floats, Positions, State
from node.model.tensors import LiveTensors, plain_name

__all__ = ["Copies", "ModelState"]

MAPPED_ELEMENTS = 1 << 16  # of a host vector that is worth pages of its own


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies under way. Until they are done a host array is not to be read (of a read) or written (of an addition)."""

    events: tuple[torch.cuda.Event, ...] = ()

    def done(self) -> bool:
        """Whether they have finished; always true on CPU. May be asked from any thread."""
        return not self.events or all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until they have."""
        for event in self.events:
            event.synchronize()


class ModelState(State):
    """A model's floating-point tensors, and its optimizers', as flat float32 vectors.

    ``model`` is a module: its parameters (tied ones once), then its persistent floating-point buffers, then parameters
    that are frozen where others are trained, which exchanges leave out (``frozen``: they are parameters as all others).
    Or it is a mapping of names to tensors, writable numpy arrays, or anything with ``__dlpack__`` that may be written:
    all of them are parameters, shared and never copied. Integer and boolean tensors are left alone in both.

    The vector of the weights is the layout's, without what is frozen where it is that much shorter. What newcomers take
    has all of it, and behind it the optimizers' state: for each of :attr:`optimizer_keys`, the tensors of all trained
    parameters in the layout's order. A trained parameter requires a gradient and is held by an optimizer.

    Raises :class:`LayoutError`: here for what cannot be exchanged, and at any later call when a tensor was replaced by
    another object, or changed its shape or dtype, since. ``load_state_dict()`` and ``to(device)`` are no such change.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Any], optimizers: object = None, frozen: bool = False
    ) -> None:  # fmt: skip
        self._model, self._tensors = model, LiveTensors(model, frozen)
        given = optimizers if isinstance(optimizers, Optimizers) else Optimizers(optimizers)
        self._state = OptimizerState(self._tensors, given)
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._held: dict[tuple[torch.device, int], tuple[int, Tensor]] = {}  # what is added again and again
        self.layout = self._tensors.layout
        self._exchanged = sum(segment.kind != "frozen" for segment in self.layout.segments)  # tensors
        self.weighs = worth(self._tensors.current()[: self._exchanged], self.layout.exchanged)

    @property
    def optimizer_keys(self) -> tuple[str, ...]:
        """Names of the float state that is kept for EVERY trained parameter in its shape, sorted.

        Empty before the first optimizer step, for an optimizer without state, without an optimizer, and where several
        do not keep the same.
        """
        return self._state.keys

    def optimizer_scalars(self) -> dict[str, float]:
        """The scalars among the optimizer's state (``step``), for a node that takes this one's state over.

        The largest over the parameters: one that gets a gradient in every step has it, and a bias correction that is
        too small only makes the next steps smaller.
        """
        return self._state.scalars()

    @property
    def trained_elements(self) -> int:
        """Elements of the trained parameters, which is what each of :attr:`optimizer_keys` takes in the vector."""
        return sum(parameter.numel() for parameter in self._state.trained())

    def exchanged(self) -> list[Tensor]:
        """Return the live tensors that exchanges carry, in the layout's order."""
        return self._tensors.current()[: self._exchanged]

    def sound(self) -> bool:
        """Whether every weight is finite. Waits for the device."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self._tensors.current())

    def forget_spoiled(self) -> None:
        """Drop what the optimizer keeps that is not finite: with it the next step would spoil sound weights again."""
        self._state.forget_spoiled()

    def buffer(self, elements: int) -> Floats:
        """A host vector to read into and add from: page-locked where the model is on CUDA, so that copies overlap."""
        pinned = any(tensor.is_cuda for tensor in self._tensors.current())
        if elements >= MAPPED_ELEMENTS and not pinned:
            return Vector.mapped(elements).array  # whose pages are taken by whoever writes there first
        host: Floats = torch.zeros(elements, dtype=torch.float32, pin_memory=pinned).numpy()
        return host

    def takes(self, vector: Floats) -> bool:
        """Where nothing is to be page-locked."""
        return not any(tensor.is_cuda for tensor in self._tensors.current())

    def read(self, out: Floats) -> None:
        """Copy the live tensors into ``out``."""
        self.begin_read(out).wait()

    def begin_read(self, out: Floats) -> Copies:
        """As :meth:`read`, as of now: later steps change nothing of it, and on CUDA the copy ends beside them."""
        began = time.perf_counter()
        live = self._weights(out)
        if worth(live, out.size):
            copies, self.finite = Copies(), in_one_pass(live, host_of(out, elements(live)))
        else:
            copies, self.finite = self._begin_read(live, out), None
        self.copy_s = time.perf_counter() - began
        return copies

    def begin_read_piece(self, out: Floats, start: int) -> Copies:
        """As :meth:`begin_read`, of the weights from ``start`` on."""
        return self._begin_read(list(stretch(self.exchanged(), start, start + out.size)), out)

    def begin_read_optimizer(self, out: Floats, start: int) -> Copies:
        """The optimizers' state, likewise, from ``start`` of what newcomers take on."""
        place = self.optimizer_range()
        assert place.start <= start <= start + out.size <= place.stop, "the optimizer's state is no longer so long"
        first = start - place.start
        return self._begin_read(list(stretch(self._state.tensors(self.optimizer_keys), first, first + out.size)), out)

    @torch.no_grad()
    def _begin_read(self, tensors: list[Tensor], out: Floats) -> Copies:
        events: list[torch.cuda.Event] = []
        for device, live, host in runs(tensors, out):
            if device.type != "cuda":
                torch._foreach_copy_(cut(host, live), live)
                continue
            flat = torch.empty(host.numel(), dtype=torch.float32, device=device)
            torch._foreach_copy_(cut(flat, live), live)
            side = self._side_stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                host.copy_(flat, non_blocking=True)
            flat.record_stream(side)  # or the allocator hands it out again while it is being read
            events.append(side.record_event())
        return Copies(tuple(events))

    @torch.no_grad()
    def begin_read_at(self, out: Floats, positions: Positions) -> Copies:
        """As :meth:`begin_read`, of the weights at these ascending positions alone: ``out`` has as many elements."""
        events: list[torch.cuda.Event] = []
        for device, pieces, host in self._pieces(out, positions):
            if device.type != "cuda":
                for live, at, values in pieces:
                    values.copy_(live.reshape(-1).index_select(0, at))
                continue
            flat = torch.cat([live.reshape(-1).index_select(0, at.to(device)).float() for live, at, _ in pieces])
            side = self._side_stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                host.copy_(flat, non_blocking=True)
            flat.record_stream(side)
            events.append(side.record_event())
        return Copies(tuple(events))

    @torch.no_grad()
    def read_frozen(self, out: Floats, start: int) -> None:
        """The weights from ``start`` on; in any thread, where nobody changes them."""
        live = list(stretch(self._tensors.current(), start, start + out.size))
        torch._foreach_copy_(cut(torch.from_numpy(out), live), live)

    @torch.no_grad()
    def add_at(self, shift: Floats, positions: Positions) -> Copies:
        """As :meth:`add`, at these ascending positions alone: ``shift`` has as many elements."""
        events: list[torch.cuda.Event] = []
        for device, pieces, host in self._pieces(shift, positions):
            if device.type == "cuda":
                current, side = torch.cuda.current_stream(device), self._side_stream(device)
                with torch.cuda.stream(side):
                    host = host.to(device, non_blocking=True)
                events.append(side.record_event())
                current.wait_stream(side)
                host.record_stream(current)
            start = 0
            for live, at, values in pieces:
                add_at(live, at.to(device), host[start : start + values.numel()])
                start += values.numel()
        return Copies(tuple(events))

    def add(self, shift: Floats) -> Copies:
        """``weights += shift``, each in its own dtype, rounded once; later work of the device sees the sum.

        On CUDA ``shift`` may be written again once the returned copy is done.
        """
        return self._apply(shift, add)

    def add_weighted(self, shift: Floats, weight: float) -> Copies:
        live = self._weights(shift)
        if worth(live, shift.size):
            in_one_pass(live, host_of(shift, elements(live)), weight, read=False)
            return Copies()
        return self._apply(shift, partial(add, weight=weight))

    @torch.no_grad()
    def add_read(self, shift: Floats, weight: float) -> bool:
        """:meth:`add_weighted`, and what comes of it read to where ``shift`` lies. Of tensors of another kind than the
        vector's nothing would be won."""
        live = self._weights(shift)
        if not plain(live):
            return False
        self.finite = in_one_pass(live, host_of(shift, elements(live)), weight)
        return True

    @torch.no_grad()
    def add_scaled(self, values: Floats, factor: float, version: int) -> None:
        """Add in one foreach call for each device. A device keeps a copy of its values until they are others."""
        for device, live, host in runs(self._weights(values), values):
            held = host
            if device.type != "cpu":
                of, held = self._held.get((device, host.data_ptr()), (None, host))
                if of != version:
                    held = host.to(device)
                    self._held[device, host.data_ptr()] = version, held
            torch._foreach_add_(live, cut(held, live), alpha=factor)

    def merge(self, vector: Floats, weight: float) -> Copies:
        """``weights += weight (vector - weights)``, as :meth:`add`."""
        return self._apply(vector, partial(merge, weight=weight))

    @torch.no_grad()
    def _apply(self, vector: Floats, change: Callable[[list[Tensor], Tensor], None]) -> Copies:
        events: list[torch.cuda.Event] = []
        for device, live, host in runs(self._weights(vector), vector):
            if device.type != "cuda":
                change(live, host.to(device))
                continue
            current = torch.cuda.current_stream(device)
            side = self._side_stream(device)
            with torch.cuda.stream(side):
                flat = host.to(device, non_blocking=True)
            events.append(side.record_event())
            current.wait_stream(side)
            flat.record_stream(current)
            change(live, flat)
        return Copies(tuple(events))

    @torch.no_grad()
    def write(
        self, vector: Floats, optimizer_keys: Sequence[str] = (), scalars: Mapping[str, float] | None = None
    ) -> None:
        """Overwrite the weights, and with ``optimizer_keys`` the optimizer's state, from another node's vector.

        ``vector`` is the weights followed by the trained parameters' state for each key, as newcomers take it.
        State that the optimizer does not have yet is created (a joiner's fresh Adam); ``scalars`` go to every trained
        parameter; ``param_groups`` stay as they are. Raises :class:`LayoutError` before the first tensor changes, also
        for state that this optimizer would not keep itself: with half of its state Adam fails in its next step.
        """
        keys, numbers = tuple(optimizer_keys), dict(scalars or {})
        examples = self._state.examples(keys, numbers)
        live = self._tensors.current()
        host = host_of(vector, self.layout.size + len(keys) * self.trained_elements)
        live += self._state.create(keys, examples)
        torch._foreach_copy_(live, cut(host, live))
        self._state.set_scalars(numbers, examples)

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """The weights, and the optimizer's state where this optimizer keeps that state: a donor may train with another
        one, and then ours goes on, or begins afresh where it is not finite."""
        if optimizer_keys:
            with contextlib.suppress(LayoutError):
                self.write(vector, optimizer_keys, scalars)
                return
        self.write(vector[: self.layout.size])
        self.forget_spoiled()

    def holds(self, vector: Floats) -> bool:
        """Whether ``vector`` has the optimizers' state too, and is what is here now."""
        place = self.optimizer_range()
        if not place or vector.size != place.stop:
            return False
        here = np.empty_like(vector)
        self.read(here[: place.start])
        self.begin_read_optimizer(here[place.start :], place.start).wait()
        return np.array_equal(here, vector)

    def tensors(self) -> dict[str, Tensor]:
        """A module's ``state_dict()``, with integers and all; of a mapping everything."""
        named = (
            self._model.state_dict() if isinstance(self._model, nn.Module) else {**self._model, **self._tensors.shared}
        )
        return {plain_name(name): torch.as_tensor(value) for name, value in named.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse; raises :class:`CheckpointError` before anything changes."""
        tensors = {plain_name(name): value for name, value in tensors.items()}  # compiled or not: the same model
        held, module = self.tensors(), isinstance(self._model, nn.Module)
        unknown = [f"{name!r} is in the file and not here" for name in tensors if module and name not in held]
        lacking = [f"{name!r} is here and not in the file" for name in held if name not in tensors]
        other = [
            f"{name!r} has shape {tuple(held[name].shape)} here and {tuple(given.shape)} in the file"
            for name, given in tensors.items() if name in held and given.shape != held[name].shape
        ]  # fmt: skip
        for difference in (*lacking, *unknown, *other):
            raise CheckpointError(f"it holds another model than this node's (tensor {difference}).")
        if isinstance(self._model, nn.Module):
            named = {plain_name(name): name for name in self._model.state_dict()}
            self._model.load_state_dict({named[name]: value for name, value in tensors.items()})
            return
        for name, target in held.items():
            target.copy_(tensors[name])

    def _weights(self, vector: Floats) -> list[Tensor]:
        """The tensors that a vector is of, by its length: all, or those that are exchanged."""
        tensors = self._tensors.current()
        return tensors if vector.size == self.layout.size else tensors[: self._exchanged]

    def _pieces(
        self, vector: Floats, positions: Positions
    ) -> Iterator[tuple[torch.device, list[tuple[Tensor, Tensor, Tensor]], Tensor]]:
        """For each device the tensors that have some of these positions, each with where in it they lie and with its
        piece of the host vector; and all of their pieces, as far as they are consecutive."""
        assert vector.size == positions.size
        tensors = self._tensors.current()
        host, places = torch.from_numpy(vector), torch.from_numpy(positions)
        ends = np.cumsum([tensor.numel() for tensor in tensors])
        if positions.size and not 0 <= positions[0] <= positions[-1] < ends[-1]:
            raise LayoutError("Positions lie outside the model, which has changed meanwhile: make a new Node.")
        bounds = np.searchsorted(positions, ends).tolist()
        rows = zip(tensors, [0, *bounds[:-1]], bounds, [0, *ends[:-1].tolist()], strict=True)
        for device, run in groupby((row for row in rows if row[1] < row[2]), key=lambda row: row[0].device):
            held = list(run)
            pieces = [(live, places[low:high] - start, host[low:high]) for live, low, high, start in held]
            yield device, pieces, host[held[0][1] : held[-1][2]]

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of the host copies, so that training goes on beside them."""
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._side[device]
