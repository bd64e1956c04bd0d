"""The inventory of a node: every tensor of the model and of its optimizers, with the way in which it travels.

average   mixed with partners, and taken by newcomers
copy      not mixed; a newcomer takes it from a donor
follow    optimizer state in the coordinates of a weight: it moves as the weight does, and newcomers take it
mix       optimizer state that scales or directs steps of one length: mixed with partners, and taken by newcomers
give      other optimizer state: not mixed; newcomers take it
local     neither mixed nor given
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gossip.errors import ConfigError, LayoutError
from gossip.ids import quantity

Treatment = Literal["average", "copy", "follow", "mix", "give", "local"]
Chosen: TypeAlias = Sequence[str | Tensor | nn.Module] | str
"""Tensors that a user chooses: patterns of names as in a shell, tensors, or modules with all their tensors."""

NO_MEAN = "whole numbers and bits have no mean"
NAMED_COPY = "named in copy="
SAME_MEMORY = "the same memory as "


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor with its treatment, and the reason for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    treatment: Treatment
    reason: str


class Inventory(tuple[Item, ...]):
    """All tensors of a node, in the order of the model; as text a table."""

    __slots__ = ()

    def of(self, treatment: Treatment) -> list[Item]:
        return [item for item in self if item.treatment == treatment]

    def __str__(self) -> str:
        rows = [("tensor", "shape", "type", "treatment", "reason")]
        rows += [(item.name, shape_of(item), item.dtype, item.treatment, item.reason) for item in self]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4]])
                         for row in rows)  # fmt: skip

    def counts(self) -> str:
        """Return one sentence on how many tensors travel how."""
        numbers = Counter(item.treatment for item in self if not item.reason.startswith(SAME_MEMORY))
        verbs = {"average": "averaged", "copy": "copied to newcomers", "local": "kept local"}
        parts = [f"{quantity(numbers[key], 'tensor')} {verb}" for key, verb in verbs.items() if numbers[key]]  # type: ignore[index]
        return f"Of the model {', '.join(parts)}; node.inventory() lists them."


def shape_of(item: Item) -> str:
    """Return a tensor's shape as text. State of an optimizer has one tensor for each weight."""
    return "of each weight" if item.dtype == "state" else "x".join(map(str, item.shape)) or "scalar"


@dataclass(slots=True)
class Choices:
    """The treatments that a user chose. Each of them is a sequence of patterns, tensors and modules.

    Raises:
        ConfigError: A choice is something else.
    """

    local: Chosen = ()
    copy: Chosen = ()
    average: Chosen = ()
    patterns: dict[str, tuple[str, ...]] = field(init=False, default_factory=dict)
    chosen_ids: dict[int, str] = field(init=False, default_factory=dict)  # Treatments of single tensors.
    # The ids of the given tensors, and of the dictionaries of tensors in the given modules.
    place_ids: set[int] = field(init=False, default_factory=set)
    # The ids of the tensors of each given tensor and module, with its treatment and its type's name.
    given: list[tuple[str, str, frozenset[int]]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        for treatment in ("local", "copy", "average"):
            chosen = getattr(self, treatment)
            patterns: list[str] = []
            for each in [chosen] if isinstance(chosen, str | Tensor | nn.Module) else chosen:
                if isinstance(each, str):
                    patterns.append(each)
                elif isinstance(each, Tensor | nn.Module):
                    tensors = [each] if isinstance(each, Tensor) else [*each.parameters(), *each.buffers()]
                    self.chosen_ids |= dict.fromkeys(map(id, tensors), treatment)
                    modules = [] if isinstance(each, Tensor) else each.modules()
                    places = [each, *(held for one in modules for held in (one._parameters, one._buffers))]
                    self.place_ids.update(map(id, places))
                    self.given.append((treatment, type(each).__name__, frozenset(map(id, tensors))))
                else:
                    raise ConfigError(
                        f"{treatment}= has a {type(each).__name__}: give names of tensors (patterns as 'head.*'), "
                        "tensors or modules."
                    )
            self.patterns[treatment] = tuple(patterns)

    def of(self, name: str, tensor: Tensor) -> str | None:
        """Return the treatment that the user chose for a tensor, None if there is none."""
        if id(tensor) in self.chosen_ids:
            return self.chosen_ids[id(tensor)]
        for treatment, patterns in self.patterns.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return treatment
        return None

    def in_place(self, name: str, tensor: Tensor, owner: object) -> tuple[str | None, bool]:
        """Return the choice for a tensor under one of its names, and whether a given module holds it by that name."""
        return self.of(name, tensor), id(owner) in self.place_ids and id(tensor) not in self.place_ids

    def check_used(self, names: Iterable[str], ids: Container[int]) -> None:
        """Raise ConfigError for a choice of nothing in the model: a misspelled pattern, or another model's tensor.

        What stays local may be of an optimizer alone.
        """
        known = list(names)
        for treatment, kind, chosen in self.given:
            if treatment != "local" and not any(one in ids for one in chosen):
                raise ConfigError(
                    f"{treatment}= has a {kind} of which the model has no tensor: give Node a model that contains it, "
                    "or the tensor itself and not a view of it."
                )
        for treatment, patterns in self.patterns.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in known):
                    near = get_close_matches(pattern, known, 1)
                    hint = f"; did you mean {near[0]!r}?" if near else "; node.inventory() lists the names."
                    raise ConfigError(f"{treatment}= names no tensor of the model by {pattern!r}{hint}")


def treatment_of(
    name: str, tensor: Tensor, source: Tensor, *, is_parameter: bool, trains_some: bool, choices: Choices,
    owner: object = None,
) -> tuple[Treatment, str]:  # fmt: skip
    """Return the treatment of a tensor of the model, and the reason.

    Args:
        name: Its name.
        tensor: The tensor, with the values that it has when the node is made.
        source: The object in the model, which differs from ``tensor`` if that is a part of it.
        is_parameter: True for a parameter, False for a buffer.
        trains_some: True if any parameter of the model requires a gradient.
        choices: The choices of the user.
        owner: The module that holds the tensor.

    Raises:
        LayoutError: The user wants the average of what has none, or a trained parameter has none.
    """
    chosen = choices.of(name, source)
    if chosen == "local":
        return "local", "named in local="
    if chosen == "copy":
        return "copy", NAMED_COPY
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        has_gradients = tensor.is_floating_point() or tensor.is_complex()
        if is_parameter and has_gradients and (tensor.requires_grad or not trains_some):
            advice = "use one of bfloat16, float16, float32 and float64"
            if tensor.is_complex():
                advice = "keep it as torch.view_as_real gives it, and make it complex where it is used"
            raise LayoutError(
                f"Tensor {name!r} is {kind}, and only real numbers are averaged: {advice}; or name "
                "it in copy= or local=."
            )
        if chosen == "average" and name in choices.patterns["average"]:
            raise LayoutError(f"Tensor {name!r} is {kind} and named in average=: {NO_MEAN}, so leave it out there.")
        return "copy", f"{kind}: {NO_MEAN}"
    finite = tensor.is_meta or bool(torch.isfinite(tensor.detach()).all())
    if chosen == "average":
        if not finite:
            raise LayoutError(f"Tensor {name!r} is named in average= and is not finite: {not_finite(tensor)}.")
        return "average", "named in average="
    if is_parameter and (tensor.requires_grad or not trains_some):
        if not finite:
            raise LayoutError(
                f"Parameter {name!r} is not finite before training ({not_finite(tensor)}): initialise it, or load "
                "weights that are."
            )
        return "average", "trained" if tensor.requires_grad else "no parameter requires a gradient"
    if is_parameter:
        return "copy", "frozen: requires no gradient"
    if not finite:
        return "copy", f"a constant: {not_finite(tensor)}"
    if "mask" in name.rpartition(".")[2]:  # Of pruning: a mask of another node's zeros would be a half.
        return "copy", "a mask: zeros and ones have no mean"
    if is_quantiser(owner):
        return "copy", "the range of a quantiser"
    return "average", "a statistic or constant of the model"


def is_quantiser(owner: object) -> bool:
    """Return True for a module that observes ranges: they begin as infinities, and have minima instead of means."""
    return any(kind.__name__ in ("ObserverBase", "FakeQuantizeBase") for kind in type(owner).__mro__)


def not_finite(tensor: Tensor) -> str:
    """Return which value of a tensor is not finite, for a message."""
    flat = tensor.detach().reshape(-1)
    index = int(torch.nonzero(~torch.isfinite(flat))[0])
    return f"element {index} is {float(flat[index]):g}"


def foreign_sentence(optimizer: Any, tensors: Sequence[Tensor]) -> str:
    """Return the sentence that refuses an optimizer with parameters that are not in the model."""
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors[:4])
    more = ", ..." if len(tensors) > 4 else ""
    return (
        f"{type(optimizer).__name__} trains {quantity(len(tensors), 'tensor')} ({shapes}{more}) that the model of this "
        "Node lacks, so that they would never be mixed: give Node a module that has them all, as "
        "torch.nn.ModuleList([model, loss]), or pass them in local= (tensors or their module) to train them here alone."
    )
