"""Links on which a chunk takes longer than a stream may stand still. In the quick tests times are a fifth of the usual
ones, so that a link of 5 Mbit/s stands for one of 1 Mbit/s; the slow ones have 1 Mbit/s and the defaults."""

import contextlib
import socket
import threading
import time

import pytest
from torch import nn

from gossip.config import Config
from gossip.ids import parse_address
from node.links import bulk
from node.network.transfers import streams
from tests.harness.configs import tuned
from tests.node.trainees import filled

BYTES_S = 6.25e5
ELEMENTS = 1 << 18  # 1 MiB, so that a vector takes 1.7 s: almost three times as long as a stream may stand still
SLOW = tuned(mix_every_steps=20, join_timeout_s=20.0, stall_s=0.6, slowest_rate_mb_s=0.25, chunk_elements=ELEMENTS // 2)
BUFFER_BYTES = 8_192


class Throttle:
    """A forwarder to ``target`` that passes ``bytes_s`` in each direction and buffers little."""

    def __init__(self, target, bytes_s):
        self.target, self.bytes_s, self.passed = target, bytes_s, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.open, self.is_closed = [self.listener], False
        self.start(self.accept)

    def start(self, what, *arguments):
        threading.Thread(target=what, args=arguments, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.socket()
                self.open += near, far
                if self.is_closed:  # It was closed while accept() returned.
                    self.close()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                far.connect((self.target.host, self.target.port))
                for sock in (near, far):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.start(self.forward, near, far)
                self.start(self.forward, far, near)

    def forward(self, source, target):
        due = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(4_096):
                due = max(due, time.monotonic() - 0.02) + len(data) / self.bytes_s
                time.sleep(max(due - time.monotonic(), 0.0))
                target.sendall(data)
                self.passed += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.is_closed = True
        for sock in self.open:
            sock.close()


@pytest.fixture
def passed_over(train, until, caplog):
    """Let a newcomer join over a slow link and mix; return the bytes that passed, after nobody was blamed."""
    made = []

    def passed(bytes_s, elements, exchanges, seconds, **options):
        caplog.set_level("INFO", "gossip")
        near, far = (filled(nn.Linear(elements, 1, bias=False), value) for value in (1.0, 2.0))
        first = train(near, **options)
        slow = Throttle(parse_address(first.node.address), bytes_s)
        made.append(slow)
        second = train(far, seeds=[slow.address], listen="none", **options)
        peers = [one.side.network.peer for one in (first, second)]
        assert peers[1].view.run_id == peers[0].view.run_id, "it began no run of its own"
        until(lambda: min(peer.exchanges.done_count for peer in peers) >= exchanges, seconds)
        for peer in peers:
            assert list(peer.misbehaviour.rows()) == []
            assert [kind for who, kind in peer.misbehaviour.levels if isinstance(who, bytes)] == [], "of members"
            assert peer.exchanges.failures_by_reason == {}
            assert peer.exchanges.failures == 0
        for sign in ("does not answer", "stopped"):  # Neither a member with queued answers nor a stream is reported.
            assert not any(sign in said for said in caplog.messages)
        return slow.passed

    yield passed
    for one in made:
        one.close()


@pytest.mark.parametrize("threads", [False, True], ids=["loop", "threads"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_newcomer_joins_and_mixes_over_a_link_on_which_a_chunk_takes_longer_than_a_stall(
    threads, encrypted, passed_over, monkeypatch, secret
):
    monkeypatch.setattr(bulk, "FIRST_ELEMENTS", 1 << 20)  # Otherwise chunks are short from the beginning.
    if threads:
        monkeypatch.setattr(streams, "LARGE_BYTES", 1)
    options = {"config": SLOW} | ({"secret": secret} if encrypted else {})
    passed = passed_over(BYTES_S, ELEMENTS, exchanges=2, seconds=40.0, **options)
    assert passed > 5 * 4 * ELEMENTS, "all of it over the slow link"


HOME_BYTES_S = 125_000.0  # 1 Mbit/s
HOME_ELEMENTS = 140_000  # 560 kB, which take 4.5 s: half as long again as a stream may stand still


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["pair", "group"])
@pytest.mark.parametrize("chunks", ["that shorten", "of any length"])
def test_over_a_home_link_with_the_defaults_a_newcomer_joins_and_exchanges_finish(
    mixing, chunks, passed_over, monkeypatch
):
    """The throttle passes what a link of 1 Mbit/s does. A chunk of the default size takes 4.2 s of it."""
    if chunks == "of any length":
        monkeypatch.setattr(bulk, "FIRST_ELEMENTS", 1 << 20)
    passed = passed_over(HOME_BYTES_S, HOME_ELEMENTS, exchanges=1, seconds=20.0, config=Config(mixing=mixing))
    exchange = 2 if mixing == "pair" else 8  # Bytes of an element both ways: pairs begin in int8.
    assert passed > (4 + exchange) * HOME_ELEMENTS, "a join and an exchange, all of it over the slow link"


def test_chunks_become_shorter_where_they_take_long_and_longer_where_they_do_not():
    movement = bulk.ChunkMotion(None, None)
    began = movement.elements
    for seconds, times in ((0.3, 1 / 2), (0.1, 1 / 2), (0.01, 1.0), (0.01, 2.0)):
        movement.on_chunk_begun(10.0)
        movement.on_chunk_sent(10.0 + seconds)
        assert movement.elements == times * began
    for _ in range(20):
        movement.on_chunk_begun(10.0)
        movement.on_chunk_sent(11.0)
    assert movement.elements == bulk.LEAST_ELEMENTS
