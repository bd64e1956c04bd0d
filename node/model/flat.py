"""Operations on tensors and a flat vector over them: split, add and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from gossip import kernel
from gossip.arithmetic.live import add_read
from gossip.arithmetic.mixing import finite
from gossip.errors import LayoutError
from node.model.state import Floats

__all__ = ["add", "add_at", "cut", "elements", "host_of", "in_one_pass", "merge", "plain", "runs", "stretch", "worth"]

LARGE_ELEMENTS = 1 << 20  # For smaller vectors torch's own calls are as fast, and there are fewer.
LEAST_ELEMENTS = 1 << 12  # The least size of a tensor that is worth a call of its own within a large vector.
BLOCK_ELEMENTS = 1 << 16  # Two blocks of 256 KiB stay in the L2 cache.


def host_of(vector: Floats, expected: int) -> Tensor:
    """Return a flat tensor over the memory of a host vector that must have ``expected`` elements."""
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


def elements(tensors: Sequence[Tensor]) -> int:
    # map() avoids a Python expression for each tensor.
    return sum(map(Tensor.numel, tensors))


def cut(flat: Tensor, live: list[Tensor]) -> list[Tensor]:
    """Return views of the flat tensor in the shapes of ``live``, with the one C++ call that DDP and FSDP use."""
    return list(_unflatten_dense_tensors(flat, live))  # type: ignore[no-untyped-call]


def stretch(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield the elements [start, stop) of the concatenated tensors, as pieces."""
    begins = 0
    for tensor in tensors:
        ends = begins + tensor.numel()
        low, high = max(begins, start), min(ends, stop)
        if low < high:
            yield tensor if high - low == tensor.numel() else tensor.reshape(-1)[low - begins : high - begins]
        begins = ends


def runs(tensors: list[Tensor], vector: Floats) -> Iterator[tuple[torch.device, list[Tensor], Tensor]]:
    """Yield consecutive tensors on one device with their piece of the host vector.

    There is one such run, unless the model is split over devices.
    """
    host = host_of(vector, elements(tensors))
    start = 0
    for device, run in groupby(tensors, key=attrgetter("device")):
        live = list(run)
        end = start + elements(live)
        yield device, live, host[start:end]
        start = end


def plain(live: Sequence[Tensor]) -> bool:
    """Return True if the tensors are float32 on the CPU, as a vector is."""
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in live)


def worth(live: Sequence[Tensor], elements: int) -> bool:
    """Return True if our kernel's pass is faster than torch's calls for these tensors."""
    return large(elements) and plain(live)


def large(elements: int) -> bool:
    """Return True if our kernel's pass is faster than torch for this many elements of :func:`plain` tensors."""
    return kernel.passes is not None and elements >= LARGE_ELEMENTS


@torch.no_grad()
def in_one_pass(live: list[Tensor], flat: Tensor, weight: float | None = None, read: bool = True) -> bool | None:
    """Add ``weight * flat`` to ``live``, then copy ``live`` into ``flat``, in one pass over the memory.

    Args:
        live: Tensors that are :func:`plain`.
        flat: A vector of as many elements.
        weight: The factor; None adds nothing.
        read: True to copy the result into ``flat``.

    Returns:
        True if all values are finite, False if one is not, None if the kernel did not check.
    """
    few: list[Tensor] = []
    theirs: list[Tensor] = []
    rows: list[tuple[Tensor, Tensor]] = []
    by_passes = large(flat.numel())
    least = LEAST_ELEMENTS if by_passes else BLOCK_ELEMENTS
    for tensor, piece in zip(live, cut(flat, live), strict=True):
        if tensor.numel() >= least and tensor.is_contiguous():
            rows.append((tensor.detach().view(-1), piece.view(-1)))
        else:
            few.append(tensor)
            theirs.append(piece)
    if few and weight is not None:
        if weight != 1.0:
            torch._foreach_mul_(theirs, weight)
        torch._foreach_add_(few, theirs)
    if few and read:
        torch._foreach_copy_(theirs, few)
    if not by_passes:
        in_blocks(rows, weight, read)
        return None
    sound = add_read([(mine.numpy(), flat.numpy()) for mine, flat in rows], weight, read, torch.get_num_threads())
    return sound and all(finite(piece.view(-1).numpy()) for piece in theirs)


def in_blocks(rows: list[tuple[Tensor, Tensor]], weight: float | None, read: bool) -> None:
    """Do with torch what the kernel does, in blocks that stay in cache between the two calls."""
    for mine, theirs in rows:
        for here, shift in zip(torch.split(mine, BLOCK_ELEMENTS), torch.split(theirs, BLOCK_ELEMENTS), strict=True):
            if weight is not None:
                here.add_(shift if weight == 1.0 else shift.mul_(weight))
            if read:
                shift.copy_(here)


def add(live: list[Tensor], flat: Tensor, weight: float = 1.0) -> None:
    if weight != 1.0:
        flat.mul_(weight)
    torch._foreach_add_(live, cut(flat, live))


def add_at(live: Tensor, at: Tensor, values: Tensor) -> None:
    """Add ``values`` at these distinct positions, in the tensor's own dtype, rounded once."""
    flat = live.view(-1) if live.is_contiguous() else live.reshape(-1)
    flat.index_copy_(0, at, (flat.index_select(0, at) + values).to(live.dtype))
    if flat.data_ptr() != live.data_ptr():
        live.copy_(flat.view(live.shape))


def merge(live: list[Tensor], flat: Tensor, weight: float) -> None:
    """Add ``weight * (flat - live)``, computed in float32: half precision would round the difference first."""
    pieces = cut(flat, live)
    current = [tensor.float() for tensor in live]  # float32 tensors are not copied.
    torch._foreach_sub_(pieces, current)
    torch._foreach_mul_(pieces, weight)
    torch._foreach_add_(live, pieces)
