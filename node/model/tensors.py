"""The live tensors of a model. Their places are found once, and the tensors are looked up there at each use."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import from_dlpack

from gossip.arithmetic.layout import Kind, Layout, Segment
from gossip.errors import CheckpointError, LayoutError
from node.model.sharded.shards import is_sharded

__all__ = ["LiveTensors", "plain_name", "refuse_other_tensors"]

SHARDED = (
    "is sharded over several processes: give Node these processes, on all of them, as "
    "group=torch.distributed.group.WORLD or a group that has them alone."
)
FLATTENED = (
    "is sharded by FullyShardedDataParallel: shard it with torch.distributed.fsdp.fully_shard instead, which keeps "
    "each parameter apart, and give Node the processes as group=."
)
PARTITIONED = (
    "has no elements on this rank: DeepSpeed's ZeRO-3 keeps another part of each parameter on each rank, and a Node "
    "takes models that are whole in each process (ZeRO-1 or 2)."
)
Owner = Mapping[str, Any]  # The dict that holds a tensor: a module's parameters or buffers, or the user's mapping.


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor of the layout. It is looked up at each use, since ``module.to()`` replaces buffers."""

    name: str
    owner: Owner
    key: str
    source: object  # The object that must still be there; None for a buffer, which may be replaced.
    shape: torch.Size
    dtype: torch.dtype
    frozen: bool


class LiveTensors:
    """A module's floating-point parameters and persistent buffers, or a mapping's floating-point tensors.

    If a module trains only some parameters, the others are frozen, unless ``frozen`` exchanges all. See
    :class:`node.model.snapshot.ModelState`. DTensors are refused, unless the model is ``sharded``.

    Raises:
        LayoutError: A tensor cannot be exchanged.
    """

    def __init__(self, model: nn.Module | Mapping[str, Any], frozen: bool = False, sharded: bool = False) -> None:
        trains_some = isinstance(model, nn.Module) and any(parameter.requires_grad for parameter in model.parameters())
        self._has_frozen = trains_some and not frozen  # True: parameters that require no gradient are frozen.
        self._modules: tuple[tuple[nn.Module, str, nn.Module], ...] = ()  # (parent, name, child)
        # Each module with the numbers of its parameters and children, by which new ones are noticed.
        self._counts: tuple[tuple[nn.Module, int, int], ...] = ()
        self.shared: dict[str, Tensor] = {}  # Tensors over memory of other libraries, by name.
        segments: list[Segment] = []
        slots: list[Slot] = []
        views: set[object] = set()  # Address, shape and strides of each tensor so far.
        for name, owner, key, kind in self._named_tensors(model):
            tensor: Tensor = self.shared[name] if name in self.shared else owner[key]
            if is_sharded(tensor) and not sharded:
                raise LayoutError(f"Tensor {name!r} {SHARDED}")
            if is_lazy(tensor):
                raise LayoutError(f"Tensor {name!r} has no shape yet: run one batch through the model first.")
            if not tensor.numel() and hasattr(tensor, "ds_shape"):  # DeepSpeed's attribute for the whole shape.
                raise LayoutError(f"Parameter {name!r} {PARTITIONED}")
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            _check_averageable(name, tensor)
            # A tensor under two names (tied weights in a state_dict) is listed once, as in a module.
            address = id(tensor) if is_sharded(tensor) else tensor.data_ptr()  # A DTensor has no address.
            view = (address, tensor.shape, tensor.stride())
            if not isinstance(model, nn.Module) and tensor.numel() and view in views:
                continue
            views.add(view)
            segments.append(Segment(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind))
            source = None if kind == "buffer" else owner[key]
            slots.append(Slot(name, owner, key, source, tensor.shape, tensor.dtype, kind == "frozen"))
        self.layout = Layout(segments)
        by_name = {slot.name: slot for slot in slots}
        self._slots = tuple(by_name[segment.name] for segment in self.layout.segments)

    def current(self) -> list[Tensor]:
        """Return the live tensors in the layout's order. Takes 0.2 us for each, once an exchange.

        Raises:
            LayoutError: A tensor no longer matches the layout.
        """
        for parent, name, child in self._modules:
            if parent._modules.get(name) is not child:
                raise LayoutError(f"Submodule {name!r} was replaced while the node was running: make a new Node.")
        for module, parameters, children in self._counts:
            if len(module._parameters) > parameters or len(module._modules) > children:
                self._refuse_new_parameters(module)
        tensors: list[Tensor] = []
        for slot in self._slots:
            source: Any = slot.owner.get(slot.key)
            if source is None or (slot.source is not None and source is not slot.source):
                raise LayoutError(
                    f"Tensor {slot.name!r} was replaced while the node was running: write into it in place, or make a "
                    "new Node."
                )
            tensor: Tensor = self.shared.get(slot.name, source)
            if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
                raise LayoutError(
                    f"Tensor {slot.name!r} was {slot.dtype} {tuple(slot.shape)} and is now {tensor.dtype} "
                    f"{tuple(tensor.shape)}: make a new Node after changing a model."
                )
            if slot.frozen and tensor.requires_grad:
                raise LayoutError(
                    f"Parameter {slot.name!r} was frozen when the Node was made and is trained now, and would never be "
                    "exchanged: make a new Node, or give this one frozen=True from the beginning."
                )
            tensors.append(tensor)
        return tensors

    def _refuse_new_parameters(self, module: nn.Module) -> None:
        """Raise LayoutError if a module has new parameters, which would be trained and never exchanged."""
        known = {id(slot.source) for slot in self._slots}
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and id(parameter) not in known:
                raise LayoutError(
                    f"Parameter {name!r} was added to a {type(module).__name__} while the node was running and would "
                    "never be exchanged: make a new Node after changing a model."
                )

    def _named_tensors(self, model: nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Owner, str, Kind]]:
        """Yield every tensor's name, the dictionary that holds it, its key there, and its kind."""
        if isinstance(model, nn.Module):
            flattened = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
            for path, module in model.named_modules():
                if flattened is not None and isinstance(module, flattened):
                    raise LayoutError(f"Module {path or type(model).__name__!r} {FLATTENED}")
            self._modules = tuple(
                (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
            )
            self._counts = tuple((module, len(module._parameters), len(module._modules)) for module in model.modules())
            saved = set(map(plain_name, model.state_dict(keep_vars=True)))  # Persistent buffers are in it, others not.
            for name, parameter in model.named_parameters():
                path, _, key = name.rpartition(".")
                frozen = self._has_frozen and not parameter.requires_grad
                kind: Kind = "frozen" if frozen else "parameter"
                yield plain_name(name), model.get_submodule(path)._parameters, key, kind
            for name, _ in model.named_buffers():
                path, _, key = name.rpartition(".")
                if plain_name(name) in saved:
                    yield plain_name(name), model.get_submodule(path)._buffers, key, "buffer"
        elif isinstance(model, Mapping):
            for name, value in model.items():
                if not isinstance(name, str):
                    raise LayoutError(f"A tensor's name is {name!r}: names in the mapping must be text.")
                if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
                    continue
                if not isinstance(value, Tensor):
                    self.shared[name] = _share(name, value)
                yield name, model, name, "parameter"
        else:
            raise LayoutError(
                f"A model is a torch module, a mapping of names to tensors, or a node.model.state.State, not "
                f"{type(model).__name__}."
            )


def plain_name(name: str) -> str:
    """Return a tensor's name without the prefixes of compiled and activation-checkpointed modules."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def refuse_other_tensors(ours: Mapping[str, Tensor], loaded: Mapping[str, Tensor], exact: bool) -> None:
    """Raise CheckpointError unless a file's tensors fit ours. With ``exact`` it may hold no others."""
    unknown = [f"{name!r} is in the file and not here" for name in loaded if exact and name not in ours]
    missing = [f"{name!r} is here and not in the file" for name in ours if name not in loaded]
    reshaped = [
        f"{name!r} has shape {tuple(ours[name].shape)} here and {tuple(tensor.shape)} in the file"
        for name, tensor in loaded.items() if name in ours and tensor.shape != ours[name].shape
    ]  # fmt: skip
    other_kinds = [
        f"{name!r} is {tensor.dtype} in the file and {ours[name].dtype} here"
        for name, tensor in loaded.items()
        if name in ours and tensor.is_floating_point() != ours[name].is_floating_point()
    ]
    for difference in (*missing, *unknown, *reshaped, *other_kinds):
        raise CheckpointError(f"it holds another model than this node's (tensor {difference}).")


def _check_averageable(name: str, tensor: Tensor) -> None:
    """Raise LayoutError unless a tensor is dense, has memory and holds real numbers."""
    if tensor.layout != torch.strided:
        raise LayoutError(f"Tensor {name!r} is sparse, and only dense ones can be averaged: keep it as to_dense().")
    if tensor.is_meta:
        raise LayoutError(
            f"Tensor {name!r} has no memory, being on the device meta: give the model some, and values, as "
            "to_empty(device=...) and its initialisation do."
        )
    if tensor.is_complex():
        type_name = str(tensor.dtype).removeprefix("torch.")
        raise LayoutError(
            f"Tensor {name!r} is {type_name}, and only real numbers are averaged: "
            "keep it as torch.view_as_real gives it, and make it complex where it is used."
        )


def _share(name: str, value: Any) -> Tensor:
    """Return a tensor over the memory of a numpy array or of another framework's array."""
    if isinstance(value, Mapping):
        raise LayoutError(
            f"{name!r} is a mapping itself: give Node one of names to arrays, and a tree of JAX arrays as a "
            "node.adapters.jax.Pytree."
        )
    library = type(value).__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):  # JAX's DLPack export looks writable, but is not.
        raise LayoutError(
            f"Array {name!r} is one of JAX, which cannot be written to: give Node a node.adapters.jax.Pytree of the "
            "parameters."
        )
    if _is_read_only(value):
        raise LayoutError(f"Array {name!r} is read-only, so averages cannot be written to it: pass a writable copy.")
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if hasattr(value, "__dlpack__"):
            return from_dlpack(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise LayoutError(f"Array {name!r} cannot be shared with torch ({error}): pass a plain float array.") from error
    raise LayoutError(f"{name!r} is {type(value).__name__}: the mapping holds tensors, numpy arrays or DLPack arrays.")


def _is_read_only(value: Any) -> bool:
    """Return True if the array is known to be read-only. DLPack says so since version 1, but torch does not check."""
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    try:
        versioned = "dltensor_versioned" in repr(value.__dlpack__(max_version=(1, 0)))
        return versioned and not np.from_dlpack(value).flags.writeable
    except (AttributeError, TypeError, ValueError, BufferError, RuntimeError):  # An older DLPack, or not on the host.
        return False
