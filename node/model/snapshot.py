"""The state of a torch model: copies between its live tensors and one flat float32 host vector, at a step boundary.

Only the training thread touches live tensors, between two steps. On the host a copy is one C++ call that makes a view
of the vector for each tensor (1 us each), and one foreach call that moves them all. The views are not cached, since a
cache would keep every vector alive. On CUDA, :mod:`node.model.device` copies.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossip.arithmetic.moments import MomentForm
from gossip.averaging.vectors import Moments, Statistics, Vector
from gossip.errors import LayoutError
from node.model.device.copies import Copies, combined
from node.model.device.downloads import Downloads
from node.model.device.guard import StepGuard
from node.model.device.streams import CopyStreams, CopyTimes
from node.model.device.uploads import Change, PortionUpload, Relay, UpdateUpload, Uploads, change_of
from node.model.flat import (
    add,
    add_and_read,
    add_scaled,
    are_float32_on_cpu,
    count_elements,
    device_runs,
    host_tensor,
    is_kernel_faster,
    pieces_in_range,
    views_like,
)
from node.model.inventory.items import Choices, Inventory
from node.model.inventory.probe import MixProbe
from node.model.inventory.statistics import StatisticsMixer
from node.model.inventory.words import read_words, write_words
from node.model.optimizer.moments import LiveMoments
from node.model.optimizer.optimizer_state import OptimizerState
from node.model.optimizers import Optimizers
from node.model.sparse import SparseCopies
from node.model.state import Floats, Positions, State
from node.model.tensors import LiveTensors, local_part

# The smallest host vector with pages of its own. They return to the system; an allocator may keep smaller ones.
MAPPED_ELEMENTS = 1 << 16


class TorchState(State):
    """The tensors and the optimizers of torch that a node trains, whole in this process or sharded over several.

    Attributes:
        live_tensors: The tensors.
        optimizers: The optimizers.
        probe: Notices mixes that the next step undoes.
        state_refusal: Why the last newcomer's weights came without the optimizer's state.
        donated: The frozen weights that newcomers take, as a clause.
    """

    optimizer_state: OptimizerState
    moments: LiveMoments
    donated = "as it is at their donor"

    def __init__(self, tensors: LiveTensors, optimizers: Optimizers, optimizer_state: OptimizerState) -> None:
        self.live_tensors, self.optimizers, self.optimizer_state = tensors, optimizers, optimizer_state
        self.layout, self.moments, self.state_refusal = tensors.layout, LiveMoments(optimizer_state), ""
        self.probe = MixProbe(self.exchanged_tensors, optimizer_state.kinds)

    def exchanged_tensors(self) -> list[Tensor]:
        """Return the live tensors that exchanges carry, in the layout's order."""
        return [tensor for _, tensor in self.live_tensors.named("parameter", "buffer")]

    @torch.no_grad()
    def spoiled_tensor(self) -> str:
        named = self.live_tensors.named("parameter", "buffer", "frozen")
        return next((name for name, tensor in named if not bool(torch.isfinite(local_part(tensor)).all())), "")

    def inventory(self) -> Inventory:
        """Return all tensors of the model and of its optimizers, each with its treatment."""
        mixed = partial(self.moments.mixed_names, mix_state=self.mix_state)
        return Inventory([*self.live_tensors.items, *self.optimizer_state.items(mixed)])


class ModelState(TorchState):
    """A model's floating-point tensors, and its optimizers', as flat float32 vectors.

    A module contributes its parameters (tied ones once), then its persistent floating-point buffers, frozen parameters,
    and the bits of all other tensors (:mod:`node.model.inventory.items`). A mapping may name tensors, writable numpy
    arrays, or writable objects with ``__dlpack__``. All of these are parameters, shared and never copied.

    A vector of the weights follows the layout. It may end before the frozen tensors. The vector that newcomers take has
    the whole layout, followed by the optimizers' state. That is, for each of :attr:`optimizer_keys`, the tensors of all
    trained parameters in the layout's order. A trained parameter is averaged and in an optimizer.

    Args:
        model: A module, or a mapping of names to tensors and arrays.
        optimizers: As for :class:`Optimizers`.
        choices: The treatments that the user chose.

    Raises:
        LayoutError: Here, if a tensor cannot be exchanged. In any later call, if a tensor was replaced by another
            object, or changed its shape or dtype. ``load_state_dict()`` and ``to(device)`` are allowed.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Any], optimizers: object = None, choices: Choices | None = None
    ) -> None:  # fmt: skip
        optimizers = optimizers if isinstance(optimizers, Optimizers) else Optimizers(optimizers)
        tensors = LiveTensors(model, choices)
        super().__init__(tensors, optimizers, OptimizerState(tensors, optimizers))
        self._streams, self._guard = CopyStreams(), StepGuard(optimizers.all)
        self._downloads, self._uploads = Downloads(self._streams, self._guard), Uploads(self._streams)
        self._sparse = SparseCopies(tensors, self._guard, self._downloads, self._uploads)
        self._mixer = StatisticsMixer()
        self._mixer.begin(self._buffers())
        self._exchanged_count = sum(segment.kind in ("parameter", "buffer") for segment in self.layout.segments)
        self._largest = max(self.exchanged_tensors(), key=Tensor.numel, default=torch.empty(0))
        self.locks = self.device is not None
        if self.locks:  # Now rather than at the first copy, so that by then the guard has seen the optimizers step.
            self._guard.arm()
        self.adds_weighted = is_kernel_faster(self.exchanged_tensors(), self.layout.exchanged)

    @property
    def changes(self) -> int:  # type: ignore[override]
        """Return how often the largest tensor was written in place. Torch does not count writes through ``.data``."""
        return 0 if self._largest.is_inference() else self._largest._version

    def addresses(self) -> dict[int, str]:
        """Return the names of these tensors by their addresses in memory; empty ones have none."""
        named = self.live_tensors.named("parameter", "buffer")
        return {tensor.data_ptr(): name for name, tensor in named if tensor.numel()}

    def sound(self) -> bool:
        """Return True if every weight is finite. Waits for the device."""
        return not self.spoiled_tensor()

    def enter_thread(self) -> None:
        """Use the model's device in this thread, where another call would open a context on the first device."""
        device = self.device
        if device is not None:
            torch.cuda.set_device(device)

    @property
    def device(self) -> torch.device | None:
        """Return the CUDA device of the model, of its first tensor there if there are several; None if none is."""
        return next((tensor.device for tensor in self.live_tensors.unchecked() if tensor.is_cuda), None)

    def record_copies(self) -> CopyTimes:
        """Record from now on when copies between a CUDA device and the host run, and return the record."""
        times = self._streams.times = CopyTimes()
        return times

    def buffer(self, elements: int) -> Floats:
        """Return a host vector to read into and add from. It is page-locked for CUDA, so that copies overlap."""
        pinned = self.device is not None
        if elements >= MAPPED_ELEMENTS and not pinned:  # The first thread that writes there takes the page faults.
            return Vector.mapped(elements).array
        host: Floats = torch.zeros(elements, dtype=torch.float32, pin_memory=pinned, device="cpu").numpy()
        return host

    def takes(self, vector: Floats) -> bool:
        """Return True if no vector has to be page-locked, so that any memory will do."""
        return self.device is None

    def read(self, out: Floats) -> None:
        """Copy the live tensors into ``out``. On CUDA this takes no memory for another copy, because nothing trains."""
        self.begin_read(out, constant=True).wait()

    def begin_read(self, out: Floats, constant: bool = False) -> Copies:
        """Begin to read the weights as they are now. On CUDA later steps overlap with the copy and do not change it.

        ``constant`` is as for :meth:`Downloads.begin`.
        """
        began = time.perf_counter()
        if out.size == self.layout.size:
            read_words(self.layout, self.live_tensors.bits(), out[self.layout.frozen_stop :], self.layout.frozen_stop)
            out = out[: self.layout.frozen_stop]
        live = self._weights(out.size)
        if is_kernel_faster(live, out.size):
            copies, self.finite = Copies(), add_and_read(live, host_tensor(out, count_elements(live)))
        else:
            copies, self.finite = self._begin_read(live, out, constant), None
        self.locks = bool(copies.events)  # The program may have moved the model to a device, or back.
        self.copy_s = time.perf_counter() - began
        return copies

    def begin_read_piece(self, out: Floats, start: int) -> Copies:
        """Begin to read the weights from element ``start`` on, as :meth:`begin_read`."""
        return self._begin_read(list(pieces_in_range(self.exchanged_tensors(), start, start + out.size)), out)

    def begin_read_optimizer(self, out: Floats, start: int) -> Copies:
        """Begin to read the optimizers' state from ``start``, an index in the vector that newcomers take."""
        state_range = self.optimizer_range()
        assert state_range.start <= start <= start + out.size <= state_range.stop, "the state is no longer so long"
        first = start - state_range.start
        return self._begin_read(
            list(pieces_in_range(self.optimizer_state.tensors(self.optimizer_keys), first, first + out.size)), out
        )

    def begin_read_moments(self, rows: Floats, form: MomentForm, start: int, stop: int) -> Copies:
        """Begin to read elements [start, stop) of each moment into its row; NaN if the moments are others by now."""
        if form != self.moments.current:
            rows.fill(np.nan)
            return Copies()
        return self.moments.begin_read(self._begin_read, rows, start, stop)

    def mix_moments(self, moments: Moments) -> Copies | None:
        """Mix a partner's moments, unless ours are others by now (None); on CUDA later steps see it, and none waits."""
        if moments.form != self.moments.current:
            return None
        self._guard.order_after_copies()
        values = torch.from_numpy(moments.rows.reshape(-1))
        device = self.device or values.device
        return self._uploads.change_whole([(device, values, lambda _, flat: self.moments.mix(moments, flat))])

    @torch.no_grad()
    def _begin_read(self, tensors: list[Tensor], out: Floats, constant: bool = False) -> Copies:
        copies: list[Copies] = []
        for device, live, host in device_runs(tensors, out):
            if device.type == "cuda":
                copies.append(self._downloads.begin(device, live, host, constant))
            else:
                torch._foreach_copy_(views_like(host, live), live)
        return combined(copies)

    def has_positions(self, positions: Positions) -> bool:
        return self.device is None or self._sparse.has(positions)

    def prepare_positions(self, positions: Positions) -> None:
        if self.device is not None:
            self._sparse.prepare(positions)

    def begin_read_at(self, out: Floats, positions: Positions) -> Copies:
        """Begin to read the weights at these ascending positions, which must not change; ``out`` has as many."""
        return self._sparse.begin_read(out, positions)

    @torch.no_grad()
    def read_frozen(self, out: Floats, start: int) -> None:
        """Read frozen weights, or bits, from ``start`` on. Any thread may do so, since no mix changes them."""
        if start >= self.layout.frozen_stop:
            read_words(self.layout, self.live_tensors.bits(), out, start)
            return
        live = list(pieces_in_range(self.live_tensors.unchecked(), start, start + out.size))
        torch._foreach_copy_(views_like(torch.from_numpy(out), live), live)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Move what follows the weights along with them, and note the displacement, while a mix changes them."""
        with self.optimizer_state.moving(), self.probe.mixing():
            yield

    def add_at(self, shift: Floats, positions: Positions) -> Copies:
        """Add ``shift`` at these ascending positions, which must not change; it has as many elements."""
        with self._moving():
            return self._sparse.add(shift, positions)

    def add(self, shift: Floats) -> Copies:
        """Add ``shift`` to the weights, each in its own dtype, rounded once; later work of the device sees the sum.

        On CUDA ``shift`` may be overwritten once the returned copies are done.
        """
        return self._apply(shift, change_of(None))

    def mix_statistics(self, statistics: Statistics) -> Copies:
        """Begin to move the live statistics towards a partner's; on CUDA later steps see the result, and none waits."""
        self._guard.order_after_copies()
        buffers = self._buffers()

        def change(_: list[Tensor], values: Tensor) -> None:
            self._mixer.mix(buffers, statistics, values)

        return self._uploads.change_whole([(buffers[0].device, torch.from_numpy(statistics.values), change)])

    def statistics_shift(self, statistics: Statistics) -> Floats:
        return self._mixer.shift(self._buffers(), statistics).cpu().numpy()

    def _buffers(self) -> list[Tensor]:
        return [tensor for _, tensor in self.live_tensors.named("buffer")]

    def add_weighted(self, shift: Floats, weight: float) -> Copies:
        live = self._weights(shift.size)
        if is_kernel_faster(live, shift.size):
            with self._moving():
                add_and_read(live, host_tensor(shift, count_elements(live)), weight, copy_back=False)
            return Copies()
        return self._apply(shift, partial(add, weight=weight))

    @torch.no_grad()
    def add_read(self, shift: Floats, weight: float) -> bool:
        """Add as :meth:`add_weighted`, then read the sum into ``shift``.

        Return False, with nothing changed, for tensors that gain nothing from it.
        """
        live = self._weights(shift.size)
        if not are_float32_on_cpu(live):
            return False
        with self._moving():
            self.finite = add_and_read(live, host_tensor(shift, count_elements(live)), weight)
        return True

    @torch.no_grad()
    def add_scaled(self, values: Floats, factor: float, version: int) -> bool:
        """Add ``factor * values``; on CUDA the values are page-locked, and each boundary adds a part."""
        self._guard.order_after_copies()
        runs = list(device_runs(self._weights(values.size), values))
        with self.optimizer_state.moving():
            return self._uploads.sweep(runs, partial(add_scaled, factor=factor), version)

    def merge(self, vector: Floats, weight: float) -> Copies:
        """Add ``weight * (vector - weights)``, as :meth:`add`."""
        return self._apply(vector, change_of(weight), 1)

    def begin_upload(self, values: Floats) -> UpdateUpload | None:
        """Begin to copy an update's values to the device, ahead of the boundary that applies it.

        Any thread may call it. Returns None for a model on the host, and if no device has memory for the values.
        """
        try:
            if not self.locks:
                return None
            parts = self._uploads.begin_ahead(list(device_runs(self._weights(values.size), values)))
        except LayoutError:
            return None  # The boundary raises it where the user sees it.
        return UpdateUpload(partial(self._apply, values, ahead=parts), parts) if any(parts) else None

    def begin_relay(
        self, elements: int, ratio: float | None, relay: Relay, values: Floats | None = None
    ) -> UpdateUpload | None:
        """Prepare an update whose values go from rank 0's device to those of the other ranks.

        It has its memory already, so that no rank that has announced it fails for want of some.

        Args:
            elements: The number of values.
            ratio: The ratio of a merge; None for an addition.
            relay: Sends a portion of values on the device, or receives them, in the order of the current stream.
            values: The values, on rank 0.

        Returns:
            The update. None if the model is not on one CUDA device, or if that has no memory for a portion (on rank 0:
            for two portions).
        """
        live = self._weights(elements)
        device, host = live[0].device, None if values is None else host_tensor(values, elements)
        if any(tensor.device != device for tensor in live):
            return None
        # A rank that receives does so in the current stream, in which a second buffer would gain nothing.
        buffers, scratch = 1 if host is None else 2, 0 if ratio is None else 1
        upload = self._uploads.allocate(device, live, buffers, scratch, can_shrink=False)
        if upload is None:
            return None

        @torch.no_grad()
        def apply(change: Change, _: int) -> Copies:
            self._guard.order_after_copies()
            with self._moving():
                return upload.finish(live, host, change, relay)

        return UpdateUpload(apply, [upload])

    @torch.no_grad()
    def _apply(
        self, vector: Floats, change: Change, scratch: int = 0, *, ahead: Sequence[PortionUpload | None] = ()
    ) -> Copies:
        """Apply ``change`` with this vector on every device; for the other arguments see :meth:`Uploads.apply`."""
        self._guard.order_after_copies()
        with self._moving():
            return self._uploads.apply(list(device_runs(self._weights(vector.size), vector)), change, scratch, ahead)

    @torch.inference_mode(False)  # An optimizer cannot step with state that is made under it.
    @torch.no_grad()
    def write(
        self, vector: Floats, optimizer_keys: Sequence[str] = (), scalars: Mapping[str, float] | None = None,
        weights: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Overwrite the weights, and with ``optimizer_keys`` the optimizer's state, from another node's vector.

        Missing optimizer state is created (a joiner's fresh Adam). ``param_groups`` stay as they are.

        Args:
            vector: The weights, followed by the trained parameters' state for each key, as newcomers take it.
            optimizer_keys: Names of the state tensors in the vector.
            scalars: Scalars of the state, set for every trained parameter.
            weights: The first tensors of the layout, as far as they are overwritten; by default all of them.

        Raises:
            LayoutError: The vector, or the state's names, do not fit; nothing has changed then. With half of its state
                Adam would fail in its next step.
        """
        keys, scalars = tuple(optimizer_keys), dict(scalars or {})
        weights = self.live_tensors.current() if weights is None else weights
        examples = self.optimizer_state.examples(keys, scalars)
        host = host_tensor(vector, self.layout.size + len(keys) * self.trained_elements)
        state = self.optimizer_state.create(keys, examples)
        self._guard.order_after_copies()
        following = self.optimizer_state.moving() if not keys else contextlib.nullcontext()
        with following, self._mixer.keeping(self._buffers()):
            torch._foreach_copy_(weights, views_like(host[: count_elements(weights)], weights))
        self._mixer.begin(self._buffers())
        write_words(self.layout, self.live_tensors.bits(), vector)
        position = self.layout.size
        for parameter, target in zip(self.optimizer_state.trained() * len(keys), state, strict=True):
            if target is not None:
                target.copy_(host[position : position + parameter.numel()].view(parameter.shape))
            position += parameter.numel()
        self.optimizer_state.set_scalars(scalars, examples)
        self.optimizer_state.drop_unused(keys)
        if keys:
            self.moments.bound()

    @torch.no_grad()
    def adopt(
        self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float],
        weights: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Overwrite the weights, and the optimizer's state if it is that of such an optimizer.

        Otherwise this optimizer keeps its state, except where that is not finite. :attr:`state_refusal` says why.
        """
        self.state_refusal = ""
        if optimizer_keys:
            try:
                self.write(vector, optimizer_keys, scalars, weights)
                return
            except LayoutError as error:
                self.state_refusal = str(error)
        self.write(vector[: self.layout.size], weights=weights)
        self.optimizer_state.clear_non_finite()  # It would spoil sound weights in the next step.

    def adopt_exchanged(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        self.adopt(vector, optimizer_keys, scalars, self.exchanged_tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return a module's ``state_dict()``, integers included, or all of a mapping, by plain names."""
        return self.live_tensors.saved()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what :meth:`tensors` returned. Raise :class:`CheckpointError` before anything changes."""
        self._guard.order_after_copies()
        with self.optimizer_state.moving():
            self.live_tensors.load(tensors)
        self.optimizer_state.clear_non_finite()  # As after _adopt: sound weights may follow spoiled ones.
        self._mixer.begin(self._buffers())

    def _weights(self, elements: int) -> list[Tensor]:
        """Return the tensors that a vector of this length covers: all values, or the exchanged ones."""
        tensors = self.live_tensors.current()
        return tensors if elements == self.layout.frozen_stop else tensors[: self._exchanged_count]


def device_of(state: State) -> torch.device | None:
    """Return the CUDA device of a model, None if it has none."""
    device: torch.device | None = getattr(state, "device", None)
    return device
