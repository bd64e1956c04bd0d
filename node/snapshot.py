"""A live model <-> one flat float32 host vector, at a step boundary.

The training thread calls in here between two steps; nobody else ever touches live tensors. A copy is two or three large
calls: one C++ call cuts the flat buffer into tensors of the right shapes, one foreach call moves them all. (Cutting
takes 1 us a tensor, so the pieces are not kept: a cache of them would pin every buffer it ever saw.)

The CUDA branch is written for, and tested as far as CPU allows; it is not yet measured.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import from_dlpack

from gossip.errors import LayoutError
from gossip.layout import Kind, Layout, Segment

__all__ = ["MAX_OPTIMIZER_KEYS", "ModelState", "Parts", "Pending"]

Parts = Literal["weights", "full"]
Floats = NDArray[np.float32]
Owner = Mapping[str, Any]  # the dictionary that holds a tensor: a module's parameters or buffers, or the user's mapping

MAX_OPTIMIZER_KEYS = 4
"""Tensors of a parameter's shape that an optimizer keeps for it: Adam with amsgrad and centred RMSprop keep 3."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A copy under way. Until it is done, the host array is not to be read (after a read) or written (after an add)."""

    events: tuple[torch.cuda.Event, ...] = ()

    def done(self) -> bool:
        """Whether the copy has finished; always true on CPU. May be asked from any thread."""
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until it has."""
        for event in self.events:
            event.synchronize()


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of the layout lives: looked up anew at each use, since ``module.to()`` replaces buffers."""

    name: str
    owner: Owner
    key: str
    source: object  # the object that must still be there; None for a buffer, which may be replaced
    shape: torch.Size
    dtype: torch.dtype


class ModelState:
    """A model's floating-point tensors, and its optimizer's, as flat float32 vectors.

    ``model`` is a module: its parameters (tied ones once, frozen ones too), then its persistent floating-point buffers.
    Or it is a mapping of names to tensors, writable numpy arrays, or anything with ``__dlpack__`` that may be written:
    all of them are parameters, shared and never copied. Integer and boolean tensors are left alone in both.

    The vector of parts "weights" is the layout's. "full" continues with the optimizer's state: for each of
    :attr:`optimizer_keys`, the tensors of all trained parameters in the layout's order. A trained parameter requires a
    gradient and is held by the optimizer.

    Raises :class:`LayoutError`: here for what cannot be exchanged, and at any later call when a tensor was replaced by
    another object, or changed its shape or dtype, since. ``load_state_dict()`` and ``to(device)`` are no such change.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._modules: tuple[tuple[nn.Module, str, nn.Module], ...] = ()  # (parent, name, child)
        self._shared: dict[str, Tensor] = {}  # tensors over memory that is not torch's, by name
        segments: list[Segment] = []
        slots: list[Slot] = []
        places: set[object] = set()
        for name, owner, key, kind in self._walk(model):
            tensor: Tensor = self._shared[name] if name in self._shared else owner[key]
            if is_lazy(tensor):
                raise LayoutError(f"Tensor {name!r} has no shape yet: run one batch through the model first.")
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            if tensor.layout != torch.strided or tensor.is_meta:
                raise LayoutError(f"Tensor {name!r} is sparse or has no memory: only dense tensors can be averaged.")
            # One tensor under two names (tied weights in a state_dict) is added to once, as in a module.
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if not isinstance(model, nn.Module) and tensor.numel() and place in places:
                continue
            places.add(place)
            segments.append(Segment(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind))
            slots.append(
                Slot(name, owner, key, owner[key] if kind == "parameter" else None, tensor.shape, tensor.dtype)
            )
        self.layout = Layout(segments)
        by_name = {slot.name: slot for slot in slots}
        self._slots = tuple(by_name[segment.name] for segment in self.layout.segments)
        self._optimizer = optimizer
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        if optimizer is not None and not self._held():
            raise LayoutError(
                "The optimizer holds none of this model's tensors: build it from the parameters of the model given."
            )

    @property
    def optimizer_keys(self) -> tuple[str, ...]:
        """Names of the float state that the optimizer keeps for EVERY trained parameter in its shape, sorted.

        Empty before the first optimizer step, for an optimizer without state, and without an optimizer.
        """
        if self._optimizer is None:
            return ()
        keys: set[str] | None = None
        for parameter in self._trained():
            state = self._optimizer.state.get(parameter, {})
            # "step" is a scalar by meaning: for a model of scalars alone its shape would not tell.
            mine = {k for k, v in state.items() if k != "step" and _is_state_of(v, parameter)}
            keys = mine if keys is None else keys & mine
            if not keys:
                return ()
        found = tuple(sorted(keys or ()))
        if len(found) > MAX_OPTIMIZER_KEYS:
            raise LayoutError(
                f"The optimizer keeps {len(found)} tensors for each parameter and at most {MAX_OPTIMIZER_KEYS} are "
                "exchanged: leave average_optimizer off."
            )
        return found

    def optimizer_scalars(self) -> dict[str, float]:
        """The scalars among the optimizer's state (``step``), for a node that takes this one's state over.

        The largest over the parameters: one that gets a gradient in every step has it, and a bias correction that is
        too small only makes the next steps smaller.
        """
        keys = self.optimizer_keys
        if not keys:
            return {}
        scalars: dict[str, float] = {}
        for parameter in self._trained():
            for key, value in self._state(parameter).items():
                if key not in keys and _is_scalar(value):
                    scalars[key] = max(float(value), scalars.get(key, -math.inf))
        return scalars

    @property
    def trained_elements(self) -> int:
        """Elements of the trained parameters, which is what each of :attr:`optimizer_keys` takes in the vector."""
        return sum(p.numel() for p in self._trained()) if self._optimizer is not None else 0

    def size(self, parts: Parts = "weights") -> int:
        """Elements of the vector of those parts, now: "full" grows when the optimizer first keeps state."""
        if parts == "weights":
            return self.layout.size
        return self.layout.size + len(self.optimizer_keys) * self.trained_elements

    def buffer(self, elements: int) -> Floats:
        """A host vector to read into and add from: page-locked where the model is on CUDA, so that copies overlap."""
        pinned = any(tensor.is_cuda for tensor in self._weights())
        host: Floats = torch.zeros(elements, dtype=torch.float32, pin_memory=pinned).numpy()
        return host

    def read(self, out: Floats, parts: Parts = "weights") -> None:
        """Copy the live tensors into ``out``, float32 of ``size(parts)`` elements."""
        self.begin_read(out, parts).wait()

    @torch.no_grad()
    def begin_read(self, out: Floats, parts: Parts = "weights") -> Pending:
        """As :meth:`read`, as of now: later steps change nothing of it, and on CUDA the copy ends beside them."""
        events: list[torch.cuda.Event] = []
        for device, live, host in self._runs(out, parts):
            if device.type != "cuda":
                torch._foreach_copy_(_cut(host, live), live)
                continue
            flat = torch.empty(host.numel(), dtype=torch.float32, device=device)
            torch._foreach_copy_(_cut(flat, live), live)
            side = self._side_stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                host.copy_(flat, non_blocking=True)
            flat.record_stream(side)  # or the allocator hands it out again while it is being read
            events.append(side.record_event())
        return Pending(tuple(events))

    def add(self, shift: Floats, parts: Parts = "weights") -> Pending:
        """``live += shift``, each tensor in its own dtype, rounded once; later work of the device sees the sum.

        On CUDA ``shift`` may be written again once the returned copy is done.
        """
        return self._apply(shift, parts, _add)

    def merge(self, vector: Floats, weight: float, parts: Parts = "weights") -> Pending:
        """``live += weight (vector - live)``, as :meth:`add`."""
        return self._apply(vector, parts, partial(_merge, weight=weight))

    @torch.no_grad()
    def _apply(self, vector: Floats, parts: Parts, change: Callable[[list[Tensor], Tensor], None]) -> Pending:
        events: list[torch.cuda.Event] = []
        for device, live, host in self._runs(vector, parts):
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
        return Pending(tuple(events))

    @torch.no_grad()
    def write(
        self,
        vector: Floats,
        optimizer_keys: Sequence[str] = (),
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Overwrite the weights, and with ``optimizer_keys`` the optimizer's state, from another node's vector.

        ``vector`` is the weights followed by the trained parameters' state for each key, as a "full" read gives it.
        State that the optimizer does not have yet is created (a joiner's fresh Adam); ``scalars`` go to every trained
        parameter; ``param_groups`` stay as they are. Raises :class:`LayoutError` before the first tensor changes, also
        for state that this optimizer would not keep itself: with half of its state Adam fails in its next step.
        """
        keys, numbers = tuple(optimizer_keys), dict(scalars or {})
        if len(keys) > MAX_OPTIMIZER_KEYS or len(numbers) > MAX_OPTIMIZER_KEYS or len(set(keys)) < len(keys):
            raise LayoutError(f"Optimizer state is at most {MAX_OPTIMIZER_KEYS} different keys, and as many scalars.")
        if not all(isinstance(key, str) and key.isidentifier() for key in (*keys, *numbers)):
            raise LayoutError("A key of optimizer state is not a name.")
        if not all(isinstance(number, float) and 0.0 <= number < math.inf for number in numbers.values()):
            raise LayoutError("A scalar of optimizer state is negative or not finite.")
        kept = self._kept(keys, numbers) if keys or numbers else {}
        trained = self._trained() if self._optimizer is not None else []
        live = self._weights()
        host = _host(vector, self.layout.size + len(keys) * sum(p.numel() for p in trained))
        for key in keys:
            for parameter in trained:
                state = self._state(parameter)
                if not _is_state_of(state.get(key), parameter):
                    state[key] = torch.zeros_like(parameter, dtype=kept[id(parameter)][key].dtype)
                live.append(state[key])
        torch._foreach_copy_(live, _cut(host, live))
        for key, number in numbers.items():
            for parameter in trained:
                state, example = self._state(parameter), kept[id(parameter)][key]
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                elif isinstance(example, Tensor):  # on the host, but beside the parameter when fused or captured
                    beside = parameter.device if example.is_cuda else example.device
                    state[key] = torch.full_like(example, number, device=beside)
                else:
                    state[key] = type(example)(number)

    # -- what is live ---------------------------------------------------------------------------------------------

    def _walk(self, model: nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Owner, str, Kind]]:
        """Every tensor with its name, the dictionary that holds it, and its key there."""
        if isinstance(model, nn.Module):
            self._modules = tuple(
                (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
            )
            saved = model.state_dict(keep_vars=True).keys()  # tells persistent buffers from others
            for name, _ in model.named_parameters():
                path, _, key = name.rpartition(".")
                yield _plain_name(name), model.get_submodule(path)._parameters, key, "parameter"
            for name, _ in model.named_buffers():
                path, _, key = name.rpartition(".")
                if name in saved:
                    yield _plain_name(name), model.get_submodule(path)._buffers, key, "buffer"
        elif isinstance(model, Mapping):
            for name, value in model.items():
                if not isinstance(name, str):
                    raise LayoutError(f"A tensor's name is {name!r}: names in the mapping must be text.")
                if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
                    continue
                if not isinstance(value, Tensor):
                    self._shared[name] = _share(name, value)
                yield name, model, name, "parameter"
        else:
            raise LayoutError(
                f"A model is a torch module or a mapping of names to tensors, not {type(model).__name__}."
            )

    def _weights(self) -> list[Tensor]:
        """The live tensors in the layout's order, each still the one that the layout describes.

        One Python loop, of lookups alone: 0.2 us a tensor, once an exchange.
        """
        for parent, name, child in self._modules:
            if parent._modules.get(name) is not child:
                raise LayoutError(f"Submodule {name!r} was replaced while the node was running: make a new Node.")
        tensors: list[Tensor] = []
        for slot in self._slots:
            found: Any = slot.owner.get(slot.key)
            if found is None or (slot.source is not None and found is not slot.source):
                raise LayoutError(
                    f"Tensor {slot.name!r} was replaced while the node was running: write into it in place, or make a "
                    "new Node."
                )
            tensor: Tensor = self._shared.get(slot.name, found)
            if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
                raise LayoutError(
                    f"Tensor {slot.name!r} was {slot.dtype} {tuple(slot.shape)} and is now {tensor.dtype} "
                    f"{tuple(tensor.shape)}: make a new Node after changing a model."
                )
            tensors.append(tensor)
        return tensors

    def _held(self) -> list[Tensor]:
        """The layout's tensors that the optimizer holds, in the layout's order."""
        assert self._optimizer is not None
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return [tensor for tensor in self._weights() if id(tensor) in held]

    def _trained(self) -> list[Tensor]:
        return [tensor for tensor in self._held() if tensor.requires_grad]

    def _tensors(self, parts: Parts) -> list[Tensor]:
        tensors = self._weights()
        keys = self.optimizer_keys if parts == "full" else ()
        if keys:
            trained = self._trained()
            tensors += [self._state(parameter)[key] for key in keys for parameter in trained]
        return tensors

    def _runs(self, vector: Floats, parts: Parts) -> Iterator[tuple[torch.device, list[Tensor], Tensor]]:
        """Consecutive tensors on one device, with their piece of the host vector: one run, but for a split model."""
        tensors = self._tensors(parts)
        host = _host(vector, sum(tensor.numel() for tensor in tensors))
        start = 0
        for device, run in groupby(tensors, key=lambda tensor: tensor.device):
            live = list(run)
            end = start + sum(tensor.numel() for tensor in live)
            yield device, live, host[start:end]
            start = end

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of the host copies, so that training goes on beside them."""
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._side[device]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state[parameter]  # a defaultdict: created where there is none yet
        return state

    def _kept(self, keys: Sequence[str], numbers: Mapping[str, float]) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps, by the id of each trained parameter; raises unless these names are exactly that.

        A fresh optimizer keeps nothing yet and no table knows every optimizer, so a copy of it takes one step on a
        parameter of its own, with the options of each group.
        """
        if self._optimizer is None:
            raise LayoutError("There is no optimizer to write state into: give Node the optimizer, or weights alone.")
        name = type(self._optimizer).__name__
        trained = {id(parameter) for parameter in self._trained()}
        kept: dict[int, dict[str, Any]] = {}
        for group in self._optimizer.param_groups:
            members = trained & {id(parameter) for parameter in group["params"]}
            if not members:
                continue
            try:
                parameter, state = _tried(self._optimizer, group)
            except Exception as error:  # a user's own optimizer may raise anything
                raise LayoutError(f"What {name} keeps cannot be told ({error}): take the weights alone.") from error
            tensors = {key for key, value in state.items() if key != "step" and _is_state_of(value, parameter)}
            scalars = {key for key, value in state.items() if key not in tensors and _is_scalar(value)}
            if (tensors, scalars) != (set(keys), set(numbers)) or len(state) > len(tensors | scalars):
                raise LayoutError(
                    f"{name} keeps {_listed(state)} for each parameter and was given {_listed([*keys, *numbers])}: "
                    "use the swarm's optimizer, or leave average_optimizer off."
                )
            kept.update(dict.fromkeys(members, state))
        return kept


def _tried(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A parameter like those of the group, and what the optimizer keeps for it after one step."""
    like = group["params"][0]
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
    parameter.grad = torch.zeros_like(parameter)
    probe = copy.copy(optimizer)  # without the user's hooks: torch leaves them out of a copy
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [parameter]}]
    type(optimizer).step(probe)  # the class's, since a scheduler puts its own in front of the instance's
    return parameter, {key: value for key, value in probe.state[parameter].items() if value is not None}


def _cut(flat: Tensor, live: list[Tensor]) -> list[Tensor]:
    """Views of the flat tensor in the shapes of ``live``: the call that DDP and FSDP make, one step into C++."""
    return list(_unflatten_dense_tensors(flat, live))  # type: ignore[no-untyped-call]


def _add(live: list[Tensor], flat: Tensor) -> None:
    torch._foreach_add_(live, _cut(flat, live))


def _merge(live: list[Tensor], flat: Tensor, weight: float) -> None:
    """In float32, whatever the tensors' dtypes: half-precision would round the difference before it is weighted."""
    pieces = _cut(flat, live)
    current = [tensor.float() for tensor in live]  # those of float32 are themselves
    torch._foreach_sub_(pieces, current)
    torch._foreach_mul_(pieces, weight)
    torch._foreach_add_(live, pieces)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _plain_name(name: str) -> str:
    """A compiled module wraps another and puts a prefix before its names; a node that compiles is the same model."""
    return name.replace("_orig_mod.", "")


def _share(name: str, value: Any) -> Tensor:
    """A tensor over the memory of a numpy array, or of another framework's array."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise LayoutError(f"Array {name!r} is read-only, so averages cannot be written to it: pass a writable copy.")
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if hasattr(value, "__dlpack__"):
            return from_dlpack(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise LayoutError(f"Array {name!r} cannot be shared with torch ({error}): pass a plain float array.") from error
    raise LayoutError(f"{name!r} is {type(value).__name__}: the mapping holds tensors, numpy arrays or DLPack arrays.")


def _is_state_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _host(vector: Floats, expected: int) -> Tensor:
    """The host vector as a flat tensor over the same memory."""
    assert vector.dtype == np.float32, vector.dtype
    assert vector.ndim == 1, vector.shape
    assert vector.flags.c_contiguous
    assert vector.flags.writeable
    if vector.size != expected:
        raise LayoutError(
            f"The vector has {vector.size} elements where {expected} belong: the model, or its optimizer's state, "
            "changed since the vector was sized."
        )
    return torch.from_numpy(vector)
