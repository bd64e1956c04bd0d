"""Mutations of valid samples: bytes, nested values and texts, changed a little or where parsers tend to fail.

All randomness comes from the generator that is handed in, so a number replays an input.
"""

import math
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

EDGE_INTS = (
    0, 1, -1, 2, 3, 15, 16, 17, 31, 32, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 65_535, 65_536, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**48, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
EDGE_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 5e-324, 1e-9, 1e9, 3.4e38, 3.5e38, 1e308, -1e308, 2.0**53, 2.0**63, 2.0**64,
    math.inf, -math.inf, math.nan,
)  # fmt: skip
EDGE_TEXTS = (
    "", "\0", "\n", "\x1b[2J", "é", "\u202e", "\ud7ff", "\U0010ffff", "٣", "a" * 33, "a" * 65, "a" * 257, "a" * 4_097,
    "9" * 20, "9" * 5_000, "1e999", "nan", "inf", "-0", "%s", "{0}", "../..", "all", "fp32", "xn--", ".", "..", "[::1]",
)  # fmt: skip
CLAIMS = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xdd\x00\x00\x10\x00", b"\xc1", b"\xc0",
    b"\xd4\x01\x00", b"\xd6\xff\x00\x00\x00\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\x80", b"\x90", b"\xa0", b"\xff\xfe", b"\xed\xa0\x80", b"\x00" * 64,
)  # fmt: skip  # what msgpack reads as sizes that nobody has, types that nobody sends, and numbers at their ends


def edge_value(rng: Random) -> Any:
    """Return a value of some type that msgpack, JSON or TOML can hold, often an extreme one."""
    match rng.randrange(12):
        case 0 | 1 | 2:
            return rng.choice(EDGE_INTS)
        case 3 | 4:
            return rng.choice(EDGE_FLOATS)
        case 5 | 6:
            return rng.choice(EDGE_TEXTS)
        case 7:
            return rng.randbytes(rng.choice((0, 1, 15, 16, 17, 32, 64, 65)))
        case 8:
            return rng.choice((None, True, False))
        case 9:
            return [edge_value(rng) for _ in range(rng.randrange(4))]
        case 10:
            return {rng.choice(EDGE_TEXTS): edge_value(rng) for _ in range(rng.randrange(3))}
    return deep(rng)


def deep(rng: Random) -> Any:
    """Return lists or mappings nested in each other, from a few levels to more than a parser's stack holds."""
    value: Any = rng.choice((0, "", None, []))
    mapping = rng.random() < 0.5
    for _ in range(rng.choice((2, 5, 9, 40, 500, 600))):
        value = {"a": value} if mapping else [value]
    return value


def mutated_bytes(rng: Random, data: bytes, others: Sequence[bytes] = (), most: int = 70_000) -> bytes:
    """Return ``data`` with one to four changes: bits, bytes, lengths, cuts, repeats, splices with one of ``others``."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        size = len(out)
        at = rng.randrange(size) if size else 0
        match rng.randrange(11):
            case 0 if size:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if size:
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0xC0, 0xC1, rng.randrange(256)))
            case 2:
                out[at:at] = rng.choice(CLAIMS)
            case 3 if size:
                claim = rng.choice(CLAIMS)
                out[at : at + len(claim)] = claim
            case 4:
                del out[at:]
            case 5 if size:
                del out[at : at + rng.choice((1, 1, 2, 4, 16, size))]
            case 6 if size:
                piece = bytes(out[at : at + rng.choice((1, 4, 16, 64, size))])
                out[at:at] = piece * rng.choice((1, 1, 2, 8, 100))
            case 7:
                wide, form = rng.choice(((2, ">H"), (2, "<H"), (4, ">I"), (4, "<I"), (8, ">Q"), (8, "<Q")))
                number = abs(rng.choice(EDGE_INTS)) % (1 << 8 * wide)
                out[at : at + wide] = struct.pack(form, number)
            case 8 if others:
                other = rng.choice(others)
                out[at:] = other[rng.randrange(len(other)) if other else 0 :]
            case 9:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64, 512)))
            case 10:
                out[at:at] = rng.choice((b"\x91", b"\x81\xa1a", b"[", b'{"a":', b"\xdc\x00\x01")) * rng.choice(
                    (3, 40, 1100)
                )
        del out[most:]
    return bytes(out)


def mutated_value(rng: Random, value: Any, others: Sequence[Any] = ()) -> Any:
    """Return a copy of a tree of lists, mappings and plain values with one to three of its nodes changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = changed(rng, value, others)
    return value


def changed(rng: Random, value: Any, others: Sequence[Any]) -> Any:
    """Return ``value`` with one change: at this node, or more often (85 %) at one below it."""
    inner = isinstance(value, list | dict) and len(value) > 0
    if inner and rng.random() < 0.85:
        if isinstance(value, dict):
            key = rng.choice(list(value))
            match rng.randrange(8):
                case 0:
                    return {held: item for held, item in value.items() if held != key}
                case 1:
                    return value | {rng.choice(("", "t", key + "x" if isinstance(key, str) else 0)): edge_value(rng)}
            return value | {key: changed(rng, value[key], others)}
        at = rng.randrange(len(value))
        match rng.randrange(9):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * rng.choice((2, 2, 3, 17, 33, 121)) + value[at + 1 :]
            case 2:
                return [*value[:at], edge_value(rng), *value[at:]]
            case 3:
                other = rng.randrange(len(value))
                swapped = list(value)
                swapped[at], swapped[other] = swapped[other], swapped[at]
                return swapped
        return [*value[:at], changed(rng, value[at], others), *value[at + 1 :]]
    match rng.randrange(6):
        case 0 if others:
            return rng.choice(others)
        case 1 if isinstance(value, bool):
            return not value
        case 1 if isinstance(value, int):
            return value + rng.choice((-1, 1, -value, value, 1 << rng.randrange(64)))
        case 1 | 2 if isinstance(value, float):
            return rng.choice((-value, value * 2, value + 1e-9, rng.choice(EDGE_FLOATS)))
        case 1 | 2 if isinstance(value, str):
            return mutated_text(rng, value)
        case 1 | 2 if isinstance(value, bytes):
            return mutated_bytes(rng, value, most=9_000)
        case 3 if isinstance(value, int) and not isinstance(value, bool):
            return rng.choice((float(value) if abs(value) < 1 << 1000 else 0.5, rng.choice(EDGE_INTS)))
        case 4:
            return [value]
    return edge_value(rng)


def mutated_text(rng: Random, text: str, tokens: Sequence[str] = (), most: int = 20_000) -> str:
    """Return ``text`` with one to three changes; ``tokens`` are words that its parser knows."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = len(text)
        at = rng.randrange(size + 1)
        to = min(size, at + rng.choice((1, 1, 2, 5, size)))
        match rng.randrange(8):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:at] + text[at:to] * rng.choice((2, 2, 9)) + text[to:]
            case 2 if tokens:
                text = text[:at] + rng.choice(tokens) + text[at:]
            case 3 if tokens:
                text = text[:at] + rng.choice(tokens) + text[to:]
            case 4:
                text = text[:at] + rng.choice(EDGE_TEXTS) + text[to:]
            case 5:
                number = rng.choice((*EDGE_INTS, *EDGE_FLOATS, 10**25, 10**400))
                text = text[:at] + str(number) + text[to:]
            case 6:
                text = text[:at]
            case 7:
                text = (
                    text[:at]
                    + rng.choice("[]{}\"'=,.:;#-+ \t\n/\\%$~\x00é\u0660") * rng.choice((1, 1, 2, 900))
                    + text[at:]
                )
        text = text[:most]
    return text
