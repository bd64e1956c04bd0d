"""The live tensors of a model. Their places are found once, and the tensors are looked up there at each use."""

import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import from_dlpack

from gossip.arithmetic.layout import FLOATS, Kind, Layout, Segment
from gossip.errors import CheckpointError, ConfigError, LayoutError
from node.model.inventory.aliases import find_aliases
from node.model.inventory.items import NAMED_COPY, SAME_MEMORY, Choices, Item, Treatment, treatment_of

SHARDED = (
    "is sharded over several processes: give Node these processes, on all of them, as "
    "group=torch.distributed.group.WORLD or a group that has them alone."
)
FLATTENED = (
    "is sharded by FullyShardedDataParallel: shard it with torch.distributed.fsdp.fully_shard instead, which keeps "
    "each parameter apart, and give Node the processes as group=."
)
LOOKED_AT = 64  # Of what a list or another holder of a module has.
SCRIPTED = (
    "is compiled by torch.jit, which hides its tensors: give Node the module that was scripted or traced, which shares "
    "them, or a mapping of its parameters and buffers by name."
)
PARTITIONED = (
    "has no elements on this rank: DeepSpeed's ZeRO-3 keeps another part of each parameter on each rank, and a Node "
    "takes models that are whole in each process (ZeRO-1 or 2)."
)
Role: TypeAlias = Literal["parameter", "buffer", "rebuilt"]  # "rebuilt": a buffer that is not persistent.
Owner: TypeAlias = Mapping[str, Any]  # The dict with a tensor: a module's parameters or buffers, or the user's mapping.
Place: TypeAlias = tuple[str, Owner, str, Role]  # A tensor's name, its owner, its key there, and its role.


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor of the layout. It is looked up at each use, since ``module.to()`` replaces buffers."""

    name: str
    owner: Owner
    key: str
    source: object  # The object that must still be there; None for a buffer, which may be replaced.
    shape: torch.Size
    dtype: torch.dtype
    kind: Kind
    must_stay_frozen: bool  # It is a frozen parameter that the user has not named in copy=.


class LiveTensors:
    """A module's parameters and persistent buffers, or a mapping's tensors, each with its treatment.

    Tensors that are averaged, and frozen ones, are *values* of a vector of floats. All others are *bits*. DTensors are
    refused, unless the model is ``sharded``.

    Args:
        model: A module, or a mapping of names to tensors and arrays.
        choices: The treatments that the user chose.
        sharded: True if a group of processes trains the model.

    Attributes:
        model: The model.
        layout: The layout of the vector.
        items: All tensors of the model, with their treatments.
        known_ids: The ids of all tensor objects of the model, whatever their treatment, and of others named in local=.

    Raises:
        LayoutError: A tensor cannot travel as it should.
        ConfigError: A choice names no tensor.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Any], choices: Choices | None = None, sharded: bool = False
    ) -> None:
        choices = choices or Choices()
        self._modules: tuple[tuple[nn.Module, str, nn.Module], ...] = ()  # (parent, name, child)
        # Each module with the numbers of its parameters and children, by which new ones are noticed.
        self._counts: tuple[tuple[nn.Module, int, int], ...] = ()
        self._absent: tuple[tuple[nn.Module, str], ...] = ()  # Parameters that are registered as None: (module, name).
        self._owners: dict[int, nn.Module] = {}  # The module of each dictionary of buffers, by the dictionary's id.
        self.shared: dict[str, Tensor] = {}  # Tensors over memory of other libraries, by name.
        self.model, self._is_sharded = model, sharded
        places = list(self._named_tensors(model))
        tensors: dict[str, Tensor] = {
            name: self.shared[name] if name in self.shared else owner[key] for name, owner, key, _ in places
        }
        self.known_ids = set(map(id, tensors.values()))
        for name, tensor in tensors.items():
            if is_sharded(tensor) and not sharded:
                raise LayoutError(f"Tensor {name!r} {SHARDED}")
        trains_some = isinstance(model, nn.Module) and any(parameter.requires_grad for parameter in model.parameters())
        items, kinds = self._classify(places, tensors, choices, trains_some)
        choices.check_used(items, self.known_ids)
        self.known_ids |= {key for key, chosen in choices.chosen_ids.items() if chosen == "local"}
        held = {name: (tensors[name], owner) for name, owner, _, role in places if role != "rebuilt"}
        aliases = aliases_of({name: tensor for name, (tensor, _) in held.items()}, held.keys() - kinds.keys())
        for name, first in aliases.items():
            choice, other = (choices.in_place(one, *held[one]) for one in (name, first))
            if choice != other:
                raise ConfigError(
                    f"{choice[0] or other[0]}= has only one of {first!r} and {name!r}, which are one tensor in memory "
                    "(tied weights): name both there, or neither."
                )
            items[name] = item_of(name, tensors[name], items[first].treatment, f"{SAME_MEMORY}{first}")
        self.items = tuple(items.values())
        segments: list[Segment] = []
        contents: list[Segment] = []
        slots: dict[str, Slot] = {}
        for name, owner, key, role in places:
            tensor = tensors[name]
            if role == "rebuilt" or name in aliases:
                continue
            value = segment_of(name, tensor, "parameter" if role == "parameter" else "buffer")
            contents += [value] if value.dtype in FLOATS else []
            if name not in kinds:
                continue
            kind = kinds[name]
            segments.append(segment_of(name, tensor, kind))
            source = owner[key] if role == "parameter" else None
            must_stay_frozen = kind == "frozen" and choices.of(name, tensor) != "copy"
            slots[name] = Slot(name, owner, key, source, tensor.shape, tensor.dtype, kind, must_stay_frozen)
        self.layout = Layout(segments, contents)
        in_order = [slots[segment.name] for segment in self.layout.segments]
        self._slots = tuple(slot for slot in in_order if slot.kind != "bits")
        self._bit_slots = tuple(slot for slot in in_order if slot.kind == "bits")

    def _classify(
        self, places: Iterable[Place], tensors: Mapping[str, Tensor], choices: Choices, trains_some: bool
    ) -> tuple[dict[str, Item], dict[str, Kind]]:
        """Return each tensor's item, and the kinds of those that travel, by name."""
        items: dict[str, Item] = {}
        kinds: dict[str, Kind] = {}
        for name, owner, _, role in places:
            tensor = tensors[name]
            if is_lazy(tensor):
                raise LayoutError(f"Tensor {name!r} has no shape yet: run one batch through the model first.")
            if not tensor.numel() and hasattr(tensor, "ds_shape"):  # DeepSpeed's attribute for the whole shape.
                raise LayoutError(f"Parameter {name!r} {PARTITIONED}")
            if role == "rebuilt":
                items[name] = item_of(name, tensor, "local", "not persistent: each model makes it anew")
                continue
            if choices.of(name, tensor) != "local":
                _check_memory(name, tensor)
            treatment, reason = treatment_of(
                name, local_part(tensor), tensor, is_parameter=role == "parameter", trains_some=trains_some,
                choices=choices, owner=self._owners.get(id(owner)),
            )  # fmt: skip
            items[name] = item_of(name, tensor, treatment, reason)
            if treatment != "local":
                kinds[name] = kind_of(tensor, treatment, role)
        return items, kinds

    def current(self) -> list[Tensor]:
        """Return the live tensors of values in the layout's order. Takes 0.2 us for each, once an exchange.

        Raises:
            LayoutError: A tensor no longer matches the layout.
        """
        for parent, name, child in self._modules:
            if parent._modules.get(name) is not child:
                raise LayoutError(f"Submodule {name!r} was replaced while the node was running: make a new Node.")
        for module, parameters, children in self._counts:
            if len(module._parameters) > parameters or len(module._modules) > children:
                self._refuse_new_parameters(module)
        for module, name in self._absent:
            if module._parameters[name] is not None:
                self._refuse_new_parameters(module)
        return self._look_up(self._slots)

    def unchecked(self) -> list[Tensor]:
        """Return the same for any thread: during a call of torch.func other tensors stand in the parameters' places."""
        sources: list[Any] = [slot.owner[slot.key] if slot.source is None else slot.source for slot in self._slots]
        return [self.shared.get(slot.name, source) for slot, source in zip(self._slots, sources, strict=True)]

    def bits(self) -> list[Tensor]:
        """Return the live tensors of bits in the layout's order, as :meth:`current`."""
        return self._look_up(self._bit_slots)

    def unshared(self) -> list[str]:
        """Return the names of what does not travel: new buffers, extra state, and what is trained outside of both."""
        if not isinstance(model := self.model, nn.Module):
            return []
        known = {item.name for item in self.items}
        names = [name for name, _, _, role in buffers_of(model) if role == "buffer"]
        for path, module in model.named_modules():
            has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
            outside = [name for name, value in vars(module).items() if name[0] != "_" and self._is_trained(value)]
            names += [plain_name(f"{path}.{name}".lstrip(".")) for name in ["_extra_state"] * has_extra_state + outside]
        return [name for name in names if name not in known]

    def _is_trained(self, value: Any, depth: int = 2) -> bool:
        """Return True for a tensor that requires a gradient and is no parameter, and for what has one, as a list.

        Only the first :data:`LOOKED_AT` of a list are looked at: it may be a long memory of samples, or hold itself.
        """
        if isinstance(value, Tensor):
            return value.requires_grad and value.is_leaf and id(value) not in self.known_ids
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        held = islice(value.parameters() if isinstance(value, nn.Module) else parts, LOOKED_AT if depth else 0)
        return any(self._is_trained(part, depth - 1) for part in held)

    def named(self, *kinds: Kind) -> list[tuple[str, Tensor]]:
        """Return the live tensors of values of these kinds by name; those of bits have no values.

        In a sharded model FSDP may have put whole parameters in the places of its own, which are found nevertheless.
        """
        live = self.unchecked() if self._is_sharded else self.current()
        return [(slot.name, tensor) for slot, tensor in zip(self._slots, live, strict=True) if slot.kind in kinds]

    def kept(self) -> list[tuple[str, Tensor]]:
        """Return by name what has no mean and is copied, unless it is a counter or the user has named it in copy=."""
        named = {item.name for item in self.items if item.reason == NAMED_COPY}
        return [
            (slot.name, tensor) for slot, tensor in zip(self._bit_slots, self.bits(), strict=True)
            if (tensor.numel() > 1 or tensor.is_floating_point()) and slot.name not in named
        ]  # fmt: skip

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint of the model, by plain names.

        Raises:
            CheckpointError: A module has an extra state that is no tensor.
        """
        if not isinstance(self.model, nn.Module):
            return {name: torch.as_tensor(value) for name, value in {**self.model, **self.shared}.items()}
        named = {plain_name(name): value for name, value in self.model.state_dict().items()}
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{name!r} of the model is a {type(value).__name__}, and safetensors hold tensors alone: let its "
                    "get_extra_state return a tensor."
                )
        return named

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the model with a checkpoint's tensors. Raise CheckpointError before anything changes."""
        tensors = {plain_name(name): value for name, value in tensors.items()}
        ours, model = self.saved(), self.model
        refuse_other_tensors(ours, tensors, exact=isinstance(model, nn.Module))
        if isinstance(model, nn.Module):
            # A compiled module has prefixed names for the same model.
            full_names = {plain_name(name): name for name in model.state_dict()}
            model.load_state_dict({full_names[name]: value for name, value in tensors.items()})
            return
        for name, target in ours.items():
            target.copy_(tensors[name])

    def _look_up(self, slots: Iterable[Slot]) -> list[Tensor]:
        tensors: list[Tensor] = []
        for slot in slots:
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
            if slot.must_stay_frozen and tensor.requires_grad:
                raise LayoutError(
                    f"Parameter {slot.name!r} was frozen when the Node was made and is trained now, and would never be "
                    f"exchanged: make a new Node, or give this one average=[{slot.name!r}] from the beginning."
                )
            tensors.append(tensor)
        return tensors

    def _refuse_new_parameters(self, module: nn.Module) -> None:
        """Raise LayoutError if a module has new parameters, which would be trained and never exchanged."""
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and id(parameter) not in self.known_ids:
                raise LayoutError(
                    f"Parameter {name!r} was added to a {type(module).__name__} while the node was running and would "
                    "never be exchanged: make a new Node after changing a model."
                )

    def _named_tensors(self, model: nn.Module | Mapping[str, Any]) -> Iterator[Place]:
        """Yield every tensor's name, the dictionary that holds it, its key there, and its role in the model."""
        if isinstance(model, nn.Module):
            flattened = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
            for path, module in model.named_modules():
                if flattened is not None and isinstance(module, flattened):
                    raise LayoutError(f"Module {path or type(model).__name__!r} {FLATTENED}")
                if isinstance(module, torch.jit.ScriptModule):
                    raise LayoutError(f"Module {path or type(model).__name__!r} {SCRIPTED}")
                self._owners[id(module._buffers)] = module
            self._modules = tuple(
                (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
            )
            self._counts = tuple((module, len(module._parameters), len(module._modules)) for module in model.modules())
            self._absent = tuple(
                (module, name)
                for module in model.modules() for name, value in module._parameters.items() if value is None
            )  # fmt: skip
            # A tied tensor has several names, of which the first counts.
            for name, _ in model.named_parameters(remove_duplicate=False):
                path, _, key = name.rpartition(".")
                yield plain_name(name), model.get_submodule(path)._parameters, key, "parameter"
            yield from buffers_of(model)
        elif isinstance(model, Mapping):
            for name, value in model.items():
                if not isinstance(name, str):
                    raise LayoutError(f"A tensor's name is {name!r}: names in the mapping must be text.")
                if not isinstance(value, Tensor):
                    self.shared[name] = _share(name, value)
                yield name, model, name, "parameter"
        else:
            raise LayoutError(
                f"A model is a torch module, a mapping of names to tensors, or a node.model.state.State, not "
                f"{type(model).__name__}."
            )


def buffers_of(model: nn.Module) -> Iterator[Place]:
    """Yield every buffer's place. A ``state_dict`` of the user's own may have other names, and need not be asked."""
    for name, _ in model.named_buffers(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        role: Role = "rebuilt" if key in module._non_persistent_buffers_set else "buffer"
        yield plain_name(name), module._buffers, key, role


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


def item_of(name: str, tensor: Tensor, treatment: Treatment, reason: str) -> Item:
    return Item(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), treatment, reason)


def segment_of(name: str, tensor: Tensor, kind: Kind) -> Segment:
    return Segment(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind)


def aliases_of(tensors: Mapping[str, Tensor], local: Container[str]) -> dict[str, str]:
    """Return the tensors that are another one under a second name; DTensors, which have no address, by object."""
    firsts: dict[int, str] = {}
    aliases = {
        name: firsts[id(tensor)] for name, tensor in tensors.items() if firsts.setdefault(id(tensor), name) != name
    }
    return aliases | find_aliases(
        [
            (name, tensor) for name, tensor in tensors.items()
            if name not in aliases and tensor.layout == torch.strided and not is_sharded(tensor)
        ],
        local,
    )  # fmt: skip


def kind_of(tensor: Tensor, treatment: Treatment, role: Role) -> Kind:
    """Return the kind of a tensor in the layout. Frozen weights are values, which a newcomer may have already."""
    if treatment == "average":
        return "parameter" if role == "parameter" else "buffer"
    is_value = tensor.is_floating_point() and tensor.element_size() >= 2 and role == "parameter"
    return "frozen" if is_value and bool(torch.isfinite(local_part(tensor).detach()).all()) else "bits"


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise LayoutError unless a tensor is dense and has memory."""
    if tensor.layout != torch.strided:
        raise LayoutError(
            f"Tensor {name!r} is sparse, and only dense ones can be averaged: keep it as to_dense(), or name it in "
            "local=."
        )
    if tensor.is_meta:
        raise LayoutError(
            f"Tensor {name!r} has no memory, being on the device meta: give the model some, and values, as "
            "to_empty(device=...) and its initialisation do."
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


def is_sharded(thing: object) -> bool:
    """Return True for a DTensor, without importing its module."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(thing, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies in this process. Call it without gradients."""
    dtensor: Any = tensor
    return dtensor.to_local() if is_sharded(tensor) else tensor
