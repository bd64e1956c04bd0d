"""Links under TLS: strangers are refused, bytes arrive whole and in order, and an end is told from a cut."""

import functools
import itertools
import os
import random
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import GossipError, ProtocolError, RefusedError
from node.identity.keys import Identity
from node.transport import tls
from node.transport.byte_stream import BrokenLinkError, PlainStream
from node.transport.sealed import leave_tls
from node.transport.tls import Contexts, TlsStream, leaf_peer_id, swarm_contexts
from tests.memory_stream import memory_stream_pair
from tests.node.offline import in_trio
from tests.node.transport.sealing import ACCEPTOR, DIALLER, slow_record

SECRET = bytes(range(32))
ALICE, BOB = Identity.fresh(), Identity.fresh()
ALICE_CONTEXTS, BOB_CONTEXTS = swarm_contexts(ALICE, SECRET), swarm_contexts(BOB, SECRET)


# -- two ends ----------------------------------------------------------------------------------------------------------
async def loopback_pair():
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = trio.socket.socket()
        await client.connect(listener.getsockname())
        server, _ = await listener.accept()
    return PlainStream(client), PlainStream(server)


async def memory_pair():
    return memory_stream_pair()


both_kinds = pytest.mark.parametrize("pair", [loopback_pair, memory_pair])


async def tls_ends(pair, dials=ALICE_CONTEXTS, accepts=BOB_CONTEXTS):
    """Return both ends of one connection after the handshake."""
    left, right = await pair()
    ends = TlsStream(left, dials, server_side=False), TlsStream(right, accepts, server_side=True)
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.handshake)
    return ends


@asynccontextmanager
async def plain_pair(pair):
    ends = await pair()
    try:
        yield ends
    finally:
        for end in ends:
            end.close_now()


@asynccontextmanager
async def tls_pair(pair):
    """Alice dialled, Bob accepted, and both have finished the handshake."""
    async with plain_pair(functools.partial(tls_ends, pair)) as ends:
        yield ends


SHARES = {"alice": (DIALLER, ACCEPTOR), "bob": (ACCEPTOR, DIALLER)}


@asynccontextmanager
async def sealed_pair(pair):
    """Alice and Bob have left TLS, and neither has read yet that the other has."""
    async with tls_pair(pair) as (alice, bob):
        yield await leave_tls(alice, *SHARES["alice"]), await leave_tls(bob, *SHARES["bob"])


both_encryptions = pytest.mark.parametrize("encrypted", [tls_pair, sealed_pair])


async def receive_exactly(stream, count):
    data = bytearray(count)
    filled = 0
    while filled < count:
        got = await stream.receive_into(memoryview(data)[filled:])
        if not got:
            raise AssertionError(f"the stream ended after {filled} of {count} bytes")
        filled += got
    return bytes(data)


async def drain(stream):
    """Read until the orderly end of the stream."""
    while await stream.receive_into(memoryview(bytearray(100_000))):
        pass


async def expect_broken_end(stream):
    with pytest.raises(BrokenLinkError):
        await drain(stream)


async def first_word(stream, errors):
    """Shake hands, send a word and read one, as every link does first; close at the first failure."""
    try:
        await stream.handshake()
        await stream.send_all(b"hello")
        if not await stream.receive_into(memoryview(bytearray(100))):
            raise BrokenLinkError("The other side closed.")
    except GossipError as error:
        errors.append(error)
    finally:
        await stream.aclose()


async def meet(pair, client, server):
    """Exchange a first word. Return the errors of the dialler and those of the acceptor."""
    left, right = await pair()
    told = [], []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first_word, TlsStream(left, client, server_side=False), told[0])
        nursery.start_soon(first_word, TlsStream(right, server, server_side=True), told[1])
    return told


def without_certificate(_):
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (client, server):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return Contexts(client, server, ALICE.id)


def self_signed(folder):
    """Return contexts whose certificate has the right names, but is signed by its own key."""
    contexts = without_certificate(folder)
    identity = Identity.fresh()
    path = folder / "leaf.pem"
    path.write_bytes(tls._leaf_certificate(identity, identity._key).public_bytes(serialization.Encoding.PEM))
    with path.open("ab") as file:
        file.write(identity.pem())
    for context in (contexts.client_context, contexts.server_context):
        context.load_cert_chain(path)
    return contexts


def with_another_secret(_):
    return swarm_contexts(Identity.fresh(), b"x" * 32)


def at_tls_1_2(_):
    contexts = swarm_contexts(Identity.fresh(), SECRET)
    for context in (contexts.client_context, contexts.server_context):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return contexts


strangers = pytest.mark.parametrize("stranger", [without_certificate, self_signed, with_another_secret, at_tls_1_2])


@both_kinds
@strangers
@in_trio
async def test_a_stranger_who_dials_is_refused_and_both_are_told(pair, stranger, tmp_path):
    dialler, acceptor = await meet(pair, stranger(tmp_path), BOB_CONTEXTS)
    assert [error.code for error in (*dialler, *acceptor)] == ["secret", "secret"]


@both_kinds
@strangers
@in_trio
async def test_a_stranger_who_is_dialled_is_refused_and_both_are_told(pair, stranger, tmp_path):
    dialler, acceptor = await meet(pair, ALICE_CONTEXTS, stranger(tmp_path))
    assert [error.code for error in dialler] == ["secret"]
    assert len(acceptor) == 1


@pytest.mark.parametrize("server_side", [False, True])
@in_trio
async def test_a_peer_that_speaks_no_tls_is_refused(server_side):
    left, right = memory_stream_pair()
    stream = TlsStream(left, ALICE_CONTEXTS, server_side=server_side)

    async def speak_plainly():
        await right.send_all(b"GOSSIP/1 hello, I have no secret at all\r\n\r\n")
        await right.receive_into(memoryview(bytearray(4096)))  # Receive an alert, a ClientHello, or the end.
        await right.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speak_plainly)
        with pytest.raises(RefusedError, match="does not hold this swarm's secret"):
            await stream.handshake()
        await stream.aclose()


@in_trio
async def test_a_peer_that_leaves_during_the_handshake_breaks_the_link():
    left, right = memory_stream_pair()
    await right.aclose()
    with pytest.raises(BrokenLinkError):
        await TlsStream(left, ALICE_CONTEXTS, server_side=True).handshake()


@pytest.mark.parametrize("years", [(2090, 2099), (1951, 1960)])
@in_trio
async def test_both_ends_learn_who_the_other_is_although_a_clock_is_years_off(years, monkeypatch):
    """The certificates stand for the clock: one is valid from 2090 on, the other was until 1960."""
    monkeypatch.setattr(tls, "VALID_FROM", datetime(years[0], 1, 1, tzinfo=UTC))
    monkeypatch.setattr(tls, "VALID_UNTIL", datetime(years[1], 1, 1, tzinfo=UTC))
    client, server = await tls_ends(memory_pair, accepts=swarm_contexts(BOB, SECRET))
    assert (client.peer_id, server.peer_id) == (BOB.id, ALICE.id)


def test_no_key_file_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    swarm_contexts(Identity.fresh(), SECRET)
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_for_another_kind_of_key_has_no_owner():
    key = X25519PrivateKey.generate().public_key()
    certificate = tls._certificate(tls.CA_NAME, key, serial=1).sign(ALICE._key, None)
    with pytest.raises(ProtocolError, match="not for an Ed25519 key"):
        leaf_peer_id(certificate.public_bytes(serialization.Encoding.DER))


# -- what arrives, under TLS and in sealed records ---------------------------------------------------------------------
@both_kinds
@both_encryptions
@in_trio
async def test_eight_megabytes_both_ways_at_once_arrive_intact(encrypted, pair):
    payloads, arrived = (os.urandom(8_000_000), os.urandom(8_000_000)), {}

    async def receive(name, stream):
        arrived[name] = await receive_exactly(stream, 8_000_000)

    async with encrypted(pair) as (alice, bob), trio.open_nursery() as nursery:
        nursery.start_soon(alice.send_all, payloads[0])
        nursery.start_soon(bob.send_all, payloads[1])
        nursery.start_soon(receive, "at bob", bob)
        nursery.start_soon(receive, "at alice", alice)
    assert arrived == {"at bob": payloads[0], "at alice": payloads[1]}


@given(st.lists(st.integers(0, 70_000), max_size=6), st.lists(st.integers(1, 40_000), min_size=1, max_size=6))
def test_bytes_arrive_in_order_however_they_are_cut(sent_sizes, read_sizes):
    """Sealed records have a test like this of their own, without a connection."""
    payload, arrived = random.Random(0).randbytes(sum(sent_sizes)), bytearray()

    async def send(sender):
        start = 0
        for size in sent_sizes:
            await sender.send_all(memoryview(payload)[start : start + size])
            start += size
        await sender.aclose()

    async def scene():
        async with tls_pair(memory_pair) as (sender, receiver), trio.open_nursery() as nursery:
            nursery.start_soon(send, sender)
            for size in itertools.cycle(read_sizes):
                buffer = bytearray(size)
                count = await receiver.receive_into(memoryview(buffer))
                if not count:
                    break
                arrived.extend(buffer[:count])

    trio.run(scene)
    assert arrived == payload


@both_kinds
@both_encryptions
@in_trio
async def test_a_proper_close_is_an_end_and_its_last_bytes_arrive(encrypted, pair):
    async with encrypted(pair) as (alice, bob):
        await bob.send_all(b"w")
        await receive_exactly(alice, 1)  # A socket that is closed with unread bytes resets its connection.
        await alice.send_all(b"farewell")
        await alice.aclose()
        assert await receive_exactly(bob, 8) == b"farewell"
        assert await bob.receive_into(memoryview(bytearray(8))) == 0
        assert await bob.receive_into(memoryview(bytearray(8))) == 0
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")


@pytest.mark.parametrize("speaks", [False, True])
@both_encryptions
@in_trio
async def test_an_end_without_a_farewell_is_a_broken_link(encrypted, speaks):
    async with encrypted(memory_pair) as (alice, bob):
        if speaks:
            await alice.send_all(b"w")
            await receive_exactly(bob, 1)
        await alice.inner.aclose()  # This stands for a forged FIN, or a killed process.
        await expect_broken_end(bob)


@both_kinds
@pytest.mark.parametrize("encrypted", [plain_pair, tls_pair, sealed_pair])
@in_trio
async def test_an_abrupt_close_in_mid_transfer_ends_both_sides(encrypted, pair):
    async def send_for_ever(stream):
        while True:
            await stream.send_all(bytes(1_000_000))

    async def pour(stream):
        with pytest.raises(BrokenLinkError):
            await send_for_ever(stream)

    async with encrypted(pair) as (alice, bob), trio.open_nursery() as nursery:
        for stream in (alice, bob):
            nursery.start_soon(pour, stream)
            nursery.start_soon(expect_broken_end, stream)
        await trio.sleep(0.02)
        alice.close_now()


@in_trio
async def test_tampered_bytes_end_the_link_and_are_not_taken_for_a_refusal():
    async with tls_pair(memory_pair) as (alice, bob):
        await alice.send_all(b"hello")
        assert await receive_exactly(bob, 5) == b"hello"
        await alice.inner.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ProtocolError):
            await bob.receive_into(memoryview(bytearray(8)))


@both_encryptions
@in_trio
async def test_a_cancelled_receive_loses_nothing(encrypted):
    async with encrypted(memory_pair) as (alice, bob):
        with trio.move_on_after(0.01) as scope:
            await bob.receive_into(memoryview(bytearray(8)))
        assert scope.cancelled_caught
        await alice.send_all(b"patience")
        assert await receive_exactly(bob, 8) == b"patience"


@both_encryptions
@in_trio
async def test_nothing_is_sent_after_a_send_was_cut_short(encrypted):
    async with encrypted(memory_pair) as (alice, bob):
        with trio.move_on_after(0.01):
            await alice.send_all(bytes(1_000_000))  # Bob does not read.
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")
        await alice.aclose()
        await expect_broken_end(bob)


def test_a_peer_that_never_reads_delays_a_close_by_a_second_at_most():
    async def send(stream):
        with pytest.raises(BrokenLinkError):
            await stream.send_all(bytes(1_000_000))

    async def scene():
        async with tls_pair(memory_pair) as (alice, _), trio.open_nursery() as nursery:
            nursery.start_soon(send, alice)
            await trio.testing.wait_all_tasks_blocked()
            before = trio.current_time()
            await alice.aclose()
            return trio.current_time() - before

    waited_s = trio.run(scene, clock=trio.testing.MockClock(autojump_threshold=0))  # The clock's seconds, not ours.
    assert waited_s == pytest.approx(tls.LAST_WORDS_S)


@both_encryptions
@in_trio
async def test_a_close_that_is_cancelled_still_closes(encrypted):
    async with encrypted(memory_pair) as (alice, bob):
        with trio.CancelScope() as scope:
            scope.cancel()
            await alice.aclose()
        with pytest.raises(BrokenLinkError):
            await bob.receive_into(memoryview(bytearray(8)))


@in_trio
async def test_a_socket_reset_before_it_is_used_is_a_broken_link():
    with trio.socket.socket() as sock, pytest.raises(BrokenLinkError):
        PlainStream(sock)  # An unconnected socket looks the same.


# -- from TLS to sealed records ----------------------------------------------------------------------------------------
@both_kinds
@pytest.mark.parametrize("first", SHARES)
@in_trio
async def test_either_may_be_the_first_to_leave_tls_and_what_the_other_still_says_there_is_heard(pair, first):
    async with tls_pair(pair) as (alice, bob):
        one, other, second = (alice, bob, "bob") if first == "alice" else (bob, alice, "alice")
        early = await leave_tls(one, *SHARES[first])
        await early.send_all(b"sealed at once")
        await other.send_all(b"still in TLS")
        assert await receive_exactly(early, 12) == b"still in TLS"
        assert not early.sealed
        late = await leave_tls(other, *SHARES[second])
        await late.send_all(b"now as well")
        assert await receive_exactly(late, 14) == b"sealed at once"
        assert await receive_exactly(early, 11) == b"now as well"
        assert early.sealed
        assert late.sealed


@both_kinds
@in_trio
async def test_bytes_sent_in_tls_arrive_although_they_are_read_after_both_have_left_it(pair):
    async with tls_pair(pair) as (alice, bob):
        await bob.send_all(b"w" * 40_000)
        far = await leave_tls(bob, *SHARES["bob"])
        await far.send_all(b"sealed")
        near = await leave_tls(alice, *SHARES["alice"])
        assert await receive_exactly(near, 40_006) == b"w" * 40_000 + b"sealed"


@in_trio
async def test_unsealed_bytes_after_tls_end_the_link():
    async with tls_pair(memory_pair) as (alice, bob):
        near = await leave_tls(alice, *SHARES["alice"])
        await bob.leave()
        await bob.inner.send_all(slow_record(bytes(32), 0, b"forged"))
        with pytest.raises(ProtocolError):
            await near.receive_into(memoryview(bytearray(8)))
