from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gossip.codecs
from gossip.codecs import BLOCK_ELEMENTS, CODECS, Bf16, get_codec, self_test
from gossip.errors import ConfigError, LocalError

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)

any_bits = hnp.arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 2**32 - 1)).map(lambda a: a.view("f4"))


def round_trip(codec, values):
    data = bytearray(codec.encoded_bytes(values.size))
    codec.encode(values, data)
    out = np.empty_like(values)
    codec.decode(data, out)
    return out


def slow_bf16(value: float) -> float:
    """Nearest even by exact arithmetic on the two neighbours that 16 bits can express."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if value != value or math.isinf(value):
        return value
    low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    below, above = (bits - low), (high - bits)
    nearest = low if below < above else high if above < below else low if (low >> 16) % 2 == 0 else high
    return struct.unpack("<f", struct.pack("<I", nearest))[0]


@every_codec
@given(values=hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_nan=False)))
def test_the_error_is_at_most_the_stated_one(codec, values):
    sizes = np.abs(values.astype(np.float64))
    kept = sizes <= codec.largest
    error = np.abs(round_trip(codec, values).astype(np.float64)[kept] - values.astype(np.float64)[kept])
    assert np.all(error <= codec.relative_error * np.maximum(sizes[kept], codec.smallest))


@given(any_bits)
def test_bf16_rounds_every_bit_pattern_to_nearest_even(values):
    expected = np.array([slow_bf16(float(v)) for v in values], np.float32)
    np.testing.assert_array_equal(round_trip(Bf16(), values), expected)


def test_bf16_rounds_like_torch():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_trip(Bf16(), values), expected)


@every_codec
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001])
def test_a_nan_stays_a_nan_wherever_its_bits_are(codec, bits):
    values = np.full(BLOCK_ELEMENTS + 3, 1.5, np.float32)
    values.view(np.uint32)[-1] = bits
    out = round_trip(codec, values)
    assert np.isnan(out[-1])
    assert np.all(out[:-1] == 1.5)


@every_codec
def test_what_a_codec_cannot_hold_becomes_infinite_and_never_a_wrong_number(codec):
    values = np.array([np.inf, -np.inf, codec.largest, -codec.largest], np.float32)
    np.testing.assert_array_equal(round_trip(codec, values), values)
    if codec.name == "fp16":
        np.testing.assert_array_equal(
            round_trip(codec, np.array([65519, 65520, -1e38], "f4")), [65504, np.inf, -np.inf]
        )


@every_codec
@given(values=any_bits)
def test_the_partner_decodes_exactly_what_quantised_says(codec, values):
    expected = np.empty_like(values)
    codec.quantised(values, expected)
    np.testing.assert_array_equal(round_trip(codec, values).view("u4"), expected.view("u4"))


@every_codec
@pytest.mark.parametrize("elements", [0, 1, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 5])
def test_block_edges_are_invisible(codec, elements):
    values = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    one_by_one = [round_trip(codec, values[i : i + 1000]) for i in range(0, elements, 1000)]
    expected = np.concatenate([np.empty(0, np.float32), *one_by_one])
    np.testing.assert_array_equal(round_trip(codec, values), expected)
    in_place = values.copy()
    codec.quantised(in_place, in_place)
    np.testing.assert_array_equal(in_place, expected)


@every_codec
def test_any_buffer_at_any_alignment_will_do(codec):
    values = np.linspace(-3, 3, 101, dtype=np.float32)
    length = codec.encoded_bytes(values.size)
    for offset in (0, 1, 3):
        data = memoryview(bytearray(offset + length + 2))
        codec.encode(values, data[offset : offset + length])
        array = np.empty(length, np.uint8)
        codec.encode(values, array)
        assert bytes(data[offset : offset + length]) == array.tobytes()
        assert bytes(data[offset + length :]) == b"\0\0"
        out = np.empty_like(values)
        codec.decode(data[offset : offset + length], out)
        np.testing.assert_array_equal(out, round_trip(codec, values))


@every_codec
def test_a_buffer_of_another_length_is_never_written(codec):
    values = np.ones(8, np.float32)
    data = bytearray(codec.encoded_bytes(9))
    with pytest.raises(AssertionError, match="9 encoded elements where 8 belong"):
        codec.encode(values, data)
    assert not any(data)


def test_raw_means_that_the_bytes_are_the_array():
    values = np.linspace(-3, 3, 101, dtype="<f4")
    for codec in CODECS.values():
        data = bytearray(codec.encoded_bytes(values.size))
        codec.encode(values, data)
        assert (bytes(data) == values.tobytes()) == codec.raw


def test_an_unknown_name_is_answered_with_the_names_there_are():
    assert get_codec("bf16") is CODECS["bf16"]
    with pytest.raises(ConfigError, match="There is no codec 'int3': use one of fp32, bf16, fp16"):
        get_codec("int3")


class Truncating(Bf16):
    """As a wrong numpy would: it cuts where it should round."""

    def encode(self, values, out):
        np.frombuffer(out, "<u2")[:] = values.view(np.uint32) >> 16


class BigEndian(Bf16):
    """Encodes and decodes consistently, and no other machine understands it."""

    def encode(self, values, out):
        super().encode(values, out)
        np.frombuffer(out, "<u2").byteswap(inplace=True)

    def decode(self, data, out):
        super().decode(np.frombuffer(data, "<u2").byteswap().view(np.uint8), out)


@pytest.mark.parametrize("broken", [Truncating(), BigEndian()])
def test_the_self_test_refuses_a_codec_that_is_wrong_on_this_machine(monkeypatch, broken):
    self_test()
    monkeypatch.setitem(gossip.codecs.CODECS, "bf16", broken)
    with pytest.raises(LocalError, match="Codec bf16 does not decode what it encodes"):
        self_test()
