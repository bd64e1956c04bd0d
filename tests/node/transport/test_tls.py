from __future__ import annotations

import functools
import itertools
import os
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

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
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream
from node.transport.tls import Contexts, TlsStream, leaf_peer_id, swarm_contexts
from tests.memory_stream import MemoryStream, memory_stream_pair

SECRET = bytes(range(32))
ALICE, BOB = Identity.fresh(), Identity.fresh()
ALICE_CONTEXTS, BOB_CONTEXTS = swarm_contexts(ALICE, SECRET), swarm_contexts(BOB, SECRET)
SCENE_S = 10.0  # far more than any scene needs: it only turns a hang into a failure


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: object) -> None:
        async def bounded() -> None:
            with trio.fail_after(SCENE_S):
                await test(**arguments)

        trio.run(bounded)

    return run


async def loopback_pair() -> tuple[PlainStream, PlainStream]:
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = trio.socket.socket()
        await client.connect(listener.getsockname())
        server, _ = await listener.accept()
    return PlainStream(client), PlainStream(server)


async def memory_pair() -> tuple[MemoryStream, MemoryStream]:
    return memory_stream_pair()


Pair = Callable[[], Awaitable[tuple[ByteStream, ByteStream]]]
both_kinds = pytest.mark.parametrize("pair", [loopback_pair, memory_pair])


async def tls_ends(
    pair: Pair, dials: Contexts = ALICE_CONTEXTS, accepts: Contexts = BOB_CONTEXTS
) -> tuple[TlsStream, TlsStream]:
    """Return both ends of one connection after the handshake."""
    left, right = await pair()
    ends = TlsStream(left, dials, server_side=False), TlsStream(right, accepts, server_side=True)
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.handshake)
    return ends


@asynccontextmanager
async def tls_pair(pair: Pair) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Alice dialled, Bob accepted, and both have finished the handshake."""
    alice, bob = await tls_ends(pair)
    try:
        yield alice, bob
    finally:
        alice.close_now()
        bob.close_now()


async def receive_exactly(stream: ByteStream, count: int) -> bytes:
    data = bytearray(count)
    filled = 0
    while filled < count:
        got = await stream.receive_into(memoryview(data)[filled:])
        if not got:
            raise AssertionError(f"the stream ended after {filled} of {count} bytes")
        filled += got
    return bytes(data)


async def drain(stream: ByteStream) -> None:
    """Read until the orderly end of the stream."""
    while await stream.receive_into(memoryview(bytearray(100_000))):
        pass


async def send_for_ever(stream: ByteStream) -> None:
    while True:
        await stream.send_all(bytes(1_000_000))


async def expect_broken_end(stream: ByteStream) -> None:
    with pytest.raises(BrokenLinkError):
        await drain(stream)


async def first_word(stream: TlsStream, errors: list[GossipError]) -> None:
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


async def meet(pair: Pair, client: Contexts, server: Contexts) -> tuple[list[GossipError], list[GossipError]]:
    """Exchange a first word. Return the errors of the dialler and those of the acceptor."""
    left, right = await pair()
    told: tuple[list[GossipError], list[GossipError]] = ([], [])
    async with trio.open_nursery() as nursery:
        for contexts, inner, server_side, errors in ((client, left, False, told[0]), (server, right, True, told[1])):
            stream = TlsStream(inner, contexts, server_side=server_side)
            nursery.start_soon(first_word, stream, errors)
    return told


def without_certificate(_: Path) -> Contexts:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (client, server):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return Contexts(client, server, ALICE.id)


def self_signed(folder: Path) -> Contexts:
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


def with_another_secret(_: Path) -> Contexts:
    return swarm_contexts(Identity.fresh(), b"x" * 32)


def at_tls_1_2(_: Path) -> Contexts:
    contexts = swarm_contexts(Identity.fresh(), SECRET)
    for context in (contexts.client_context, contexts.server_context):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return contexts


strangers = pytest.mark.parametrize("stranger", [without_certificate, self_signed, with_another_secret, at_tls_1_2])


@both_kinds
@strangers
@in_trio
async def test_a_stranger_who_dials_is_refused_and_both_are_told(pair, stranger, tmp_path) -> None:
    dialler, acceptor = await meet(pair, stranger(tmp_path), BOB_CONTEXTS)
    assert [error.code for error in acceptor] == ["secret"]
    assert [error.code for error in dialler] == ["secret"]


@both_kinds
@strangers
@in_trio
async def test_a_stranger_who_is_dialled_is_refused_and_both_are_told(pair, stranger, tmp_path) -> None:
    dialler, acceptor = await meet(pair, ALICE_CONTEXTS, stranger(tmp_path))
    assert [error.code for error in dialler] == ["secret"]
    assert len(acceptor) == 1


@both_kinds
@in_trio
async def test_members_of_one_swarm_are_told_nothing_wrong(pair) -> None:
    assert await meet(pair, ALICE_CONTEXTS, BOB_CONTEXTS) == ([], [])


@pytest.mark.parametrize("server_side", [False, True])
@in_trio
async def test_a_peer_that_speaks_no_tls_is_refused(server_side) -> None:
    left, right = memory_stream_pair()
    stream = TlsStream(left, ALICE_CONTEXTS, server_side=server_side)

    async def speak_plainly() -> None:
        await right.send_all(b"GOSSIP/1 hello, I have no secret at all\r\n\r\n")
        await right.receive_into(memoryview(bytearray(4096)))  # Receive an alert, a ClientHello, or the end.
        await right.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speak_plainly)
        with pytest.raises(RefusedError, match="does not hold this swarm's secret"):
            await stream.handshake()
        await stream.aclose()


@in_trio
async def test_a_peer_that_leaves_during_the_handshake_breaks_the_link() -> None:
    left, right = memory_stream_pair()
    await right.aclose()
    with pytest.raises(BrokenLinkError):
        await TlsStream(left, ALICE_CONTEXTS, server_side=True).handshake()


@both_kinds
@in_trio
async def test_both_ends_learn_who_the_other_is(pair) -> None:
    async with tls_pair(pair) as (alice, bob):
        assert alice.peer_id == BOB.id
        assert bob.peer_id == ALICE.id


def test_every_holder_of_a_secret_trusts_the_same_authority() -> None:
    authorities = ALICE_CONTEXTS.client_context.get_ca_certs(binary_form=True)
    assert len(authorities) == 1
    assert BOB_CONTEXTS.server_context.get_ca_certs(binary_form=True) == authorities
    assert swarm_contexts(ALICE, b"x" * 32).client_context.get_ca_certs(binary_form=True) != authorities


@pytest.mark.parametrize("years", [(2090, 2099), (1951, 1960)])
@in_trio
async def test_a_clock_that_is_years_off_keeps_nobody_out(years, monkeypatch) -> None:
    """The certificates stand for the clock: one is valid from 2090 on, the other was until 1960."""
    monkeypatch.setattr(tls, "VALID_FROM", datetime(years[0], 1, 1, tzinfo=UTC))
    monkeypatch.setattr(tls, "VALID_UNTIL", datetime(years[1], 1, 1, tzinfo=UTC))
    theirs = swarm_contexts(BOB, SECRET)
    one, other = memory_stream_pair()
    client, server = TlsStream(one, ALICE_CONTEXTS, server_side=False), TlsStream(other, theirs, server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.handshake)
        nursery.start_soon(server.handshake)
    assert (client.peer_id, server.peer_id) == (BOB.id, ALICE.id)


def test_no_key_file_stays_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    swarm_contexts(Identity.fresh(), SECRET)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("der", [b"", b"junk", b"\x30\x82\xff\xff"])
def test_what_is_no_certificate_has_no_owner(der) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        leaf_peer_id(der)


def test_a_certificate_for_another_kind_of_key_has_no_owner() -> None:
    key = X25519PrivateKey.generate().public_key()
    certificate = tls._certificate(tls.CA_NAME, key, serial=1).sign(ALICE._key, None)
    with pytest.raises(ProtocolError, match="not for an Ed25519 key"):
        leaf_peer_id(certificate.public_bytes(serialization.Encoding.DER))


async def both_ways_at_once(alice: ByteStream, bob: ByteStream, count: int) -> None:
    """Assert that ``count`` random bytes of each end arrive at the other unchanged."""
    payloads = os.urandom(count), os.urandom(count)
    arrived: dict[str, bytes] = {}

    async def receive(name: str, stream: ByteStream) -> None:
        arrived[name] = await receive_exactly(stream, count)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.send_all, payloads[0])
        nursery.start_soon(bob.send_all, payloads[1])
        nursery.start_soon(receive, "at bob", bob)
        nursery.start_soon(receive, "at alice", alice)
    assert arrived == {"at bob": payloads[0], "at alice": payloads[1]}


@both_kinds
@in_trio
async def test_eight_megabytes_both_ways_at_once_arrive_intact(pair) -> None:
    async with tls_pair(pair) as (alice, bob):
        await both_ways_at_once(alice, bob, 8_000_000)


@given(
    st.lists(st.integers(0, 70_000), max_size=6),
    st.lists(st.integers(1, 40_000), min_size=1, max_size=6),
    st.booleans(),
)
def test_bytes_arrive_in_order_however_they_are_cut(sent_sizes, read_sizes, encrypted) -> None:
    payload = random.Random(0).randbytes(sum(sent_sizes))

    async def scene() -> bytes:
        arrived = bytearray()
        async with AsyncExitStack() as stack:
            pair = await stack.enter_async_context(tls_pair(memory_pair)) if encrypted else memory_stream_pair(10_000)
            sender, receiver = pair

            async def send() -> None:
                start = 0
                for size in sent_sizes:
                    await sender.send_all(memoryview(payload)[start : start + size])
                    start += size
                await sender.aclose()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                for size in itertools.cycle(read_sizes):
                    buffer = bytearray(size)
                    count = await receiver.receive_into(memoryview(buffer))
                    arrived += buffer[:count]
                    if not count:
                        break
        return bytes(arrived)

    assert trio.run(scene) == payload


@both_kinds
@in_trio
async def test_a_proper_close_is_an_end_and_its_last_bytes_arrive(pair) -> None:
    async with tls_pair(pair) as (alice, bob):
        await alice.send_all(b"farewell")
        await alice.aclose()
        assert await receive_exactly(bob, 8) == b"farewell"
        buffer = memoryview(bytearray(8))
        assert await bob.receive_into(buffer) == 0
        assert await bob.receive_into(buffer) == 0
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")


@in_trio
async def test_an_end_without_a_farewell_is_a_broken_link_under_tls() -> None:
    left, right = memory_stream_pair()
    alice = TlsStream(left, ALICE_CONTEXTS, server_side=False)
    bob = TlsStream(right, BOB_CONTEXTS, server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.handshake)
        nursery.start_soon(bob.handshake)
    await left.aclose()  # This stands for a forged FIN, or a killed process.
    with pytest.raises(BrokenLinkError):
        await bob.receive_into(memoryview(bytearray(8)))


@both_kinds
@pytest.mark.parametrize("encrypted", [False, True])
@in_trio
async def test_an_abrupt_close_in_mid_transfer_ends_both_sides(pair, encrypted) -> None:
    async def pour(stream: ByteStream) -> None:
        with pytest.raises(BrokenLinkError):
            await send_for_ever(stream)

    async with AsyncExitStack() as stack:
        alice, bob = await stack.enter_async_context(tls_pair(pair)) if encrypted else await pair()
        try:
            async with trio.open_nursery() as nursery:
                for stream in (alice, bob):
                    nursery.start_soon(pour, stream)
                    nursery.start_soon(expect_broken_end, stream)
                await trio.sleep(0.02)
                alice.close_now()
        finally:
            alice.close_now()  # Closing twice is fine.
            bob.close_now()


@in_trio
async def test_tampered_bytes_end_the_link_and_are_not_taken_for_a_refusal() -> None:
    async with tls_pair(memory_pair) as (alice, bob):
        await alice.send_all(b"hello")
        assert await receive_exactly(bob, 5) == b"hello"
        await alice.inner.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ProtocolError):
            await bob.receive_into(memoryview(bytearray(8)))


@in_trio
async def test_a_cancelled_receive_loses_nothing() -> None:
    async with tls_pair(memory_pair) as (alice, bob):
        buffer = memoryview(bytearray(8))
        with trio.move_on_after(0.01) as scope:
            await bob.receive_into(buffer)
        assert scope.cancelled_caught
        await alice.send_all(b"patience")
        assert await receive_exactly(bob, 8) == b"patience"


@in_trio
async def test_nothing_is_sent_after_a_send_was_cut_short() -> None:
    async with tls_pair(memory_pair) as (alice, bob):
        with trio.move_on_after(0.01):
            await alice.send_all(bytes(1_000_000))  # Bob does not read.
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")
        await alice.aclose()
        await expect_broken_end(bob)


def test_a_peer_that_never_reads_delays_a_close_by_a_second_at_most() -> None:
    async def scene() -> float:
        async with tls_pair(memory_pair) as (alice, _), trio.open_nursery() as nursery:
            nursery.start_soon(expect_broken, alice.send_all, bytes(1_000_000))
            await trio.testing.wait_all_tasks_blocked()
            before = trio.current_time()
            await alice.aclose()
            return trio.current_time() - before

    async def expect_broken(send: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
        with pytest.raises(BrokenLinkError):
            await send(data)

    waited_s = trio.run(scene, clock=trio.testing.MockClock(autojump_threshold=0))  # The clock's seconds, not ours.
    assert waited_s == pytest.approx(tls.LAST_WORDS_S)


@in_trio
async def test_a_close_that_is_cancelled_still_closes() -> None:
    async with tls_pair(memory_pair) as (alice, bob):
        with trio.CancelScope() as scope:
            scope.cancel()
            await alice.aclose()
        with pytest.raises(BrokenLinkError):
            await bob.receive_into(memoryview(bytearray(8)))


@in_trio
async def test_a_socket_reset_before_it_is_used_is_a_broken_link() -> None:
    with trio.socket.socket() as sock, pytest.raises(BrokenLinkError):
        PlainStream(sock)  # An unconnected socket looks the same.
