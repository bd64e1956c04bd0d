"""Links on which lost packets are taken for a full path: told from those that are full, and said once."""

from __future__ import annotations

import socket
import struct
import sys
from types import SimpleNamespace

import pytest

from node.links.pool import Links
from node.observe.losses import LOOK_S, Losses
from node.transport import loss
from node.transport.loss import MIN_RTT_US, RETRANSMITTED, RTT_US, SENT, judged

MEMBER = b"\x1a\x2b\x3c\x4d" + bytes(12)


def info(rtt_ms=51.0, again=100, least_ms=50.4, sent=10_000):
    """As the kernel tells it."""
    told = bytearray(232)
    for at, value in ((RTT_US, 1e3 * rtt_ms), (RETRANSMITTED, again), (MIN_RTT_US, 1e3 * least_ms), (SENT, sent)):
        struct.pack_into("=I", told, at, int(value))
    return bytes(told)


def test_a_path_that_loses_one_packet_in_a_hundred_holds_cubic_to_what_mathis_says():
    found = judged(b"cubic".ljust(16, b"\0"), info())
    assert found.share == 0.01
    assert found.ceiling_mb_s == pytest.approx(0.352, abs=0.001)


@pytest.mark.parametrize(("control", "told"), [
    (b"bbr", info()),  # takes it for what it is
    (b"cubic", info(again=30)),  # as a queue that is full now and then loses
    (b"cubic", info(rtt_ms=90.0)),  # the queue stands: it is full by what we send
    (b"cubic", info(sent=4_000, again=40)),  # too little to know
    (b"cubic", info(rtt_ms=0.4, least_ms=0.3)),  # known too soon to cost much
    (b"cubic", info()[:150]), (b"", b""),  # an old kernel, or none that tells
])  # fmt: skip
def test_nothing_is_said_of_what_bbr_would_not_change_or_what_nobody_can_know(control, told):
    assert judged(control, told) is None


def test_it_is_said_once_and_counted_as_long_as_it_is_so(monkeypatch):
    links, said = Links(), []
    links.by_peer = {MEMBER: [SimpleNamespace(peer=MEMBER, stream=None)] * 2}
    monkeypatch.setattr("node.observe.losses.loss_of", lambda stream: judged(b"cubic", info()))
    losses = Losses(links, lambda *notice: said.append(notice))
    for now in (0.0, 1.0, LOOK_S, 3 * LOOK_S):
        losses.look(now)
    assert [kind for kind, _ in said] == ["lossy"]
    assert "1a2b3c4d 1.0 %" in said[0][1]
    assert "modprobe tcp_bbr" in said[0][1]
    assert links.lossy == 2
    monkeypatch.setattr("node.observe.losses.loss_of", lambda stream: None)
    losses.look(5 * LOOK_S)
    assert links.lossy == 0


@pytest.mark.skipif(sys.platform != "linux", reason="struct tcp_info is Linux's")
def test_the_kernel_has_these_figures_where_they_are_read():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            for _ in range(50):
                near.sendall(b"x" * 1000)
                far.recv(1000, socket.MSG_WAITALL)
            told = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    rtt_us, again, least_us, sent = (
        struct.unpack_from("=I", told, at)[0] for at in (RTT_US, RETRANSMITTED, MIN_RTT_US, SENT)
    )
    assert len(told) >= loss.INFO_BYTES
    assert 40 <= sent <= 60
    assert again == 0
    assert 0 < least_us <= 2 * rtt_us < 2e6
