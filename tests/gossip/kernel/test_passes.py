"""The C passes compute what numpy does: every byte, every value, every sum."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.correction import add_lesson
from gossip.arithmetic.outer_step import learn_and_step, outer_step
from gossip.codecs import BLOCK_ELEMENTS, Codec, get_codec
from tests.gossip.kernel.building import both_ways, build, passes

COMPILED = ("bf16", "int8", "int4")
DIGEST = "07e749da40537878"
each = pytest.mark.parametrize("codec", [get_codec(name) for name in COMPILED], ids=COMPILED)

WHERE = [
    (0, 0), (1, 0), (63, 256), (64, 0), (255, 512), (256, 256), (257, 0), (701, 32_512), (BLOCK_ELEMENTS, 0),
    (BLOCK_ELEMENTS + 1, 256), (BLOCK_ELEMENTS - 257, 65_536 + 512), (3 * BLOCK_ELEMENTS + 5_001, 1_280),
]  # fmt: skip
"""(elements, start): chunks that end within a scale, a byte of two codes and a segment of noise, and on their ends."""


def weights(elements: int, seed: int) -> np.ndarray:
    """Return weights of every magnitude that float32 has, with zeros and a few values that are not finite."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(elements).astype(np.float32)
    for first in range(0, elements, 256):
        values[first : first + 256] *= np.float32(10.0) ** rng.integers(-42, 38)
    if elements > 3_000:
        values[512:1_024] = 0.0
        values[rng.integers(0, elements, 20)] = -0.0
        values[rng.integers(0, elements, 3)] = [np.nan, np.inf, -np.inf]
        values.view(np.uint32)[rng.integers(0, elements)] = 0xFF800001  # a signalling NaN
        values[2_000] = 3.4e38
    return values


def all_that_it_does(codec: Codec, ours: np.ndarray, theirs: np.ndarray, start: int) -> tuple[np.ndarray, ...]:
    body = np.full(codec.encoded_bytes(theirs.size), 77, np.uint8)
    codec.encode(theirs, body, 2**63 + 5, start)
    decoded, own, out, alone = (np.full(ours.size, 7.0, np.float32) for _ in range(4))
    codec.decode(body, decoded, None, 2**63 + 5, start)
    sums = np.array(codec.subtract(body, ours, out, own, 2**63 + 5, start, (1.5, 0.25)))
    codec.quantised(ours, alone, 2**63 + 5, start)
    same = ours.copy()
    codec.quantised(same, same, 2**63 + 5, start)
    return body, decoded, own, out, alone, same, sums


def check_equal(plain: Iterable[np.ndarray], compiled: Iterable[np.ndarray]) -> None:
    """Check that all arrays are equal bit for bit, but for the kind of NaN."""
    for one, other in zip(plain, compiled, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        if one.dtype.kind == "f":
            number = ~np.isnan(one)
            assert one[number].tobytes() == other[number].tobytes()


@each
@pytest.mark.parametrize(("elements", "start"), WHERE)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_each_pass_has_the_bits_of_numpys(codec, elements, start):
    ours, theirs = weights(elements, 1), weights(elements, 2)
    check_equal(*both_ways(lambda: all_that_it_does(codec, ours, theirs, start)))


@each
@given(data=st.data(), elements=st.integers(1, 700), start=st.integers(0, 300).map(lambda n: 256 * n))
def test_whatever_bytes_a_peer_sends_both_make_the_same_of_them(codec, data, elements, start):
    size = codec.encoded_bytes(elements)
    body = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    ours = weights(elements, 3)

    def subtracted() -> tuple[np.ndarray, ...]:
        out, own = np.empty(elements, np.float32), np.empty(elements, np.float32)
        sums = codec.subtract(body, ours, out, own, 9, start)
        return out, own, np.array(sums)

    with np.errstate(all="ignore"):
        check_equal(*both_ways(subtracted))


@pytest.mark.parametrize("shape", [(1,), (257,), (40_003,), (70_000,), (7, 1_001)])
@pytest.mark.parametrize(
    ("weight", "alpha", "beta"), [(1.0, 0.5, 0.7), (1 / 3, 0.5, 0.7), (0.5, 0.3, 0.9), (0.5, 0.0, 1.9)]
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_lesson_and_outer_step_in_one_pass_are_numpys_one_after_another(shape, weight, alpha, beta):
    def stepped() -> list[np.ndarray]:
        arrays = [weights(int(np.prod(shape)), seed).reshape(shape) for seed in range(5)]
        difference, snapshot, phi, momentum, pull = arrays
        original = snapshot.copy()
        alone = [one.copy() for one in arrays]
        sums = [add_lesson(alone[0].reshape(-1), alone[4].reshape(-1), 0.9, 0.1)] * (len(shape) == 1)
        outer_step(*alone[:4], weight, alpha, beta)
        if sums:
            sums += [learn_and_step(difference, pull, 0.9, 0.1, snapshot, phi, momentum, (weight, alpha, beta))]
            check_equal(arrays, alone)
        check_equal([alone[1]], [original])  # other exchanges may use this snapshot too
        return [*alone, np.array(sums)]

    check_equal(*both_ways(stepped))


def digest() -> str:
    """Return a digest of what codecs and mixes make of hard weights, whatever the kind of NaN."""
    arrays: list[np.ndarray] = []
    for name in COMPILED:
        for elements, start in WHERE:
            arrays += all_that_it_does(get_codec(name), weights(elements, 1), weights(elements, 2), start)
    difference, snapshot, phi, momentum, pull = (weights(70_001, seed) for seed in range(5))
    sums = learn_and_step(difference, pull, 0.9, 0.1, snapshot, phi, momentum, (0.5, 0.3, 0.9))
    arrays += [difference, snapshot, phi, momentum, pull, np.array(sums)]
    plain = [np.nan_to_num(array) if array.dtype.kind == "f" else array for array in arrays]
    return hashlib.sha256(b"".join(array.tobytes() for array in plain)).hexdigest()[:16]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_every_machine_has_the_same_bits():
    """The digest is of x86-64, and of aarch64 where the passes are cross-compiled and run by QEMU."""
    assert both_ways(digest) == [DIGEST, DIGEST]


def test_what_is_no_chunk_is_refused_and_nothing_is_written():
    values, out = np.zeros(512, np.float32), np.full(512, 7.0, np.float32)
    table, noise, offsets = np.zeros(256, np.float32), np.zeros(65_536, np.float32), np.zeros(1, np.int32)
    body = bytearray(514)

    def bf16(elements, *places):
        passes().bf16(elements, *places, 0.0, 0.0)

    def mix(*places):
        passes().mix(512, *places, 1.0, 0.5, 0.7, 1.0, 0.1)

    def blockwise(*places, start=0, block=256, bits=8, noise=noise, offsets=offsets):
        passes().blockwise(512, *places, start, block, bits, 1.0, table, table, noise, offsets, 0.0, 0.0)

    refused = [
        (lambda: passes().difference(512, values, values[:511], out, 0.0, 0.0), "2044 bytes of .* where 2048"),
        (lambda: passes().difference(512, values, values, out[:256], 0.0, 0.0), "1024 bytes of .* where 2048"),
        (lambda: passes().difference(512, values, None, out, 0.0, 0.0), "of no pass"),
        (lambda: mix(out, values, out, out[:256], None), "1024 bytes of .* where 2048"),
        (lambda: mix(out, values, out, None, out), "of no pass"),
        (lambda: mix(out, None, None, None, None), "of no pass"),
        (lambda: mix(None, None, None, None, out), "of no pass"),
        (lambda: passes().add_read(512, out, values[:511], None, 1.0), "2044 bytes of .* where 2048"),
        (lambda: passes().add_read(512, out, None, None, 1.0), "of no pass"),
        (lambda: passes().add_read(512, None, values, out, 1.0), "of no pass"),
        (lambda: passes().squares(511, values, 0.0), "2048 bytes of .* where 2044"),
        (lambda: passes().squares(512, None, 0.0), "is missing"),
        (lambda: bf16(512, values, None, bytearray(1_023), None, None), "1023 bytes of .* where 1024"),
        (lambda: bf16(512, values[:511], None, None, out, None), "2044 bytes of .* where 2048"),
        (lambda: bf16(-1, values, None, None, out, None), "where -4"),
        (lambda: bf16(512, values, None, None, None, None), "of no pass"),
        (lambda: bf16(512, None, None, None, out, None), "of no pass"),
        (lambda: bf16(512, None, bytearray(1_024), None, None, None), "of no pass"),
        (lambda: bf16(512, values, bytearray(1_024), bytearray(1_024), None, out), "of no pass"),
        (lambda: blockwise(values, None, bytearray(513), None, None), "513 bytes of .* where 514"),
        (lambda: blockwise(values, None, body, None, None, noise=noise[1:]), "262140 bytes of"),
        (lambda: blockwise(values, None, body, None, None, noise=None), "a table is missing"),
        (lambda: blockwise(values, None, body, None, None, offsets=np.array([32_768], np.int32)), "outside its table"),
        (lambda: blockwise(values, None, body, None, None, offsets=np.array([-1], np.int32)), "outside its table"),
        (lambda: blockwise(values, None, body, None, None, offsets=np.zeros(2, np.int32)), "8 bytes of .* where 4"),
        (lambda: blockwise(values, None, body, None, None, start=128), "no multiple of 256"),
        (lambda: blockwise(values, None, body, None, None, start=-256), "no multiple of 256"),
        (lambda: blockwise(values, None, body, None, None, block=0), "no codec"),
        (lambda: blockwise(values, None, body, None, None, block=64), "no codec"),
        (lambda: blockwise(values, None, body, None, None, bits=2), "no codec"),
    ]
    for call, words in refused:
        with pytest.raises(AssertionError, match=words):
            call()
    with pytest.raises((BufferError, TypeError, ValueError)):
        bf16(512, values, None, bytes(1_024), None, None)  # bytes are read-only
    with pytest.raises((BufferError, ValueError)):
        bf16(256, values[::2], None, None, out[:256], None)
    with pytest.raises(TypeError, match="8 arguments"):
        passes().bf16(512)
    assert np.all(out == 7.0)
    assert bytes(body) == bytes(514)


@pytest.mark.parametrize("environment", [{"CC": "/nowhere/cc"}, {"GOSSIP_KERNEL": "numpy"}], ids=str)
def test_without_a_compiler_or_where_nobody_wants_it_nothing_is_built_and_nothing_fails(environment, tmp_path):
    done = build(str(tmp_path), **environment)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))


def ran(program: str, **environment: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name != "GOSSIP_KERNEL"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


STAND_IN = """
import sys, types
sys.modules["gossip.kernel._passes"] = found = types.ModuleType("_passes")
from importlib.util import find_spec
found.EDITION = int(open(find_spec("gossip").submodule_search_locations[0] + "/kernel/passes.c").read()
    .split("#define EDITION ")[1].split()[0]) + {older}
import gossip.kernel
print(gossip.kernel.implementation())
"""


def test_who_asks_for_numpy_has_it_and_what_an_older_file_was_built_from_is_left_alone():
    assert ran(STAND_IN.format(older=0)) == "compiled"
    assert ran(STAND_IN.format(older=0), GOSSIP_KERNEL="numpy") == "numpy"
    assert ran(STAND_IN.format(older=-1)) == "numpy"
