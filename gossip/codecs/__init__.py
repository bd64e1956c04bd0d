"""Codecs between flat float32 vectors and bytes: the registry by name, and their self-test."""

import numpy as np

from gossip.codecs.base import ALIGN, BLOCK_ELEMENTS, Buffer, Codec, Floats, block_peaks
from gossip.codecs.blockwise import Int4, Int8
from gossip.codecs.choice import AUTO, COMPILED, NUMPY, ExchangeCost, Machine, fastest_codec, mix_interval
from gossip.codecs.floats import Bf16, Fp16, Fp32
from gossip.codecs.moniqua import Moniqua4, Overflow
from gossip.codecs.spread import Spread
from gossip.errors import ConfigError, LocalError, did_you_mean
from gossip.kernel.squares import squares

__all__ = [
    "ALIGN", "AUTO", "BLOCK_ELEMENTS", "CODECS", "COMPILED", "NUMPY", "Bf16", "Buffer", "Codec",
    "ExchangeCost", "Floats", "Fp16", "Fp32", "Int4", "Int8", "Machine", "Moniqua4", "Overflow", "Spread",
    "fastest_codec", "get_codec", "leaner", "mix_interval", "needs_spread", "self_test",
]  # fmt: skip

CODECS: dict[str, Codec] = {codec.name: codec for codec in (
    Fp32(), Bf16(), Fp16(), Int8(), Int4(), Moniqua4(),
)}  # fmt: skip


def get_codec(name: str) -> Codec:
    """Return the codec of that name; raise :class:`ConfigError` with the known names."""
    try:
        return CODECS[name]
    except KeyError:
        names = ", ".join(CODECS)
        meant = did_you_mean(name, (*CODECS, AUTO))
        raise ConfigError(f"There is no codec {name!r}{meant}: use {names} or {AUTO}.") from None


def leaner(first: str, second: str) -> str:
    """Return the name of the codec with fewer bytes, by those of 65,536 values."""
    return first if first == second else min(first, second, key=lambda name: CODECS[name].encoded_bytes(1 << 16))


def needs_spread(name: str) -> bool:
    """Return True if this setting needs bounds on the distance to other nodes."""
    return name in CODECS and CODECS[name].needs_spread


KNOWN_SQUARES = 4628240858.0  # The sum of squares in self_test, added in the order of kernel/squares.py.


def self_test() -> None:
    """Sum, encode and decode test values; raise :class:`LocalError` if a bit is wrong.

    A codec that fails under another numpy would average nothing, or garbage, and no peer could tell.
    """
    values = np.geomspace(1e-4, 6e4, BLOCK_ELEMENTS + 1, dtype=np.float32)  # Crosses a block's end.
    values[::2] *= -1
    if squares(np.arange(5_000, dtype=np.float32) / np.float32(3.0)) != KNOWN_SQUARES:
        raise LocalError(
            f"Squares are added up in another order on this machine (numpy {np.__version__}) than on all others: "
            "choose another version of numpy."
        )
    for codec in CODECS.values():
        if not decodes_what_it_encodes(codec, values):
            raise LocalError(
                f"Codec {codec.name} does not decode what it encodes on this machine (numpy {np.__version__}): "
                "choose another codec, or another version of numpy."
            )


def decodes_what_it_encodes(codec: Codec, values: Floats) -> bool:
    """Return True if the codec gives its known bytes, and decodes ``values`` within its bound and as it states."""
    known = np.array(codec.known_values, np.float32)
    data = bytearray(codec.encoded_bytes(known.size))
    with_test_bounds(codec, known).encode(known, data, 1)
    codec = with_test_bounds(codec, values)
    sent = bytearray(codec.encoded_bytes(values.size))
    codec.encode(values, sent, 1)
    received, expected = np.empty_like(values), np.empty_like(values)
    try:
        codec.decode(sent, received, values, 1)
    except Overflow:
        return False
    codec.quantised(values, expected, 1)
    close = np.all(np.abs(received - values) <= codec.error_bound(values))
    return data.hex() == codec.known_bytes and bool(close) and np.array_equal(received, expected)


def with_test_bounds(codec: Codec, values: Floats) -> Codec:
    """Return the codec, with bounds of a quarter of ``values`` if it needs any."""
    if not codec.needs_spread:
        return codec
    spread = Spread(values.size)
    spread.learn(block_peaks(values * np.float32(0.25), ALIGN), np.zeros_like(spread.peaks))
    return codec.with_bounds(spread)
