"""Dialling a host by name: one dead address does not hide another."""

from __future__ import annotations

import contextlib
import socket

import pytest
import trio

from gossip.ids import Address
from node.transport import tcp
from node.transport.byte_stream import BrokenLinkError
from node.transport.tcp import TcpNetwork, alternated

NAMED = Address("node.example", 1)


def target_of(sock):
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", sock.getsockname())


@contextlib.contextmanager
def black_hole(host):
    """An address that answers no SYN: a listener whose queue is full."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind((host, 0))
        sock.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
        yield target_of(sock)


@contextlib.contextmanager
def refusing():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # nobody listens
        yield target_of(sock)


@contextlib.contextmanager
def answering(host="127.0.0.1"):
    with socket.socket() as sock:
        sock.bind((host, 0))
        sock.listen(8)
        yield target_of(sock)


def connect(monkeypatch, targets, timeout_s=5.0):
    """Dial a name that stands for ``targets``; return the host that answered and the seconds that it took."""

    async def resolve(_address, _flags=0):
        await trio.lowlevel.checkpoint()
        return targets

    async def main():
        monkeypatch.setattr(tcp, "resolve", resolve)
        began = trio.current_time()
        stream = await TcpNetwork(None, timeout_s).connect(NAMED)
        stream.close_now()
        return stream.peer_host, trio.current_time() - began

    return trio.run(main)


def test_a_black_holed_address_does_not_hide_the_next_one(monkeypatch):
    with black_hole("127.0.0.2") as dead, answering("127.0.0.3") as live:
        host, took_s = connect(monkeypatch, [dead, live])
    assert host == "127.0.0.3"
    assert took_s < 3.0


def test_a_refused_address_is_passed_over_at_once(monkeypatch):
    with refusing() as dead, answering("127.0.0.3") as live:
        host, _ = connect(monkeypatch, [dead, live])
    assert host == "127.0.0.3"


def test_what_the_system_says_of_a_failed_dial_is_raised(monkeypatch):
    with refusing() as dead, pytest.raises(ConnectionRefusedError):
        connect(monkeypatch, [dead, dead])


def test_an_attempt_ends_in_its_own_time_where_nothing_answers(monkeypatch):
    with black_hole("127.0.0.2") as dead, pytest.raises(BrokenLinkError, match="did not answer in"):
        connect(monkeypatch, [dead, dead], timeout_s=0.5)


def test_a_cancelled_dial_leaves_no_socket_open(monkeypatch):
    opened = []
    socket_of = trio.socket.socket

    def remembered(*given):
        opened.append(socket_of(*given))
        return opened[-1]

    async def main(targets):
        async def resolve(_address, _flags=0):
            await trio.lowlevel.checkpoint()
            return targets

        monkeypatch.setattr(tcp, "resolve", resolve)
        monkeypatch.setattr(trio.socket, "socket", remembered)
        with trio.move_on_after(0.6):
            await TcpNetwork(None).connect(NAMED)

    with black_hole("127.0.0.2") as first, black_hole("127.0.0.3") as second:
        trio.run(main, [first, second])
    assert len(opened) == 2
    assert all(sock.fileno() < 0 for sock in opened)


def test_the_second_attempt_is_of_the_other_family():
    v6, v4 = (socket.AF_INET6, 0), (socket.AF_INET, 0)
    assert alternated([v6, v6, v6, v4])[:2] == [v6, v4]
    assert alternated([v4, v4]) == [v4, v4]
    assert alternated([]) == []
