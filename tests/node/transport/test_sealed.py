"""Two members leave TLS for sealed records: no byte is lost on the way, and an end is told from a cut."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from gossip.errors import ProtocolError
from node.transport.byte_stream import BrokenLinkError
from node.transport.sealed import (
    leave_tls,
)
from tests.node.transport.sealing import ACCEPTOR, DIALLER, slow_record
from tests.node.transport.test_tls import (
    both_kinds,
    both_ways_at_once,
    drain,
    in_trio,
    memory_pair,
    receive_exactly,
    tls_pair,
)


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
        )  # A socket that is closed with unread bytes resets its connection.
        await alice.send_all(b"farewell")
        await alice.aclose()
        assert await receive_exactly(bob, 8) == b"farewell"
        assert await bob.receive_into(memoryview(bytearray(8))) == 0
        assert await bob.receive_into(memoryview(bytearray(8))) == 0
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")
    for forged in (0, 1):  # Two unsealed ends: directly after TLS, and after a record.
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
            await alice.send_all(bytes(1_000_000))  # Bob does not read.
        with pytest.raises(BrokenLinkError):
            await alice.send_all(b"more")
        await alice.aclose()
        with pytest.raises(BrokenLinkError):
            await drain(bob)
