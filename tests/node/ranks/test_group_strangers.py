"""Strangers at the ports of a group of real processes: at torch's store, at gloo's listeners, and at the node's own."""

import random
import signal
import socket
import struct
import time

import pytest
from torch import nn

from tests.node.ranks.group_play import Pair, goes_on, listening, peak_mb

pytestmark = pytest.mark.slow

STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)  # The first bytes of a TCPStore's client.
GROWN_MB = 64.0  # The most memory that strangers may cause; they send a few MB.
PATIENCE_S = 5.0


def store_frames():
    """Yield each query of the store's protocol with a length that no data follow."""
    for query in range(20):
        for size in (2**62, 2**30):
            yield STORE_MAGIC + struct.pack("<BQ", query, size) + bytes(64)


def gloo_frames():
    """Yield a gloo connection for each pair, with a message of 2**62 bytes for that pair."""
    for pair in range(8):
        yield struct.pack("<q", pair) + struct.pack("<QQQQQQQ", 2**62, 2, 0, 0, 2**62, 0, 0)


def frames():
    rng = random.Random(5)
    yield rng.randbytes(4096)
    yield b"\xff" * 65_536
    yield bytes(65_536)
    yield b"cposix\nsystem\n(S'touch ran'\ntR."
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield from store_frames()
    yield from gloo_frames()


def throw(place, data):
    """Send ``data`` to an address and close the connection, whether or not the data are accepted."""
    with socket.socket() as end:
        end.settimeout(1.0)
        try:
            end.connect(place)
            end.sendall(data)
            time.sleep(0.02)
        except OSError:
            return


@pytest.fixture
def group(tmp_path, train):
    """Run a group in a swarm with another node, which is in this process: ``(pair, other)``."""
    other = train(nn.Linear(6, 3))
    seeds = [other.node.address]
    with Pair(tmp_path / "pair", "group_loop.py", seeds=seeds, PATIENCE_S=str(PATIENCE_S)) as pair:
        pair.go_on()
        yield pair, other


def test_strangers_at_every_port_stop_no_rank_and_take_no_memory(group):
    pair, other = group
    before = [peak_mb(rank.pid) for rank in pair.ranks]
    places = [place for rank in pair.ranks for place in listening(rank.pid)]
    assert ("127.0.0.1", pair.port) in places, "torch's store is one of them"
    assert len(places) >= 4
    for place in places:
        for data in frames():
            throw(place, data)
        silent = [socket.create_connection(place, 1.0) for _ in range(50)]
        pair.go_on(20)
        for end in silent:
            end.close()
    pair.go_on()
    grown = [peak_mb(rank.pid) - mb for rank, mb in zip(pair.ranks, before, strict=True)]
    assert max(grown) < GROWN_MB
    assert pair.end() == [0, 0], pair.errors()
    one, two = (pair.read("ended", rank) for rank in range(2))
    assert one["digests"] == two["digests"], "both ranks saw the same, and hold the same"
    assert not (pair.folder / "ran").exists()
    assert goes_on(other)


@pytest.mark.parametrize("still", [0, 1])
def test_a_rank_that_stands_still_ends_the_other_after_the_groups_timeout(group, still):
    """If rank 0 stops, so does its store, which then answers no rank."""
    pair, other = group
    pair.ranks[still].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert pair.ranks[1 - still].wait(4 * PATIENCE_S) == 1
    assert time.monotonic() - began < 3 * PATIENCE_S + 5.0
    assert f"Rank {still} of this node's group did nothing for {PATIENCE_S:g} s" in pair.sentence(1 - still)
    assert goes_on(other)
    pair.ranks[still].send_signal(signal.SIGCONT)
    assert pair.ranks[still].wait(4 * PATIENCE_S) == 1
    assert "gossip.errors.LocalError: " in pair.sentence(still)
    assert goes_on(other)
