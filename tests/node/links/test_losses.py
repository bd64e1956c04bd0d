"""Links that take packet loss for congestion are told from congested ones, and reported once."""

import gc
import socket
import struct
import sys

import pytest

from node.links.pool import Links
from node.observe.losses import CHECK_PERIOD_S, MIN_BYTES, Losses
from node.transport import loss
from node.transport.byte_stream import PlainStream
from node.transport.loss import BUSY_US, MIN_RTT_US, RETRANSMITTED, RTT_US, SENT, PathRecord

MEMBER = b"\x1a\x2b\x3c\x4d" + bytes(12)
CUBIC = b"cubic".ljust(16, b"\0")


def info(rtt_ms=51.0, again=100, least_ms=50.4, sent=10_000, busy_s=0.0, no_room_s=0.0):
    """Return a ``tcp_info`` as the kernel lays it out."""
    told = bytearray(232)
    for at, value in ((RTT_US, 1e3 * rtt_ms), (RETRANSMITTED, again), (MIN_RTT_US, 1e3 * least_ms), (SENT, sent)):
        struct.pack_into("=I", told, at, int(value))
    struct.pack_into("=QQ", told, BUSY_US, int(1e6 * busy_s), int(1e6 * no_room_s))
    return bytes(told)


def record_of(updates, control=CUBIC):
    record = PathRecord()
    for told in updates:
        record.update(control, told)
    return record


def steadily(again=100, sent=10_000, **last):
    """Return what ten updates read, between which equal numbers of packets are sent and lost."""
    return [info(again=again * n // 10, sent=sent * n // 10, **last) for n in range(1, 11)]


def test_a_path_that_loses_one_packet_in_a_hundred_holds_cubic_to_what_mathis_says():
    found = record_of(steadily()).loss
    assert found.share == 0.01
    assert found.ceiling_mb_s == pytest.approx(0.352, abs=0.001)


@pytest.mark.parametrize(("control", "told"), [
    (b"bbr", steadily()),  # BBR tells random loss from congestion.
    (CUBIC, steadily(again=30)),  # A queue that is now and then full drops packets.
    (CUBIC, steadily(rtt_ms=90.0)),  # Our own traffic fills a standing queue.
    (CUBIC, steadily(sent=800, again=40)),  # Too few packets for a verdict.
    (CUBIC, steadily(rtt_ms=0.4, least_ms=0.3)),  # Losses on so short a path cost little.
    (CUBIC, [told[:150] for told in steadily()]), (b"", [b""]),  # An old kernel, or one without TCP_INFO.
    (CUBIC, [info(again=60, sent=600), *(info(again=60, sent=600 + 500 * n) for n in range(1, 10))]),  # Slow start.
])  # fmt: skip
def test_a_path_that_bbr_would_not_help_or_of_which_too_little_is_known_is_not_lossy(control, told):
    assert record_of(told, control).loss is None


@pytest.mark.parametrize(("narrow", "told"), [
    (True, info(busy_s=4.0, no_room_s=3.0)), (False, info(busy_s=4.0, no_room_s=1.0)),
    (False, info(busy_s=0.8, no_room_s=0.8)), (False, info(busy_s=4.0, no_room_s=4.0, least_ms=0.3)),
    (False, info(busy_s=4.0, no_room_s=4.0)[:176]),
])  # fmt: skip
def test_more_connections_help_on_a_long_path_to_a_receiver_without_room(narrow, told):
    record = record_of([told], b"bbr")
    assert record.is_window_limited is record.is_narrow is narrow


class Stand:
    """A link with a scripted socket that has sent a lot since the last check."""

    def __init__(self, looks):
        self.peer, self.stream, self.looks, self.sent_bytes = MEMBER, PlainStream.__new__(PlainStream), looks, 0


def test_a_lossy_link_is_reported_once_counted_as_long_as_it_is_lossy_and_widened(monkeypatch):
    links, said, widened = Links(), [], []
    stands = [Stand(steadily()), Stand([info(again=0)] * 10)]
    links.by_peer = {MEMBER: stands}
    told = iter([(CUBIC, look) for pair in zip(*(stand.looks for stand in stands), strict=True) for look in pair])
    monkeypatch.setattr(PlainStream, "tcp_info", lambda stream: next(told))
    losses = Losses(links, lambda *notice: said.append(notice), widened.append)
    for n in range(10):
        for stand in stands:
            stand.sent_bytes += MIN_BYTES
        losses.check_links(n * CHECK_PERIOD_S)
        losses.check_links((n + 0.5) * CHECK_PERIOD_S)  # Too early for another check.
    assert [kind for kind, _ in said] == ["lossy"]
    assert "1a2b3c4d 1.0 %" in said[0][1]
    assert "modprobe tcp_bbr" in said[0][1]
    assert links.lossy_links == 1
    assert set(widened) == {stands[0]}
    losses.check_links(20 * CHECK_PERIOD_S)
    assert links.lossy_links == 1, "nothing was sent since: it is not looked at, and told would be empty"
    links.by_peer = {}
    losses.check_links(30 * CHECK_PERIOD_S)
    assert links.lossy_links == 0
    del stand, stands[:], widened[:]
    gc.collect()
    assert len(losses.records) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="struct tcp_info is Linux's")
def test_the_kernels_tcp_info_has_its_figures_at_these_offsets():
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
    busy_us, no_room_us = struct.unpack_from("=QQ", told, BUSY_US)
    assert len(told) >= loss.LONG_INFO_BYTES
    assert 0 <= no_room_us <= busy_us < 2e6
    assert 40 <= sent <= 60
    assert again == 0
    assert 0 < least_us <= 2 * rtt_us < 2e6
