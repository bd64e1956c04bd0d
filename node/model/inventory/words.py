"""Tensors of any type as float32 words of 16 bits each, so that a vector of weights carries them exactly."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossip.arithmetic.layout import Layout, Segment
from node.model.state import Floats

MAX_WORD = 65_535.0


def words_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as numbers from 0 to 65,535, two bytes each: float32 (words,) on the host."""
    raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    padded = raw if raw.size % 2 == 0 else np.append(raw, np.uint8(0))
    return torch.from_numpy(padded.view("<u2").astype(np.float32))


def set_words(tensor: Tensor, words: Tensor) -> None:
    """Set a tensor to what :func:`words_of` returned. Numbers that are no words, as a peer may send, are clipped."""
    clipped = np.nan_to_num(words.numpy()).clip(0.0, MAX_WORD).astype("<u2")
    raw = torch.from_numpy(clipped.view(np.uint8)[: tensor.numel() * tensor.element_size()].copy())
    if tensor.dtype == torch.bool:  # A byte other than 0 and 1 would be no valid value.
        raw = (raw != 0).view(torch.uint8)
    tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def read_words(layout: Layout, tensors: Sequence[Tensor], out: Floats, start: int) -> None:
    """Read the words of a model's tensors of bits into ``out``, from the index ``start`` of the vector on."""
    position, stop = layout.frozen_stop, start + out.size
    for segment, tensor in zip(bit_segments(layout), tensors, strict=True):
        low, high = max(start, position), min(stop, position + segment.size)
        if low < high:
            out[low - start : high - start] = words_of(tensor)[low - position : high - position].numpy()
        position += segment.size


def write_words(layout: Layout, tensors: Sequence[Tensor], vector: Floats) -> None:
    """Overwrite a model's tensors of bits from a vector of the whole layout."""
    segments = bit_segments(layout)
    words = torch.from_numpy(vector[layout.frozen_stop : layout.size])
    for tensor, piece in zip(tensors, torch.split(words, [segment.size for segment in segments]), strict=True):
        set_words(tensor, piece)


def bit_segments(layout: Layout) -> list[Segment]:
    return [segment for segment in layout.segments if segment.kind == "bits"]
