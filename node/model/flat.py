"""Operations on a list of live tensors and a flat vector that holds their elements one after the other."""

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
from gossip.arithmetic.mixing import is_finite
from gossip.errors import LayoutError
from node.model.state import Floats

__all__ = [
    "add",
    "add_and_read",
    "add_at",
    "count_elements",
    "device_runs",
    "host_tensor",
    "is_kernel_faster",
    "is_plain",
    "merge",
    "pieces_in_range",
    "views_like",
]

LARGE_ELEMENTS = 1 << 20  # The least vector for our kernel. For smaller ones torch's foreach calls are as fast.
LEAST_ELEMENTS = 1 << 12  # The least tensor that gets a call of its own within a large vector.
BLOCK_ELEMENTS = 1 << 16  # The size of a block; two of 256 KiB stay in the L2 cache.


def host_tensor(vector: Floats, expected: int) -> Tensor:
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


def count_elements(tensors: Sequence[Tensor]) -> int:
    return sum(map(Tensor.numel, tensors))


def views_like(flat: Tensor, live: list[Tensor]) -> list[Tensor]:
    """Return views of the flat tensor in the shapes of ``live``, with the one C++ call that DDP and FSDP use."""
    return list(_unflatten_dense_tensors(flat, live))  # type: ignore[no-untyped-call]


def pieces_in_range(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield the elements [start, stop) of the concatenated tensors as views, a part of each tensor."""
    begins = 0
    for tensor in tensors:
        ends = begins + tensor.numel()
        low, high = max(begins, start), min(ends, stop)
        if low < high:
            yield tensor if high - low == tensor.numel() else tensor.reshape(-1)[low - begins : high - begins]
        begins = ends


def device_runs(tensors: list[Tensor], vector: Floats) -> Iterator[tuple[torch.device, list[Tensor], Tensor]]:
    """Yield each run of consecutive tensors on one device, and their part of the host vector.

    There is one run, unless the model is split over devices.
    """
    host = host_tensor(vector, count_elements(tensors))
    start = 0
    for device, run in groupby(tensors, key=attrgetter("device")):
        live = list(run)
        end = start + count_elements(live)
        yield device, live, host[start:end]
        start = end


def is_plain(live: Sequence[Tensor]) -> bool:
    """Return True if the tensors are float32 on the CPU, like a host vector."""
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in live)


def is_kernel_faster(live: Sequence[Tensor], elements: int) -> bool:
    """Return True if one pass of our kernel is faster than torch's calls for these tensors."""
    return is_large_for_kernel(elements) and is_plain(live)


def is_large_for_kernel(elements: int) -> bool:
    """Return True if one pass of our kernel is faster than torch's calls for so many elements of plain tensors."""
    return kernel.passes is not None and elements >= LARGE_ELEMENTS


@torch.no_grad()
def add_and_read(live: list[Tensor], flat: Tensor, weight: float | None = None, read: bool = True) -> bool | None:
    """Add ``weight * flat`` to ``live``, then copy ``live`` into ``flat``, in one pass over the memory.

    Args:
        live: Tensors of which :func:`is_plain` is true.
        flat: A vector of as many elements.
        weight: The factor; None adds nothing.
        read: True to copy the result into ``flat``.

    Returns:
        True if all values are finite, False if one is not, None if that was not checked.
    """
    small: list[Tensor] = []
    small_pieces: list[Tensor] = []
    rows: list[tuple[Tensor, Tensor]] = []  # Large tensors, each with its piece of the vector, both flat.
    by_kernel = is_large_for_kernel(flat.numel())
    least = LEAST_ELEMENTS if by_kernel else BLOCK_ELEMENTS
    for tensor, piece in zip(live, views_like(flat, live), strict=True):
        if tensor.numel() >= least and tensor.is_contiguous():
            rows.append((tensor.detach().view(-1), piece.view(-1)))
        else:
            small.append(tensor)
            small_pieces.append(piece)
    if small and weight is not None:
        if weight != 1.0:
            torch._foreach_mul_(small_pieces, weight)
        torch._foreach_add_(small, small_pieces)
    if small and read:
        torch._foreach_copy_(small_pieces, small)
    if not by_kernel:
        add_and_read_blocks(rows, weight, read)
        return None
    arrays = [(tensor.numpy(), piece.numpy()) for tensor, piece in rows]
    large_finite = add_read(arrays, weight, read, torch.get_num_threads())
    return large_finite and all(is_finite(piece.view(-1).numpy()) for piece in small_pieces)


def add_and_read_blocks(rows: list[tuple[Tensor, Tensor]], weight: float | None, read: bool) -> None:
    """Do the kernel's work with torch, in blocks that stay in cache between the two calls."""
    for tensor, piece in rows:
        blocks = zip(torch.split(tensor, BLOCK_ELEMENTS), torch.split(piece, BLOCK_ELEMENTS), strict=True)
        for live, values in blocks:
            if weight is not None:
                live.add_(values if weight == 1.0 else values.mul_(weight))
            if read:
                values.copy_(live)


def add(live: list[Tensor], flat: Tensor, weight: float = 1.0) -> None:
    """Add ``weight * flat`` to the tensors. ``flat`` is overwritten unless the weight is 1."""
    if weight != 1.0:
        flat.mul_(weight)
    torch._foreach_add_(live, views_like(flat, live))


def add_at(live: Tensor, at: Tensor, values: Tensor) -> None:
    """Add ``values`` to one tensor at these distinct positions, in the tensor's own dtype, rounded once."""
    flat = live.view(-1) if live.is_contiguous() else live.reshape(-1)
    flat.index_copy_(0, at, (flat.index_select(0, at) + values).to(live.dtype))
    if flat.data_ptr() != live.data_ptr():
        live.copy_(flat.view(live.shape))


def merge(live: list[Tensor], flat: Tensor, weight: float) -> None:
    """Add ``weight * (flat - live)``, computed in float32, because half precision would round the difference first."""
    pieces = views_like(flat, live)
    current = [tensor.float() for tensor in live]  # float32 tensors are not copied.
    torch._foreach_sub_(pieces, current)
    torch._foreach_mul_(pieces, weight)
    torch._foreach_add_(live, pieces)
