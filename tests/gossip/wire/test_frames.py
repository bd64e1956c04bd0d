"""Messages come back from the wire unchanged, and anything else is refused."""

import dataclasses
import math
import random
import struct

import msgpack
import pytest

from gossip.errors import ProtocolError
from gossip.ids import Address, Claim, MemberRecord, PeerId
from gossip.wire.frames import (
    FIELDS,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    decode,
    encode,
    read_prefix,
)  # fmt: skip
from gossip.wire.messages import (
    MAX_RECORDS,
    MAX_UPDATES,
    MESSAGES,
    TAGS,
    VERSION_MAX,
    VERSION_MIN,
    Chunk,
    Gossip,
    Hello,
    Hint,
    Offer,
    Ping,
    Reached,
    Records,
    Serving,
    StatusReply,
    Unknown,
)  # fmt: skip
from tests.fuzz.grammar import World, make_message


def split(frame):
    header_bytes, body_bytes = read_prefix(frame[:PREFIX_BYTES])
    assert len(frame) == PREFIX_BYTES + header_bytes
    return frame[PREFIX_BYTES:], body_bytes


def table_of(message):
    return msgpack.unpackb(split(encode(message))[0])


def refused(table_or_bytes, body_bytes=0):
    data = table_or_bytes if isinstance(table_or_bytes, bytes) else msgpack.packb(table_or_bytes)
    with pytest.raises(ProtocolError) as caught:
        decode(data, body_bytes)
    return str(caught.value)


LARGEST = MemberRecord(
    PeerId(b"i" * 16), b"k" * 32, 2**63 - 1, 2**63 - 1, False, Address(".".join(["h" * 63] * 3), 65_535),
    (PeerId(b"h" * 16),) * 3,
    True, b"g" * 16, 2**63 - 1, 2**63 - 1, 2**63 - 1, 0.1, 0.1, True, b"s" * 64,
)  # fmt: skip
NEWER = dataclasses.replace(LARGEST, extra=(b"n" * 378, None, True))  # 384 bytes of a newer version's
OFFER = Offer(7, "f" * 32, b"g" * 16, 1.5, 0.5, "fp32")


# -- round trips -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tag", MESSAGES)
def test_every_message_comes_back_as_it_was(tag):
    rng, world = random.Random(tag), World()
    for _ in range(100):
        message = make_message(rng, world, tag)
        if tag == "hello":  # of a Hello without a common version, nothing but its versions is read
            versions = {"version_min": rng.randint(0, VERSION_MAX), "version_max": rng.randint(VERSION_MIN, 255)}
            message = dataclasses.replace(message, **versions)
        assert decode(split(encode(message))[0]) == message


def test_the_prefix_says_how_long_header_and_body_are():
    frame = encode(Chunk(1, 2, 250, 2**64 - 1), 1000)
    assert frame[:4] == MAGIC
    assert read_prefix(frame[:PREFIX_BYTES]) == (len(frame) - PREFIX_BYTES, 1000)
    assert decode(frame[PREFIX_BYTES:], 1000) == Chunk(1, 2, 250, 2**64 - 1)


@pytest.mark.parametrize(
    "message",
    [
        Records((LARGEST,) * MAX_RECORDS, bytes(range(256))),
        Ping(1, (NEWER,) * MAX_UPDATES),
        StatusReply((1, "x", None, True, b"", (1.5, ())), ((1,),), True),
    ],
    ids=["largest records", "largest records of a newer version", "nested values"],
)
def test_the_largest_records_and_nested_values_come_back_and_fit_a_header(message):
    assert decode(split(encode(message))[0]) == message


def test_a_header_over_the_limit_is_not_sent():
    with pytest.raises(ValueError, match="over the limit"):
        encode(StatusReply(("x" * 300,) * 400, (), False))


# -- prefixes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "prefix",
    [
        struct.pack(">4sII", b"HTTP", 10, 0),
        struct.pack(">4sII", MAGIC, MAX_HEADER_BYTES + 1, 0),
        struct.pack(">4sII", MAGIC, 0, 0),
        struct.pack(">4sII", MAGIC, 10, MAX_BODY_BYTES + 1),
        b"GSP1\0\0\0",
    ],
    ids=["wrong magic", "header one over", "no header", "body one over", "cut"],
)
def test_a_prefix_beyond_the_limits_is_refused_and_one_at_the_limits_read(prefix):
    with pytest.raises(ProtocolError):
        read_prefix(prefix)
    most = MAX_HEADER_BYTES, MAX_BODY_BYTES
    assert read_prefix(struct.pack(">4sII", MAGIC, *most)) == most


@pytest.mark.parametrize(
    ("at_limit", "beyond"),
    [
        ([0] * 4096, [0] * 4097),
        ({str(key): 0 for key in range(256)}, {str(key): 0 for key in range(257)}),
        ("x" * 4096, "x" * 4097),
        (b"x" * 8192, b"x" * 8193),
        (None, msgpack.ExtType(1, b"x")),
    ],
    ids=["array", "map", "text", "bytes", "extension"],
)
def test_no_field_of_a_header_is_longer_than_its_kind_allows(at_limit, beyond):
    """A field that this version does not know is skipped, and could otherwise be of any length."""
    known = msgpack.unpackb(encode(Ping(1, ()))[PREFIX_BYTES:])
    assert decode(msgpack.packb(known | {"added": at_limit})) == Ping(1, ())
    with pytest.raises(ProtocolError, match="not valid msgpack"):
        decode(msgpack.packb(known | {"added": beyond}))


# -- hostile headers -------------------------------------------------------------------------------------------------
HOSTILE = {
    "empty": b"", "no msgpack": b"\xc1", "nesting bomb": b"\x91" * 60_000 + b"\x90",
    "4 Gi items": b"\xdd\xff\xff\xff\xff", "4 Gi pairs": b"\xdf\xff\xff\xff\xff", "4 GiB text": b"\xdb\xff\xff\xff\xff",
    "4 GiB bytes": b"\xc6\xff\xff\xff\xff", "empty ext": b"\x82\xa1t\xa7reached\xa2ok\xc7\x00\x05",
    "timestamp": b"\x82\xa1t\xa7reached\xa2ok\xd6\xff\x00\x00\x00\x01",
    "same key twice": b"\x83\xa1t\xa7reached\xa2ok\xc3\xa2ok\xc3", "int key": b"\x82\xa1t\xa7reached\x01\xc3",
    "bad UTF-8": b"\x82\xa1t\xa7reached\xa2\xff\xfe\xc3", "trailing byte": b"\x82\xa1t\xa7reached\xa2ok\xc3\x00",
    "list as key": b"\x81\x90\xc0", "a list": b"\x90", "nil": b"\xc0", "no tag": b"\x80",
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_no_correct_peer_sends_is_refused_and_its_correct_twin_accepted(data):
    refused(data)
    assert decode(b"\x82\xa1t\xa7reached\xa2ok\xc3") == Reached(True)


@pytest.mark.parametrize("levels", [3, 4, 400, 900])
def test_nested_values_end_the_link_and_not_the_process(levels):
    """msgpack unpacks a thousand levels; walking them once exhausted Python's stack."""
    nested = b"\x91" * levels + b"\x90"
    header = b"\x84\xa1t\xa6status\xa7metrics\x90\xa7members" + nested + b"\xa4more\xc2"
    if levels == 3:
        assert decode(header) == StatusReply((), ((((),),),), False)
    else:
        refused(header)


@pytest.mark.parametrize("value", [{"a": 1}, [{"a": {}}]], ids=["map", "map in a list"])
def test_nested_values_hold_no_map(value):
    refused({"t": "status", "metrics": [value], "members": [], "more": False})


def test_an_unknown_type_and_a_missing_field_are_refused():
    table = table_of(OFFER)
    assert "unknown type" in refused(table | {"t": "offers"})
    assert "unknown type" in refused(table | {"t": ""})
    assert "not a message" in refused(table | {"t": 5})
    assert "lacks its field codec" in refused({key: value for key, value in table.items() if key != "codec"})
    assert "lacks its field codec" in refused({("kodec" if key == "codec" else key): v for key, v in table.items()})


# -- other versions --------------------------------------------------------------------------------------------------
def test_fields_that_a_newer_version_added_are_read_past():
    assert decode(msgpack.packb(table_of(OFFER) | {"colour": [1, {"deep": b"x"}], "shape": None})) == OFFER


def test_a_field_that_came_later_is_its_default_where_an_older_version_leaves_it_out():
    serving = Serving(1, 2.0, b"g" * 16, (), (), 500, True, b"h" * 32)
    table = table_of(serving)
    assert decode(msgpack.packb(table)) == serving
    del table["swarm_samples"], table["finished"], table["frozen_hash"]
    assert decode(msgpack.packb(table)) == Serving(1, 2.0, b"g" * 16, (), (), 0, False, b"")


def test_a_message_of_a_newer_version_is_unknown_and_no_fault():
    header = msgpack.packb({"t": "dance", "partner": 5})
    assert decode(header, newer=True) == Unknown("dance")
    assert decode(header, 1000, newer=True) == Unknown("dance")  # its body is thrown away
    refused(header)


@pytest.mark.parametrize("spoken", [(2, 3), (0, 0), (255, 255)])
def test_a_hello_of_versions_that_are_not_spoken_here_is_read_for_its_versions_alone(spoken):
    """Its other fields may be anything by then, and both versions must be named all the same."""
    strange = {"t": "hello", "version_min": spoken[0], "version_max": spoken[1], "swarm": 5, "record": {"id": 7}}
    assert decode(msgpack.packb(strange)) == Hello(*spoken, "", "", (), None)
    refused(strange | {"version_min": 1, "version_max": 1})
    refused(strange | {"version_min": 3, "version_max": 2})


def test_a_hint_with_more_values_is_the_hint_that_is_known():
    hint = Hint(PeerId(b"p" * 16), 3, True, PeerId(b"q" * 16), b"s" * 64)
    table = table_of(Gossip((hint,)))
    table["updates"][0] += ["why", 7]
    assert decode(msgpack.packb(table)) == Gossip((hint,))


@pytest.mark.parametrize(
    "extra",
    [[[1]], [{}], [math.nan], [math.inf], [0] * 17, [b"x" * 381], ["x" * 100, "x" * 290]],
    ids=["list", "map", "nan", "inf", "seventeen", "long", "long together"],
)
def test_what_stands_behind_a_record_is_plain_and_little(extra):
    assert decode(msgpack.packb({"t": "gossip", "updates": [[*RECORD, 1, "x"]]})).updates[0].extra == (1, "x")
    refused({"t": "gossip", "updates": [[*RECORD, *extra]]})


@pytest.mark.parametrize("cls", [cls for cls in MESSAGES.values() if cls is not Chunk], ids=lambda cls: TAGS[cls])
def test_only_a_chunk_has_a_body(cls):
    header, _ = split(encode(example(cls)))
    assert "came with a body" in refused(header, 1)


def example(cls):
    """Return the smallest message of a class."""
    empty = {
        "int": 0, "float": 0.0, "bool": False, "text": "", "bytes": b"", "id": b"i" * 16, "record?": None,
        "claim": Claim(),
    }  # fmt: skip
    versions = {"version_min": VERSION_MIN, "version_max": VERSION_MAX} if cls is Hello else {}
    return cls(**{name: empty.get(kind.form, ()) for name, kind in FIELDS[cls]} | versions)


WRONG = {
    "int": [-1, True, 1.0, None, "1", b"1", [], "over"],
    "float": [1, True, math.nan, math.inf, -math.inf, None, "1.0"],
    "bool": [0, 1, None, "yes"],
    "text": [5, b"abc", None, "over", "\x1b[2J", "two\nlines", "null\0"],
    "bytes": ["text", 5, None, "over"],
    "id": [b"i" * 15, b"i" * 17, "i" * 16, None],
    "ids": [None, b"i" * 16, [b"i" * 15], ["i" * 16], "over"],
    "record?": [5, [], [1, 2, 3, 4], "record"],
    "updates": [
        None, 5, [5], [None], [[]], [[b"i" * 16, 1, True]], [[b"i" * 16, -1, True, b"i" * 16]],
        [[b"i" * 16, 1, 1, b"i" * 16]], "over",
    ],
    "names": [None, "ab", [5], [b"ab"], ["x" * 65], "over"],
    "claim": [None, [], [1, 2, 3], [1] * 5, [-1, 0, 0, 0], [0, 0, 0, 2**53], [1.0, 2, 3, 4], [True, 2, 3, 4]],
    "scalars": [None, [5], [["lr"]], [["lr", 1]], [["lr", math.nan]], [[5, 1.0]], [["lr", 1.0, 1]], "over"],
    "any": [None, 5, "text", {}, "over"],
}  # fmt: skip


def over(kind):
    """Return a value just beyond the bound of a field."""
    return {
        "int": lambda: kind.bound + 1 if kind.bound < 2**64 - 1 else -5,  # msgpack has no larger ones
        "text": lambda: "x" * (kind.bound + 1), "bytes": lambda: b"x" * (kind.bound + 1),
        "ids": lambda: [b"i" * 16] * (kind.bound + 1),
        "names": lambda: ["x"] * (kind.bound + 1), "scalars": lambda: [["x", 1.0]] * (kind.bound + 1),
        "any": lambda: [0] * (kind.bound + 1),
        "updates": lambda: [[b"i" * 16, 1, True, b"i" * 16]] * (kind.bound + 1),
    }[kind.form]()  # fmt: skip


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=list(MESSAGES))
def test_a_field_of_another_type_or_over_its_bound_is_refused(cls):
    table = table_of(example(cls))
    for name, kind in FIELDS[cls]:
        for value in WRONG[kind.form]:
            wrong = over(kind) if value == "over" and kind.form != "record?" else value
            refused(table | {name: wrong})


RECORD = table_of(Gossip((LARGEST,)))["updates"][0]
WRONG_IN_RECORDS = {
    "id": [b"", b"i" * 15, None], "public_key": [b"k" * 33, "k", None], "incarnation": [-1, 2**63, True, 1.0],
    "sequence": [-1, 2**63, None], "left": [0, None], "address": [5, [], ["h"], ["h", 1, 1], ["h" * 256, 1],
        ["a..b", 1], ["h" * 64, 1], ["\u00e9", 1],
    ["h", 65_536], ["h", -1], [b"h", 1], ["h\n", 1]], "homes": [None, [b"i"], [b"i" * 16] * 4], "ready": [1, None],
    "run_id": [b"g" * 17, "g"], "progress": [-1, 0.5], "steps": [-1, True], "samples": [2**64 - 1],
    "loss": [1, math.nan, math.inf, "1"], "version": [1, None, math.nan, math.inf], "finished": [0, None],
    "signature": [b"s" * 65, None],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_IN_RECORDS)
def test_a_record_with_a_wrong_field_is_refused(name):
    names = [field.name for field in dataclasses.fields(MemberRecord)]
    assert decode(msgpack.packb({"t": "gossip", "updates": [RECORD]})) == Gossip((LARGEST,))
    assert set(names) == {*WRONG_IN_RECORDS, "extra"}
    for value in WRONG_IN_RECORDS[name]:
        wrong = [*RECORD]
        wrong[names.index(name)] = value
        refused({"t": "gossip", "updates": [wrong]})
        refused({"t": "hello"} | table_of(example(Hello)) | {"record": wrong})
    refused({"t": "gossip", "updates": [RECORD[:-1]]})


@pytest.mark.parametrize("tag", MESSAGES)
def test_a_header_cut_short_anywhere_is_refused(tag):
    header, _ = split(encode(make_message(random.Random(1), World(), tag)))
    for length in range(len(header)):
        refused(header[:length])
