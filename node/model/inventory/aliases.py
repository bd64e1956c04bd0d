"""Tensors of a model that share memory: found by their addresses, so that no mix changes one element twice."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.errors import LayoutError


class Extent(NamedTuple):
    """The bytes [start, stop) of the memory from the first to the last element of a tensor."""

    start: int
    stop: int
    name: str
    tensor: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Extent:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        start = tensor.data_ptr()
        return cls(start, start + (last + 1) * tensor.element_size(), name, tensor)

    def is_alias_of(self, other: Extent) -> bool:
        """Return True if both tensors are all of the same memory, perhaps in another order, as after a transpose."""
        is_same_memory = (self.start, self.stop, self.tensor.dtype) == (other.start, other.stop, other.tensor.dtype)
        return is_same_memory and self.is_dense and other.is_dense

    @property
    def is_dense(self) -> bool:
        """Return True if each byte between its first and its last belongs to the tensor, and to one element."""
        return self.tensor.numel() * self.tensor.element_size() == self.stop - self.start


def find_aliases(named: Sequence[tuple[str, Tensor]], local: Container[str] = ()) -> dict[str, str]:
    """Return the tensors that have exactly the memory of an earlier one: by name, the name of the earlier one.

    A tie through ``.data.t()`` or ``view`` is such an alias: a change of the first tensor changes it too.

    Raises:
        LayoutError: Two tensors share a part of their memory, or two elements of one tensor share theirs, and none of
            them is ``local``.
    """
    order = {name: place for place, (name, _) in enumerate(named)}
    extents = [Extent.of(name, tensor) for name, tensor in named if tensor.numel() and not tensor.is_meta]
    aliases: dict[str, str] = {}
    by_device: dict[torch.device, list[Extent]] = {}
    for extent in extents:
        if extent.name not in local and torch._debug_has_internal_overlap(extent.tensor) == 1:
            raise LayoutError(
                f"Several elements of tensor {extent.name!r} share one place in memory, as after expand(): give it "
                "memory of its own by clone(), or name it in local=."
            )
        by_device.setdefault(extent.tensor.device, []).append(extent)
    for alike in by_device.values():
        alike.sort(key=lambda extent: (extent.start, -extent.stop, order[extent.name]))
        active: list[Extent] = []  # Earlier ones that may reach into the next.
        for extent in alike:
            active = [other for other in active if other.stop > extent.start]
            for other in active:
                first, second = sorted((other, extent), key=lambda each: order[each.name])
                if first.is_alias_of(second):
                    aliases.setdefault(second.name, aliases.get(first.name, first.name))
                elif not (first.name in local or second.name in local) and have_common_bytes(first, second):
                    raise LayoutError(
                        f"Tensors {first.name!r} and {second.name!r} share a part of their memory, which a mix would "
                        "change twice: make views of one parameter in forward() instead, or name one of them in local=."
                    )
            active.append(extent)
    return aliases


def have_common_bytes(first: Extent, second: Extent) -> bool:
    """Return True if any byte belongs to both tensors: columns of one matrix overlap only in their extents."""
    low, high = max(first.start, second.start), min(first.stop, second.stop)
    marks = [bytes_within(extent, low, high) for extent in (first, second)]
    return bool((marks[0] & marks[1]).any())


def bytes_within(extent: Extent, low: int, high: int) -> Tensor:
    """Return for each byte of the memory [low, high) whether it belongs to the tensor: bool (high - low,)."""
    tensor, item = extent.tensor, extent.tensor.element_size()
    marks = torch.zeros(extent.stop - extent.start, dtype=torch.bool, device="cpu")
    strides = [stride * item for stride in tensor.stride()]
    torch.as_strided(marks, [*tensor.shape, item], [*strides, 1]).fill_(True)
    return marks[low - extent.start : high - extent.start]
