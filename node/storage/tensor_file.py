"""A safetensors file, written tensor by tensor, so that a device's tensors are on the host one at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gossip.errors import CheckpointError

TYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
"""The format's names of types."""
ALIGNED: Final = 8  # The tensors' bytes begin at a multiple of this many bytes.


def write(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write the tensors, those with large elements first so that all are aligned.

    Each name gets its own bytes, also where several names share one memory: readers expect every name.

    Raises:
        CheckpointError: The format has no such tensor, or no such name.
        OSError: The file could not be written.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"Could not save: a tensor may not be called {name!r} in a checkpoint; rename it.")
        if tensor.dtype not in TYPES or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"{tensor.dtype} on {tensor.device} with layout {tensor.layout}"
            raise CheckpointError(f"Could not save: {name} is {kind}, which safetensors cannot hold; convert it first.")
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    header_bytes = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    header_bytes += b" " * (-len(header_bytes) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name in names:
            host = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            file.write(host.reshape(-1).view(torch.uint8).numpy().data)
