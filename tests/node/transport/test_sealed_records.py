"""Sealed records arrive whole and in order or not at all, whatever an attacker on the path does."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import ProtocolError, RemoteError
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Ping
from node.identity.keys import Identity
from node.transport import sealed
from node.transport.blocking_io import WHOLE_BYTES
from node.transport.byte_stream import BrokenLinkError
from node.transport.sealed import (
    AHEAD_BYTES,
    LENGTH_BYTES,
    RECORD_BYTES,
    RECORDS_A_KEY,
    ROOM_BYTES,
    ROOMS_KEPT,
    TAG_BYTES,
    Opener,
    Rooms,
    Sealer,
    direction_keys,
    leave_tls,
)
from node.transport.tls import swarm_contexts
from tests.node.offline import in_trio
from tests.node.transport.sealing import ACCEPTOR, DIALLER, ENDS, KEY, slow_keys, slow_next, slow_record
from tests.node.transport.test_tls import ALICE_CONTEXTS, BOB_CONTEXTS, SECRET, memory_pair, tls_ends

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


# -- without a connection ----------------------------------------------------------------------------------------------
def at_once(work):
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")


def sealed_bytes(*pieces, key=KEY, end=False, first=0):
    """Return the sealed records of these pieces and, with ``end``, the sealed end."""
    sent = bytearray()
    sealer = Sealer(key, "here")
    sealer.direction.records = first

    async def write(*parts):
        for part in parts:
            sent.extend(part)

    for piece in pieces:
        at_once(sealer.send(write, piece))
    if end:
        at_once(sealer.end(write))
    return bytes(sent)


def reader_of(sent, read_bytes=None, thread=False):
    """Return a function that reads ``sent``, at most ``read_bytes`` a call.

    With ``thread`` it fails where a thread would wait: a call for many bytes returns when all of them have come.
    """
    left = memoryview(sent)

    async def read(into):
        nonlocal left
        assert not thread or len(into) < WHOLE_BYTES or len(into) <= len(left), "more than there will be"
        count = min(len(into), len(left), read_bytes or len(left))
        into[:count], left = left[:count], left[count:]
        return count

    return read


def opened_bytes(sent, key=KEY, first=0, buffer_bytes=RECORD_BYTES, read_bytes=None):
    """Return what the other side reads of ``sent``, and the error that ends it, or None."""
    opener, read, found = Opener(key, "there"), reader_of(sent, read_bytes), bytearray()
    opener.direction.records = first
    buffer = memoryview(bytearray(buffer_bytes))
    while True:
        try:
            count = at_once(opener.receive(read, buffer))
        except RemoteError as error:
            return bytes(found), error
        if not count:
            return bytes(found), None
        found += buffer[:count]


# -- the bytes, as others may write them -------------------------------------------------------------------------------
def test_keys_and_records_agree_with_a_plain_implementation_of_the_page():
    dialler, acceptor = direction_keys(*ENDS)
    assert (dialler, acceptor) == slow_keys(*ENDS)
    assert dialler != acceptor
    data = os.urandom(RECORD_BYTES + 1)
    assert sealed_bytes(b"first", data, key=dialler, end=True) == b"".join(
        slow_record(dialler, number, piece)
        for number, piece in enumerate((b"first", data[:RECORD_BYTES], data[RECORD_BYTES:], b""))
    )


def test_a_key_gives_way_to_the_next_before_it_has_sealed_too_much():
    assert RECORDS_A_KEY * RECORD_BYTES // 16 < 2**34.5, "blocks, RFC 8446 5.5"
    first = RECORDS_A_KEY - 1
    sent = sealed_bytes(b"last", b"first", b"second", first=first)
    following = slow_next(KEY)
    assert sent == slow_record(KEY, first, b"last") + slow_record(following, first + 1, b"first") + slow_record(
        following, first + 2, b"second"
    )
    found, error = opened_bytes(sent, first=first)
    assert found == b"lastfirstsecond"
    assert isinstance(error, BrokenLinkError)


def test_the_vectors_of_the_page_are_what_is_sent():
    dialler, acceptor = direction_keys(*ENDS)
    chunk = encode(Chunk(7, 0, 2, 0x0123456789ABCDEF), 8)
    body = np.array([1.0, -1.0], "<f4").tobytes()
    vectors = {
        "dialler's key": dialler, "acceptor's key": acceptor, "dialler's next key": slow_next(dialler),
        "frame of ping": encode(Ping(5, ())), "dialler, record 0": sealed_bytes(encode(Ping(5, ())), key=dialler),
        "header of chunk": chunk, "body of chunk": body,
        "dialler, record 1": sealed_bytes(chunk, key=dialler, first=1),
        "dialler, record 2": sealed_bytes(body, key=dialler, first=2),
        "dialler, the end as record 3": slow_record(dialler, 3, b""),
        "dialler, `gossip` as record 2^20": sealed_bytes(b"gossip", key=dialler, first=2**20),
        "acceptor, the end as record 0": slow_record(acceptor, 0, b""),
    }  # fmt: skip
    rows = [f"| {name} | `{value.hex()}` |" for name, value in vectors.items()]
    assert "\n".join(rows) in PAGE, "\n".join(rows)


# -- what somebody on the path may do ----------------------------------------------------------------------------------
FRAMES = (encode(Ping(5, ())), encode(Chunk(7, 0, 2, 9), 8), bytes(range(8)))
SENT = sealed_bytes(*FRAMES, end=True)
SAID = b"".join(FRAMES)


def records_of(sent):
    found = []
    while sent:
        size = LENGTH_BYTES + int.from_bytes(sent[:LENGTH_BYTES], "big")
        found.append(sent[:size])
        sent = sent[size:]
    return found


def test_every_changed_bit_of_a_frame_ends_the_link_and_nothing_of_its_record_is_taken():
    before = []  # By place, what the records before that of the place hold.
    for number, record in enumerate(records_of(SENT)):
        before += [b"".join(FRAMES[:number])] * len(record)
    for place in range(len(SENT)):
        for bit in range(8):
            changed = bytearray(SENT)
            changed[place] ^= 1 << bit
            found, error = opened_bytes(changed)
            assert found == before[place], (place, bit)
            assert isinstance(error, ProtocolError | BrokenLinkError), (place, bit)


def test_a_link_cut_after_any_byte_is_broken_and_never_at_its_end():
    assert opened_bytes(SENT) == opened_bytes(SENT, read_bytes=1) == (SAID, None)
    for size in range(len(SENT)):
        found, error = opened_bytes(SENT[:size])
        assert isinstance(error, BrokenLinkError), size
        assert SAID.startswith(found)


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0), (0, 2), (0, 1, 1), (0, 1, 0), (0, 1, 3), (3, 3), (0, 1, 2, 2)])
def test_a_record_again_out_of_turn_or_left_out_is_not_opened(order):
    records = records_of(SENT)
    found, error = opened_bytes(b"".join(records[place] for place in order))
    right = [place for count, place in enumerate(order) if order[: count + 1] == tuple(range(count + 1))]
    assert found == b"".join(FRAMES[place] for place in right)
    assert isinstance(error, ProtocolError)


def test_nothing_comes_behind_the_end():
    assert opened_bytes(SENT + SENT) == (SAID, None)


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1, RECORD_BYTES + TAG_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_that_nobody_seals_is_refused_before_anything_more_is_read(length):
    opener, asked = Opener(KEY, "there"), []

    async def read(into):
        asked.append(len(into))
        into[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "big")
        return LENGTH_BYTES

    with pytest.raises(ProtocolError, match=f"{length} bytes"):
        at_once(opener.receive(read, memoryview(bytearray(8))))
    assert asked == [AHEAD_BYTES]


def test_large_records_pass_through_room_that_is_given_back(monkeypatch):
    """No record fits the caller's buffer: all go through a larger one, which an idle link does not hold."""
    rooms = Rooms()
    monkeypatch.setattr(sealed, "ROOMS", rooms)
    opener, read = Opener(KEY, "there"), reader_of(sealed_bytes(*[bytes(RECORD_BYTES)] * 3))
    assert len(rooms.free_rooms) == 1, "the sealer's"
    for _ in range(3 * RECORD_BYTES // 8_192):
        assert at_once(opener.receive(read, memoryview(bytearray(8_192)))) == 8_192
        assert len(opener.room) <= ROOM_BYTES
    assert len(opener.room) == AHEAD_BYTES
    assert [len(room) for room in rooms.free_rooms] == [ROOM_BYTES]
    for _ in range(2 * ROOMS_KEPT):
        rooms.give(memoryview(bytearray(ROOM_BYTES)))
    assert len(rooms.free_rooms) == ROOMS_KEPT


def test_two_links_in_the_middle_of_their_records_have_nothing_in_common():
    payloads = [os.urandom(2 * RECORD_BYTES) for _ in range(2)]
    links = [(Opener(KEY, "there"), reader_of(sealed_bytes(payload)), bytearray()) for payload in payloads]
    while any(len(found) < 2 * RECORD_BYTES for *_, found in links):
        for opener, read, found in links:
            buffer = memoryview(bytearray(50_000))
            if len(found) < 2 * RECORD_BYTES:
                found += buffer[: at_once(opener.receive(read, buffer))]
    assert [bytes(found) for *_, found in links] == payloads


@given(
    st.lists(st.sampled_from([1, 5, 100, 16_000, 16_400, 70_000, RECORD_BYTES - 1, RECORD_BYTES + 1]), max_size=5),
    st.sampled_from([1_000, AHEAD_BYTES, 70_000, RECORD_BYTES, 600_000]),
    st.sampled_from([900, AHEAD_BYTES + 1, 65_537, None]),
)
def test_all_comes_in_order_however_it_is_cut(sizes, buffer_bytes, read_bytes):
    draw = random.Random(0)
    pieces = [draw.randbytes(size) for size in sizes]
    sent = sealed_bytes(*pieces, end=True)
    assert opened_bytes(sent, buffer_bytes=buffer_bytes, read_bytes=read_bytes) == (b"".join(pieces), None)


def test_a_read_asks_for_no_more_bytes_than_are_certain_to_come():
    """A call in a thread waits for all the bytes that it asks for, if these are many."""
    frames = [os.urandom(100), os.urandom(RECORD_BYTES), os.urandom(RECORD_BYTES // 2)]
    opener, read = Opener(KEY, "there"), reader_of(sealed_bytes(*frames), thread=True)
    found = memoryview(bytearray(sum(map(len, frames))))
    at = at_once(opener.receive(read, found[:AHEAD_BYTES]))
    assert at == 100
    while at < len(found):
        at += at_once(opener.receive(read, found[at:]))
    assert found == b"".join(frames)
    assert not opener.is_ready


@in_trio
async def test_a_member_between_two_others_cannot_give_both_its_links_one_key():
    """Otherwise it could join the two connections and leave.

    It passes on to each side the share that the other side gave it.
    """
    ends = []
    mallory = swarm_contexts(Identity.fresh(), SECRET)
    for dialler, acceptor in ((ALICE_CONTEXTS, mallory), (mallory, BOB_CONTEXTS)):
        near, far = await tls_ends(memory_pair, dialler, acceptor)
        ends += [await leave_tls(near, DIALLER, ACCEPTOR), await leave_tls(far, ACCEPTOR, DIALLER)]
    alice, one, other, bob = ends
    assert alice.sealer.direction.key == one.opener.direction.key
    assert other.sealer.direction.key == bob.opener.direction.key
    assert len({end.sealer.direction.key for end in ends}) == 4
