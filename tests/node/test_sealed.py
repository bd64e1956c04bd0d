"""Sealed links: what is sent comes whole and in order, or not at all; and nobody else keeps two members in TLS."""

from __future__ import annotations

import functools
import hmac
import os
import random
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.config import Config
from gossip.errors import ProtocolError, RefusedError, RemoteError
from gossip.wire.frames import PREFIX, PREFIX_BYTES, encode
from gossip.wire.messages import Chunk, Close, Hello, Ping
from node.identity.keys import Identity, new_secret
from node.links import connector
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.transport import sealed
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
    SealedStream,
    Sealer,
    direction_keys,
    leave_tls,
)
from node.transport.tls import TlsStream, swarm_contexts
from tests.node.test_tls import (
    ALICE_CONTEXTS,
    BOB_CONTEXTS,
    SECRET,
    both_kinds,
    both_ways_at_once,
    drain,
    in_trio,
    memory_pair,
    receive_exactly,
    tls_ends,
    tls_pair,
)

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
DIALLER, ACCEPTOR = bytes(range(32)), bytes(range(32, 64))  # shares, as the page has them
ENDS = DIALLER + bytes(range(64, 80)), ACCEPTOR + bytes(range(80, 96))  # with ids
KEY = b"k" * 32


# -- without a connection ----------------------------------------------------------------------------------------------
def at_once(work):
    """What a coroutine returns that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")


def sealed_bytes(*pieces, key=KEY, end=False, first=0):
    """What a side sends that says these pieces, and then perhaps that it was all."""
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


def opened_bytes(sent, key=KEY, first=0, buffer_bytes=RECORD_BYTES, read_bytes=None):
    """All that the other side takes in of ``sent``, and how it ends: with None, or with what was raised."""
    left, found = memoryview(sent), bytearray()
    opener = Opener(key, "there")
    opener.direction.records = first
    buffer = memoryview(bytearray(buffer_bytes))

    async def read(into):
        nonlocal left
        count = min(len(into), len(left), read_bytes or len(left))
        into[:count], left = left[:count], left[count:]
        return count

    while True:
        try:
            count = at_once(opener.take(read, buffer))
        except RemoteError as error:
            return bytes(found), error
        if not count:
            return bytes(found), None
        found += buffer[:count]


# -- the bytes, as others may write them -------------------------------------------------------------------------------
def slow_keys(dialler, acceptor):
    """RFC 5869 by hand."""
    seed = hmac.digest(bytes(32), dialler + acceptor, "sha256")
    first = hmac.digest(seed, b"gossip sealed 1" + b"\1", "sha256")
    return first, hmac.digest(seed, first + b"gossip sealed 1" + b"\2", "sha256")


def slow_next(key):
    return hmac.digest(key, b"gossip sealed next" + b"\1", "sha256")


def slow_record(key, number, data):
    """One record, by the cipher's parts."""
    prefix = (len(data) + 16).to_bytes(4, "big")
    cipher = Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(12, "big"))).encryptor()
    cipher.authenticate_additional_data(prefix)
    return prefix + cipher.update(data) + cipher.finalize() + cipher.tag


def test_keys_and_records_are_what_a_slow_reading_of_the_page_makes_of_them():
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
    starts, at = [], 0
    for record in records_of(SENT):
        starts += [at] * len(record)
        at += len(record)
    whole = {0: b""} | {
        sum(map(len, records_of(SENT)[:count])): b"".join(FRAMES[:count]) for count in range(1, len(FRAMES) + 1)
    }
    for place in range(len(SENT)):
        for bit in range(8):
            changed = bytearray(SENT)
            changed[place] ^= 1 << bit
            found, error = opened_bytes(changed)
            assert found == whole[starts[place]], (place, bit)
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


def test_what_a_side_sent_is_not_taken_for_the_others():
    keys = direction_keys(*ENDS)
    found, error = opened_bytes(sealed_bytes(b"mine", key=keys[0]), key=keys[1])
    assert not found
    assert isinstance(error, ProtocolError)


@pytest.mark.parametrize("length", [0, 1, TAG_BYTES - 1, RECORD_BYTES + TAG_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_that_nobody_seals_is_refused_before_anything_more_is_read(length):
    opener, asked = Opener(KEY, "there"), []

    async def read(into):
        asked.append(len(into))
        into[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "big")
        return LENGTH_BYTES

    with pytest.raises(ProtocolError, match=f"{length} bytes"):
        at_once(opener.take(read, memoryview(bytearray(8))))
    assert asked == [AHEAD_BYTES]


def reader_of(sent):
    left = memoryview(sent)

    async def read(into):
        nonlocal left
        count = min(len(into), len(left))
        into[:count], left = left[:count], left[count:]
        return count

    return read


def test_large_records_pass_through_room_that_is_given_back(monkeypatch):
    """Nothing fits where it belongs: all goes through the room, of which an idle link has none."""
    rooms = Rooms()
    monkeypatch.setattr(sealed, "ROOMS", rooms)
    opener, read = Opener(KEY, "there"), reader_of(sealed_bytes(*[bytes(RECORD_BYTES)] * 3))
    assert len(rooms.free) == 1, "the sealer's"
    for _ in range(3 * RECORD_BYTES // 8_192):
        assert at_once(opener.take(read, memoryview(bytearray(8_192)))) == 8_192
        assert len(opener.room) <= ROOM_BYTES
    assert len(opener.room) == AHEAD_BYTES
    assert [len(room) for room in rooms.free] == [ROOM_BYTES]
    for _ in range(2 * ROOMS_KEPT):
        rooms.give(memoryview(bytearray(ROOM_BYTES)))
    assert len(rooms.free) == ROOMS_KEPT


def test_two_links_in_the_middle_of_their_records_have_nothing_in_common():
    payloads = [os.urandom(2 * RECORD_BYTES) for _ in range(2)]
    links = [(Opener(KEY, "there"), reader_of(sealed_bytes(payload)), bytearray()) for payload in payloads]
    while any(len(found) < 2 * RECORD_BYTES for *_, found in links):
        for opener, read, found in links:
            buffer = memoryview(bytearray(50_000))
            if len(found) < 2 * RECORD_BYTES:
                found += buffer[: at_once(opener.take(read, buffer))]
    assert [bytes(found) for *_, found in links] == payloads


@settings(max_examples=60, deadline=None)
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


def test_what_may_not_come_is_never_waited_for():
    """A thread's call waits for all that it is asked for, where that is much."""
    frames = [os.urandom(100), os.urandom(RECORD_BYTES), os.urandom(RECORD_BYTES // 2)]
    sent = memoryview(sealed_bytes(*frames))

    async def read(into):
        nonlocal sent
        assert len(into) < 65_536 or len(into) <= len(sent), "more than there will be"
        count = min(len(into), len(sent))
        into[:count], sent = sent[:count], sent[count:]
        return count

    opener, found = Opener(KEY, "there"), bytearray(sum(map(len, frames)))
    view = memoryview(found)
    assert at_once(opener.take(read, view[:AHEAD_BYTES])) == 100
    at = 100
    while at < len(found):
        at += at_once(opener.take(read, view[at:]))
    assert bytes(found) == b"".join(frames)
    assert not opener.ready


@in_trio
async def test_a_member_between_two_others_cannot_give_both_its_links_one_key():
    """It dials one with the share that the other gave it, and answers that one with the share that it is given: then
    it could join the two connections and leave."""
    ends = []
    mallory = swarm_contexts(Identity.fresh(), SECRET)
    for dialler, acceptor in ((ALICE_CONTEXTS, mallory), (mallory, BOB_CONTEXTS)):
        near, far = await tls_ends(memory_pair, dialler, acceptor)
        ends += [await leave_tls(near, DIALLER, ACCEPTOR), await leave_tls(far, ACCEPTOR, DIALLER)]
    alice, one, other, bob = ends
    assert alice.sealer.direction.key == one.opener.direction.key
    assert other.sealer.direction.key == bob.opener.direction.key
    assert len({end.sealer.direction.key for end in ends}) == 4


# -- leaving TLS -------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def sealed_pair(pair):
    async with tls_pair(pair) as (alice, bob):
        yield await leave_tls(alice, DIALLER, ACCEPTOR), await leave_tls(bob, ACCEPTOR, DIALLER)


@both_kinds
@in_trio
async def test_both_ways_at_once_arrive_intact(pair):
    async with sealed_pair(pair) as (alice, bob):
        await both_ways_at_once(alice, bob, 3_000_000)
    assert alice.sealed
    assert bob.sealed


@both_kinds
@pytest.mark.parametrize("first", ["alice", "bob"])
@in_trio
async def test_either_may_be_the_first_to_leave_tls_and_what_the_other_still_says_there_is_heard(pair, first):
    async with tls_pair(pair) as (alice, bob):
        one, other = (alice, bob) if first == "alice" else (bob, alice)
        early = await leave_tls(one, DIALLER, ACCEPTOR) if one is alice else await leave_tls(one, ACCEPTOR, DIALLER)
        await early.send_all(b"sealed at once")
        await other.send_all(b"still in TLS")
        assert await receive_exactly(early, 12) == b"still in TLS"
        assert not early.sealed
        shares = (DIALLER, ACCEPTOR) if other is alice else (ACCEPTOR, DIALLER)
        late = await leave_tls(other, *shares)
        await late.send_all(b"now as well")
        assert await receive_exactly(late, 14) == b"sealed at once"
        assert await receive_exactly(early, 11) == b"now as well"
        assert early.sealed
        assert late.sealed


@both_kinds
@in_trio
async def test_what_was_said_in_tls_before_it_was_left_is_heard_although_it_is_read_later(pair):
    async with tls_pair(pair) as (alice, bob):
        await bob.send_all(b"w" * 40_000)
        far = await leave_tls(bob, ACCEPTOR, DIALLER)
        await far.send_all(b"sealed")
        near = await leave_tls(alice, DIALLER, ACCEPTOR)
        assert await receive_exactly(near, 40_006) == b"w" * 40_000 + b"sealed"


@both_kinds
@in_trio
async def test_a_proper_close_is_an_end_and_another_is_none(pair):
    async with sealed_pair(pair) as (alice, bob):
        await bob.send_all(b"w")
        assert (
            await receive_exactly(alice, 1) == b"w"
        )  # a socket that is closed with bytes unread resets its connection
        await alice.send_all(b"farewell")
        await alice.aclose()
        assert await receive_exactly(bob, 8) == b"farewell"
        assert await bob.receive_into(memoryview(bytearray(8))) == 0
        assert await bob.receive_into(memoryview(bytearray(8))) == 0
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")
    for forged in (0, 1):  # an end that nobody sealed: in TLS's place, and behind a record
        async with sealed_pair(memory_pair) as (alice, bob):
            if forged:
                await alice.send_all(b"w")
                assert await receive_exactly(bob, 1) == b"w"
            await alice.inner.aclose()
            with pytest.raises(BrokenLinkError):
                await drain(bob)


@in_trio
async def test_what_nobody_sealed_behind_tls_ends_the_link():
    async with tls_pair(memory_pair) as (alice, bob):
        near = await leave_tls(alice, DIALLER, ACCEPTOR)
        await bob.leave()
        await bob.inner.send_all(slow_record(bytes(32), 0, b"forged"))
        with pytest.raises(ProtocolError):
            await near.receive_into(memoryview(bytearray(8)))


@in_trio
async def test_a_cancelled_receive_loses_nothing_and_a_torn_send_is_the_last():
    async with sealed_pair(memory_pair) as (alice, bob):
        with trio.move_on_after(0.01) as scope:
            await bob.receive_into(memoryview(bytearray(8)))
        assert scope.cancelled_caught
        await alice.send_all(b"patience")
        assert await receive_exactly(bob, 8) == b"patience"
        with trio.move_on_after(0.01):
            await alice.send_all(bytes(1_000_000))  # nobody reads
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")
        await alice.aclose()
        with pytest.raises(BrokenLinkError):
            await drain(bob)


# -- who seals, and who decides it -------------------------------------------------------------------------------------
class Spoiler:
    """Somebody on the path, who changes what one side sends from some moment on."""

    peer_host = "memory"

    def __init__(self, inner):
        self.inner, self.spoil = inner, bytes
        self.sent = []

    async def receive_into(self, buffer):
        return await self.inner.receive_into(buffer)

    async def send_all(self, data):
        self.sent.append(bytes(data))
        data = self.spoil(self.sent[-1])
        if data:
            await self.inner.send_all(data)

    async def aclose(self):
        await self.inner.aclose()

    def close_now(self):
        self.inner.close_now()


def in_no_time(test):
    """On a clock that goes on where everybody waits: whoever is kept waiting gives up after as long as a node does."""

    @functools.wraps(test)
    def run(**arguments):
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(functools.partial(test, **arguments), clock=clock)

    return run


async def met(near, far, shares=(DIALLER, ACCEPTOR), spoils=None):
    """Both streams after the handshake of two observers, as ``Doors`` makes it: sealed, or not, or what was raised."""
    found = {name: BrokenLinkError("It was kept waiting.") for name in ("near", "far")}

    async def side(name, inner, contexts, server_side, share):
        tls = TlsStream(inner, contexts, server_side=server_side)
        with trio.move_on_after(Config().hello_timeout_s):
            await greeted(name, inner, tls, share)
        if isinstance(found[name], RemoteError):
            tls.close_now()

    async def greeted(name, inner, tls, share):
        try:
            await tls.handshake()
            if spoils is not None and name == "near":
                inner.spoil = spoils
            reader = FrameReader(tls)
            theirs = await Greeter("swarm", None).greet(tls, reader, None, None, None, share)
            stream = await leave_tls(tls, share, theirs.share) if share and theirs.share else tls
            reader.stream = stream
            for number in (1, 2):
                await stream.send_all(encode(Ping(number, ())))
                got = await reader.message()
                if got is not None and isinstance(got[0], Close):
                    raise RefusedError(got[0].code, got[0].sentence)
                assert got == (Ping(number, ()), 0)
            found[name] = stream
        except RemoteError as error:
            found[name] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(side, "near", near, ALICE_CONTEXTS, False, shares[0])
        nursery.start_soon(side, "far", far, BOB_CONTEXTS, True, shares[1])
    return found["near"], found["far"]


@pytest.mark.parametrize("shares", [(DIALLER, ACCEPTOR), (DIALLER, b""), (b"", ACCEPTOR), (b"", b"")])
@in_no_time
async def test_a_link_is_sealed_where_both_can_and_tls_where_one_cannot(shares):
    kinds = {type(stream) for stream in await met(*await memory_pair(), shares)}
    assert kinds == {SealedStream if all(shares) else TlsStream}


@in_no_time
async def test_a_share_of_another_length_is_refused():
    near, far = await met(*await memory_pair(), (DIALLER[:31], ACCEPTOR))
    assert near.code == "protocol", "it left TLS, and heard what the other still said there"
    assert isinstance(far, ProtocolError)


def flipped(place):
    def spoil(data):
        changed = bytearray(data)
        changed[place % len(data)] ^= 1
        return bytes(changed)

    return spoil


SPOILS = {
    "nothing arrives": lambda data: b"",
    "twice": lambda data: data + data,
    "cut": lambda data: data[:-1],
    "plain": lambda data: encode(Hello(1, 1, "swarm", "", (), None)),
    **{f"byte {place}": flipped(place) for place in (0, 3, 5, 20, 60, -1)},
}


@pytest.mark.parametrize("how", [how for how in SPOILS if how != "nothing arrives"])
@pytest.mark.parametrize("after", [0, 1, 2])
@in_no_time
async def test_nobody_on_the_path_makes_two_that_can_seal_go_on_in_tls(how, after):
    """Changed from the Hello on, from the end of TLS on, and from the first record on."""
    one, other = await memory_pair()
    count = 0

    def spoil(data):
        nonlocal count
        count += 1
        return SPOILS[how](data) if count > after else data

    near, far = await met(Spoiler(one), other, spoils=spoil)
    assert not isinstance(near, TlsStream)
    assert isinstance(far, RemoteError)


@in_no_time
async def test_what_tls_lacks_at_its_end_is_not_made_up_by_what_follows():
    """The end of TLS is kept back, and what is sealed comes at once."""
    one, other = await memory_pair()
    count = 0

    def spoil(data):
        nonlocal count
        count += 1
        return b"" if count == 2 else data

    _, far = await met(Spoiler(one), other, spoils=spoil)
    assert isinstance(far, RemoteError)


@in_no_time
async def test_neither_a_share_nor_what_is_said_later_can_be_read_on_the_path():
    one, other = await memory_pair()
    path = Spoiler(one)
    near, _ = await met(path, other)
    assert isinstance(near, SealedStream)
    await near.send_all(encode(Close("idle", "nobody on the path reads this", ())))
    assert len(path.sent) >= 4
    for secret in (
        DIALLER,
        ACCEPTOR,
        b"GSP1",
        b"swarm",
        b"nobody",
        near.sealer.direction.key,
        near.opener.direction.key,
    ):
        assert secret not in b"".join(path.sent)


def test_a_hello_without_a_share_is_one_of_a_node_that_cannot_seal():
    header = {"t": "hello", "version_min": 1, "version_max": 1, "swarm": "s", "fingerprint": "", "capabilities": [],
              "record": None}  # fmt: skip
    packed = msgpack.packb(header)
    frame = PREFIX.pack(b"GSP1", len(packed), 0) + packed

    async def read():
        near, far = await memory_pair()
        await far.send_all(frame)
        return (await FrameReader(near).message())[0]

    assert trio.run(read).share == b""
    assert len(encode(Hello(1, 1, "s", "", (), None, DIALLER))) < PREFIX_BYTES + 200


# -- nodes -------------------------------------------------------------------------------------------------------------
def streams_of(trainee):
    return [link.stream for link in trainee.do(lambda node: node._training.runtime.links.all())]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(new_secret())
    path.chmod(0o600)
    return path


def test_nodes_with_a_secret_seal_and_those_that_cannot_mix_with_them_in_tls(train, until, quick, secret, monkeypatch):
    """One of three has a library that cannot open a record in its place."""
    old = set()
    monkeypatch.setattr(connector, "fresh_share", lambda: b"" if threading.get_ident() in old else sealed.fresh_share())

    def older(model):
        trainee = train({"x": model}, secret=secret, config=quick)
        old.add(trainee.side.thread.thread.ident)
        return trainee

    first = older(np.zeros(4096, np.float32))
    rest = [
        train({"x": np.zeros(4096, np.float32)}, secret=secret, config=quick, seeds=[first.node.address])
        for _ in range(2)
    ]
    until(lambda: all(len(streams_of(one)) >= 2 for one in (first, *rest)))
    until(lambda: all(one.node.metrics().exchanges_done > 3 for one in (first, *rest)))
    kinds = [[type(stream) for stream in streams_of(one)] for one in (first, *rest)]
    assert set(kinds[0]) == {TlsStream}
    assert all({TlsStream, SealedStream} == set(found) for found in kinds[1:])
