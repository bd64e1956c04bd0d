"""Operations on a list of live tensors and a flat vector that holds their elements one after the other."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from gossip import kernel
from gossip.arithmetic.live import add_read
from gossip.arithmetic.mixing import is_finite
from gossip.errors import LayoutError
from node.model.state import Floats

MIN_KERNEL_ELEMENTS = 1 << 20  # Size of a vector from which our kernel is faster than torch's foreach calls.
# Size of a tensor from which it gets a call of our kernel of its own; smaller ones share torch's foreach calls.
MIN_KERNEL_TENSOR_ELEMENTS = 1 << 12
# Size of a block where torch does the kernel's work: a tensor's block and the vector's, 256 KiB each, stay in the L2
# cache.
BLOCK_ELEMENTS = 1 << 16


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
    """Yield the elements [start, stop) of the concatenated tensors, a part of each tensor, to read."""
    tensor_start = 0
    for tensor in tensors:
        tensor_stop = tensor_start + tensor.numel()
        begin, end = max(tensor_start, start), min(tensor_stop, stop)
        if begin < end:
            is_whole = end - begin == tensor.numel()
            yield tensor if is_whole else tensor.reshape(-1)[begin - tensor_start : end - tensor_start]
        tensor_start = tensor_stop


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


def are_float32_on_cpu(live: Sequence[Tensor]) -> bool:
    """Return True if all tensors are float32 on the CPU, like a host vector."""
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in live)


def is_kernel_faster(live: Sequence[Tensor], elements: int) -> bool:
    """Return True if one pass of our kernel is faster than torch's calls for these tensors."""
    return has_kernel_for(elements) and are_float32_on_cpu(live)


def has_kernel_for(elements: int) -> bool:
    """Return True if our kernel was compiled, and a vector of this size is large enough for it."""
    is_compiled = kernel.passes is not None
    return is_compiled and elements >= MIN_KERNEL_ELEMENTS


@torch.no_grad()
def add_and_read(live: list[Tensor], flat: Tensor, weight: float | None = None, copy_back: bool = True) -> bool | None:
    """Add ``weight * flat`` to ``live``, then copy ``live`` into ``flat``, in one pass over the memory.

    Args:
        live: Tensors for which :func:`are_float32_on_cpu` is true.
        flat: A vector of as many elements, which is overwritten: with the sums if ``copy_back``, otherwise with
            intermediate values.
        weight: The factor; None adds nothing.
        copy_back: True to copy the sums into ``flat``.

    Returns:
        True if all values are finite, False if one is not, None if that was not checked: without our kernel.
    """
    small: list[Tensor] = []
    small_pieces: list[Tensor] = []
    large_pairs: list[tuple[Tensor, Tensor]] = []  # Large tensors, each with its piece of the vector, both flat.
    by_kernel = has_kernel_for(flat.numel())
    min_large_elements = MIN_KERNEL_TENSOR_ELEMENTS if by_kernel else BLOCK_ELEMENTS
    for tensor, piece in zip(live, views_like(flat, live), strict=True):
        if tensor.numel() >= min_large_elements and tensor.is_contiguous():
            large_pairs.append((tensor.detach().view(-1), piece.view(-1)))
        else:
            small.append(tensor)
            small_pieces.append(piece)
    if small and weight is not None:
        if weight != 1.0:
            torch._foreach_mul_(small_pieces, weight)
        torch._foreach_add_(small, small_pieces)
    if small and copy_back:
        torch._foreach_copy_(small_pieces, small)
    if not by_kernel:
        add_and_read_blocks(large_pairs, weight, copy_back)
        return None
    arrays = [(tensor.numpy(), piece.numpy()) for tensor, piece in large_pairs]
    large_finite = add_read(arrays, weight, copy_back, torch.get_num_threads())
    return large_finite and all(is_finite(piece.view(-1).numpy()) for piece in small_pieces)


def add_and_read_blocks(pairs: list[tuple[Tensor, Tensor]], weight: float | None, copy_back: bool) -> None:
    """Do the kernel's work with torch: add and copy block by block, so that each block stays in cache meanwhile."""
    for tensor, piece in pairs:
        blocks = zip(torch.split(tensor, BLOCK_ELEMENTS), torch.split(piece, BLOCK_ELEMENTS), strict=True)
        for live, values in blocks:
            if weight is not None:
                live.add_(values if weight == 1.0 else values.mul_(weight))
            if copy_back:
                values.copy_(live)


def add(live: list[Tensor], flat: Tensor, weight: float = 1.0) -> None:
    """Add ``weight * flat`` to the tensors, each in its own dtype. ``flat`` is overwritten unless the weight is 1."""
    if weight != 1.0:
        flat.mul_(weight)
    torch._foreach_add_(live, views_like(flat, live))


def add_scaled(live: list[Tensor], flat: Tensor, factor: float) -> None:
    """Add ``factor * flat`` to the tensors, frozen parameters excepted. ``flat`` stays unchanged."""
    pairs = zip(live, views_like(flat, live), strict=True)
    trained = [pair for pair in pairs if pair[0].requires_grad or not isinstance(pair[0], nn.Parameter)]
    if trained:
        torch._foreach_add_(*map(list, zip(*trained, strict=True)), alpha=factor)


def merge(live: list[Tensor], flat: Tensor, weight: float) -> None:
    """Move the tensors towards ``flat``: ``live += weight * (flat - live)``. ``flat`` is overwritten.

    The difference is computed in float32, because half precision would round it first.
    """
    pieces = views_like(flat, live)
    current = [tensor.float() for tensor in live]  # float32 tensors are not copied.
    torch._foreach_sub_(pieces, current)
    torch._foreach_mul_(pieces, weight)
    torch._foreach_add_(live, pieces)


def finite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """Return on their device whether all values of these tensors are finite as float32, in which they travel."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(tensor)
    # The largest absolute value of each tensor; one NaN makes it NaN. torch is fast for tensors of one type.
    norms = [torch.stack(torch._foreach_norm(group, math.inf)).float() for group in by_type.values()]
    return torch.isfinite(torch.cat(norms)).all() if norms else torch.tensor(True)
