"""This rank's parts of tensors that are sharded over several processes, and where they lie in a flat vector."""

from __future__ import annotations

import hashlib
import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor, nn

from gossip.errors import LayoutError
from node.model.tensors import is_sharded, local_part

Slices = tuple[slice, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardBox:
    """The box of a logical tensor that a rank holds. A *logical* tensor is the whole, of which each rank has a part.

    Attributes:
        shape: The shape of the logical tensor.
        offsets: The part's first index in each dimension.
        sizes: The shape of the part.
        owns: True if this rank copies the part out. Other ranks may hold the same part.

    Raises:
        ValueError: No tensor has such a part.
    """

    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    owns: bool = True

    def __post_init__(self) -> None:
        rows = zip(self.shape, self.offsets, self.sizes, strict=True)
        if not all(offset >= 0 <= size and offset + size <= whole for whole, offset, size in rows):
            raise ValueError("a part outside its tensor")

    def digest(self) -> int:
        """Return a number that is the same on all ranks that hold this part, and differs for other parts."""
        # 7 bytes fit into an int64, in which the ranks exchange it.
        box = repr((self.offsets, self.sizes)).encode()
        return int.from_bytes(hashlib.blake2b(box, digest_size=7).digest(), "big")

    @property
    def slices(self) -> Slices:
        """Return the part as a slice for each dimension."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def elements(self) -> int:
        """Return the number of elements of the part."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """The place of a part in a flat vector, where its logical tensor begins at the index ``start``.

    Raises:
        ValueError: The vector is longer than any.
    """

    start: int
    box: ShardBox

    def __post_init__(self) -> None:
        if not 0 <= self.start <= sys.maxsize - math.prod(self.box.shape):
            raise ValueError("a part outside the vector")

    @property
    def stop(self) -> int:
        """Return the index after the logical tensor's last element."""
        return self.start + math.prod(self.box.shape)


@dataclass(frozen=True, slots=True)
class LocalShard(ShardPlace):
    """A part that this rank holds, and its place. The ``followers`` move along with it."""

    tensor: Tensor
    followers: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, name: str, tensor: Tensor, start: int, box: ShardBox, followers: tuple[Tensor, ...] = ()
    ) -> LocalShard:  # fmt: skip
        """Return the shard of a live tensor. Raises LayoutError if its part has changed."""
        part = local_part(tensor)
        if part.shape != box.sizes:
            raise LayoutError(f"Tensor {name!r} was divided anew while the node was running: make a new Node.")
        return cls(start, box, part, followers)


PlacedPart = TypeVar("PlacedPart", bound=ShardPlace)


def box_of(name: str, tensor: Tensor, is_first: bool) -> ShardBox:
    """Return the box of a tensor that this rank holds. ``is_first`` is True on rank 0, which owns whole tensors.

    Raises:
        LayoutError: The part is no box of consecutive rows, columns and so on.
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return ShardBox(shape, (0,) * len(shape), shape, is_first)
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = tensor
    mesh, placements = dtensor.device_mesh, dtensor.placements
    coordinate = mesh.get_coordinate()  # None if this rank is not in the mesh.
    if coordinate is None or any(isinstance(placement, Partial) for placement in placements):
        raise LayoutError(f"Tensor {name!r} {NO_BOX}")
    owns = True  # If two meshes hold the same part, ShardWork.begin chooses one of their ranks.
    for number, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None:  # The tensor is replicated over this dimension of the mesh, whose first rank owns it.
            owns = owns and coordinate[number] == 0
            continue
        # FSDP over tensor parallelism divides a dimension twice. The first of its two placements has a split_factor:
        # the number of parts into which the later one divides it.
        later_sizes = [mesh.size(other) for other, later in enumerate(placements)
                       if other > number and getattr(later, "dim", None) == dim]  # fmt: skip
        factor = getattr(placement, "split_factor", None)
        if factor is not None and (factor != math.prod(later_sizes) or shape[dim] % (factor * mesh.size(number))):
            raise LayoutError(f"Tensor {name!r} {NO_BOX}")
    sizes, offsets = compute_local_shape_and_global_offset(dtensor.shape, mesh, placements)
    return ShardBox(shape, tuple(offsets), tuple(sizes), owns)


NO_BOX = (
    "is divided among the processes in a way that a Node does not take: use Shard and Replicate placements over the "
    "processes of group=, and dimensions that the mesh divides evenly where FSDP and tensor parallelism share one."
)


def is_sharded_model(model: object) -> bool:
    """Return True if a module or a mapping has tensors that are sharded over processes."""
    if isinstance(model, nn.Module):
        return bool(fsdp_modules(model)) or any(map(is_sharded, model.parameters()))
    return isinstance(model, Mapping) and any(map(is_sharded, model.values()))


def fsdp_modules(model: object) -> list[nn.Module]:
    """Return the modules to which ``fully_shard`` was applied, without importing it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not isinstance(model, nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def reshard(modules: Iterable[Any]) -> None:
    """Free the whole parameters that a forward pass has left in FSDP's modules, because a change makes them stale."""
    for module in modules:
        module.reshard()


def matching_slices(
    parts: Sequence[PlacedPart], host: Tensor, start: int
) -> Iterator[tuple[PlacedPart, Slices, Tensor]]:
    """Yield a rank's part of a stretch of the vector: the part, the place in its tensor, and a view of ``host``.

    The elements of a tensor in the stretch form a few boxes (:func:`blocks`). Each is intersected with the part's box.

    Args:
        parts: The rank's parts of the vector's tensors, in its order.
        host: The elements of the vector from ``start`` on, flat.
        start: The index of the first one.
    """
    stop = start + host.numel()
    for number in range(bisect_right(parts, start, key=attrgetter("stop")), len(parts)):
        part = parts[number]
        if part.start >= stop:
            break
        shape, box, low, high = part.box.shape, part.box.slices, max(start, part.start), min(stop, part.stop)
        if low >= high or not part.box.elements:
            continue
        for block_start, block in blocks(shape, low - part.start, high - part.start):
            common = [intersection(in_block, in_box) for in_block, in_box in zip(block, box, strict=True)]
            if any(piece.start >= piece.stop for piece in common):
                continue
            sizes = [piece.stop - piece.start for piece in block]
            first = part.start - start + block_start
            in_host = host[first : first + math.prod(sizes)].view(sizes)
            in_part = tuple(shifted(piece, whole.start) for piece, whole in zip(common, box, strict=True))
            in_block = tuple(shifted(piece, whole.start) for piece, whole in zip(common, block, strict=True))
            yield part, in_part, in_host[in_block]


def blocks(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, Slices]]:
    """Yield the elements [low, high) of a tensor as boxes whose elements are consecutive, each with its first index."""
    if low >= high:
        return
    if not shape:
        yield 0, ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-low // inner), high // inner  # The complete rows are those from `first` to before `last`.
    if first > last:  # All elements lie within one row.
        partial_rows = [(low // inner, low, high)]
    else:
        partial_rows = [(first - 1, low, first * inner), (last, last * inner, high)]  # Each may be empty.
        if first < last:
            yield first * inner, (slice(first, last), *(slice(0, size) for size in shape[1:]))
    for row, begin, end in partial_rows:
        for block_start, box in blocks(shape[1:], begin - row * inner, end - row * inner):
            yield row * inner + block_start, (slice(row, row + 1), *box)


def intersection(piece: slice, box: slice) -> slice:
    return slice(max(piece.start, box.start), min(piece.stop, box.stop))


def shifted(piece: slice, by: int) -> slice:
    return slice(piece.start - by, piece.stop - by)
