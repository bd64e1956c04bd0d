import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gossip.codecs
from gossip.codecs import BLOCK_ELEMENTS, CODECS, Bf16, Int8, Moniqua4, Spread, get_codec, self_test
from gossip.errors import LocalError
from tests.gossip.codecs.spreads import observe

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)

any_bits = hnp.arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 2**32 - 1)).map(lambda a: a.view("f4"))


def bound(codec, values, start=0):
    """Return the codec with bounds wide enough for a partner that holds the same values."""
    if not codec.needs_spread:
        return codec
    spread = Spread(start + values.size)
    observe(spread, np.full(start + values.size, 0.01, np.float32))
    return codec.with_bounds(spread)


def round_trip(codec, values, seed=0, start=0):
    codec = bound(codec, values, start)
    data = bytearray(codec.encoded_bytes(values.size))
    codec.encode(values, data, seed, start)
    out = np.empty_like(values)
    codec.decode(data, out, values, seed, start)
    return out


sizes = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 700]))
numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-2, 2, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 3e38, 1e6, 1e-12]),
)


@every_codec
@given(
    values=hnp.arrays(np.float32, sizes, elements=numbers, fill=numbers),
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 400).map(lambda n: 256 * n),
)
def test_the_error_is_at_most_the_stated_one(codec, values, seed, start):
    received = round_trip(codec, values, seed, start)
    held = np.abs(values) <= codec.largest
    for first in range(0, values.size, codec.block):  # a value too large takes its whole block with it
        held[first : first + codec.block] = held[first : first + codec.block].all()
    allowed = bound(codec, values, start).error_bound(values, start)[held].astype(np.float64)
    error = np.abs(received[held].astype(np.float64) - values[held].astype(np.float64))
    assert np.all(error <= allowed * (1 + 1e-6))
    assert codec.block == 1 or np.isnan(received[~held]).all()


def test_bf16_rounds_like_torch():
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000  # halfway between two numbers of 16 bits
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_trip(Bf16(), values), expected)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_what_a_codec_cannot_hold_becomes_infinite_and_never_a_wrong_number(name):
    codec = get_codec(name)
    values = np.array([np.inf, -np.inf, codec.largest, -codec.largest], np.float32)
    np.testing.assert_array_equal(round_trip(codec, values), values)
    if name == "fp16":
        beyond = np.array([65519, 65520, -1e38], np.float32)
        np.testing.assert_array_equal(round_trip(codec, beyond), [65504, np.inf, -np.inf])


@every_codec
@pytest.mark.parametrize("place", [300, 1023])
@pytest.mark.parametrize(
    "bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000, 0x7F61B1E6], ids=hex
)
def test_a_block_that_holds_what_no_scale_does_is_not_finite_and_its_neighbours_are_right(codec, bits, place):
    """Test NaNs wherever their bits are, both infinities, and 3e38."""
    values = np.full(1024, 1.5, np.float32)
    values.view(np.uint32)[place] = bits
    out = round_trip(codec, values)
    assert np.isfinite(out[place]) == (bits == 0x7F61B1E6 and codec.name in ("fp32", "bf16"))
    assert np.isnan(out[place]) or not np.isnan(values[place]), "a NaN stays a NaN"
    others = np.arange(1024) // codec.block != place // codec.block
    allowed = bound(codec, values).error_bound(np.full(1024, 1.5, np.float32))
    assert np.all(np.abs(out[others] - 1.5) <= allowed[others])


@every_codec
@given(values=any_bits, seed=st.integers(0, 2**63 - 1), start=st.integers(0, 400).map(lambda n: 256 * n))
def test_the_partner_decodes_exactly_what_quantised_says(codec, values, seed, start):
    expected = np.empty_like(values)
    bound(codec, values, start).quantised(values, expected, seed, start)
    np.testing.assert_array_equal(round_trip(codec, values, seed, start).view("u4"), expected.view("u4"))


@every_codec
@pytest.mark.parametrize("elements", [0, 1, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 5])
def test_where_a_stream_is_cut_is_invisible(codec, elements):
    values = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    whole = round_trip(codec, values, 9, 512)
    pieces = [round_trip(codec, values[at : at + 1280], 9, 512 + at) for at in range(0, elements, 1280)]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, np.float32), *pieces]), whole)
    in_place = values.copy()
    bound(codec, values, 512).quantised(in_place, in_place, 9, 512)
    np.testing.assert_array_equal(in_place, whole)


@every_codec
def test_any_buffer_at_any_alignment_will_do(codec):
    values = np.linspace(-3, 3, 101, dtype=np.float32)
    codec = bound(codec, values)
    length = codec.encoded_bytes(values.size)
    for offset in (0, 1, 3):
        data = memoryview(bytearray(offset + length + 2))
        codec.encode(values, data[offset : offset + length])
        array = np.empty(length, np.uint8)
        codec.encode(values, array)
        assert bytes(data[offset : offset + length]) == array.tobytes()
        assert bytes(data[offset + length :]) == b"\0\0"
        out = np.empty_like(values)
        codec.decode(data[offset : offset + length], out, values)
        np.testing.assert_array_equal(out, round_trip(codec, values))


@every_codec
def test_a_buffer_of_another_length_is_never_written(codec):
    values = np.ones(8, np.float32)
    data = bytearray(codec.encoded_bytes(20))
    with pytest.raises(AssertionError, match="encoded elements where"):
        bound(codec, values).encode(values, data)
    assert not any(data)


def test_raw_means_that_the_bytes_are_the_array():
    values = np.linspace(-3, 3, 101, dtype="<f4")
    for codec in CODECS.values():
        data = bytearray(codec.encoded_bytes(values.size))
        bound(codec, values).encode(values, data)
        assert (bytes(data) == values.tobytes()) == codec.is_raw


class Truncating(Bf16):
    """A codec that truncates where it should round, as a wrong numpy would."""

    def encode(self, values, out, seed=0, start=0):
        np.frombuffer(out, "<u2")[:] = values.view(np.uint32) >> 16


class BigEndian(Bf16):
    """A codec that decodes what it encodes, in a byte order that no other machine understands."""

    def encode(self, values, out, seed=0, start=0):
        super().encode(values, out)
        np.frombuffer(out, "<u2").byteswap(inplace=True)

    def decode(self, data, out, near=None, seed=0, start=0):
        super().decode(np.frombuffer(data, "<u2").byteswap().view(np.uint8), out)


class Undithered(Int8):
    """A codec whose noise differs from that of all other machines."""

    noise = np.full(1 << 16, 127.5, np.float32)


class Biased(Moniqua4):
    """A codec that states other values for itself than the partner decodes."""

    def quantised(self, values, out, seed=0, start=0):
        out[:] = values


class Careless(Moniqua4):
    """A codec with wrong bounds, so that nothing it sends is recovered."""

    def decode(self, data, out, near=None, seed=0, start=0):
        super().decode(data, out, near + np.float32(1e6), seed, start)


@pytest.mark.parametrize(
    "broken", [Truncating(), BigEndian(), Undithered(), Biased(), Careless()], ids=lambda c: type(c).__name__
)
def test_the_self_test_refuses_a_codec_that_is_wrong_on_this_machine(monkeypatch, broken):
    self_test()
    monkeypatch.setitem(gossip.codecs.CODECS, broken.name, broken)
    with pytest.raises(LocalError, match=f"Codec {broken.name} does not decode what it encodes"):
        self_test()
