"""Tensors that a model computes with and that do not travel: plain attributes, and buffers that are not persistent."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from node.model.tensors import local_part

MAX_VALUES = 256  # Values of a tensor that count.
# Machines may compute the same constants with differences in the last bits. Other draws differ by more.
TOLERANCE = 1e-3
MAX_NAMES = 3  # Names in a message.


@dataclass(frozen=True, slots=True)
class Constants:
    """The names of a model's constants, and a sum over some of their values."""

    names: tuple[str, ...]
    checksum: float

    @property
    def mark(self) -> tuple[float, int]:
        return self.checksum, len(self.names)

    def differ(self, mark: tuple[float, int]) -> bool:
        """Return True if a member with this mark has the same constants with other values."""
        return mark[1] == len(self.names) and abs(mark[0] - self.checksum) > TOLERANCE

    def __str__(self) -> str:
        more = len(self.names) - MAX_NAMES
        return ", ".join(map(repr, self.names[:MAX_NAMES])) + (f" and {more} more" if more > 0 else "")


def constants_of(model: object) -> Constants | None:
    """Return the constants of a module; None if it has none, or is no module."""
    if not isinstance(model, nn.Module):
        return None
    names: list[str] = []
    checksum = 0.0
    for name, values in named_constants(model):
        names.append(name)
        checksum += len(names) * checksum_of(values)
    return Constants(tuple(names), checksum) if names and math.isfinite(checksum) else None


def named_constants(model: nn.Module) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield some values of each tensor, array and list of numbers that a module holds outside its state."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        held = {name: module._buffers[name] for name in module._non_persistent_buffers_set if name in module._buffers}
        for name, value in sorted({**vars(module), **held}.items()):
            parts = value if isinstance(value, list | tuple) else [value]
            if len(parts) > 1 and all(isinstance(part, Number) for part in parts):
                parts = [np.asarray(parts)]
            is_derived = f"{name}_orig" in module._parameters or f"{name}_g" in module._parameters  # Spectral norm, ...
            if parts and all(map(is_constant, parts)) and not is_derived:
                yield prefix + name, np.concatenate([some_values(part) for part in parts])


def is_constant(value: object) -> bool:
    """Return True for an array, and for a tensor that is neither trained nor computed from what is trained."""
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
        return is_plain and not (value.requires_grad or isinstance(value, nn.Parameter))
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def some_values(value: Any) -> np.ndarray[Any, Any]:
    """Return evenly spaced values, as float64 if any are no whole numbers."""
    if isinstance(value, np.ndarray):  # torch takes no array of negative strides or of the other byte order.
        spaced = value.reshape(-1)[:: max(1, -(-value.size // MAX_VALUES))]
        return spaced.astype(np.float64 if value.dtype.kind == "f" else np.int64)
    flat = local_part(torch.as_tensor(value)).detach().reshape(-1)  # A DTensor has no numpy().
    flat = flat[:: max(1, -(-flat.numel() // MAX_VALUES))].cpu()
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    values: np.ndarray[Any, Any] = (flat.double() if flat.is_floating_point() else flat.long()).numpy()
    return values


def checksum_of(values: np.ndarray[Any, Any]) -> float:
    """Return a number of the size of 1 that differs for other values, and for another order."""
    if values.dtype.kind == "i":
        return int.from_bytes(hashlib.blake2b(values.astype("<i8").tobytes(), digest_size=4).digest(), "little") / 2**32
    values = np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30)
    scale = math.sqrt(float(np.square(values).mean())) if values.size else 0.0
    if not scale:
        return 0.0
    weights = np.random.default_rng(values.size).uniform(1.0, 2.0, values.size)
    return float(weights @ (values / (np.abs(values) + scale))) / math.sqrt(values.size)
