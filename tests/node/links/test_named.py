"""Members that misbehave on a real link are named in the log and in the status."""

import contextlib
import socket

import pytest
import trio
from torch import nn

from gossip.ids import MemberRecord, parse_address
from gossip.wire.frames import encode
from gossip.wire.messages import Gossip, Ping
from gossip.wire.records import signed
from node.identity.keys import Identity
from node.links import link as links
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.observe.status import query
from node.transport.byte_stream import BrokenLinkError
from node.transport.tcp import TcpNetwork


async def speak(node, identity, words, **stated):
    """Join as a member that states this, send ``words``, and read until the link ends or a second has passed."""
    side = node._training
    layout, run_id = side.live.state.layout, side.network.peer.local.run_id
    record = MemberRecord(identity.id, identity.public_key, 1, run_id=run_id, **stated)
    stream = await TcpNetwork(None).connect(parse_address(node.address))
    try:
        reader = FrameReader(stream)
        await Greeter("default", layout).greet(stream, reader, signed(record, identity.sign), None, None)
        with trio.move_on_after(1.0), contextlib.suppress(BrokenLinkError):
            await stream.send_all(words)
            while await stream.receive_into(memoryview(bytearray(4096))):
                pass
    finally:
        stream.close_now()


def named(node):
    return query(parse_address(node.address))["metrics"]["suspicious"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fault", b"no frame at all"),
        ("flood", encode(Gossip(())) * 5_000),  # Gossip has no answer.
        ("unread", encode(Ping(1, ())) * 200),  # They arrive in one piece, and 32 answers leave at once.
    ],
    ids=["no frames", "a flood", "more questions than it reads answers"],
)
def test_a_member_that_misbehaves_is_named_at_the_third_time_and_no_honest_one(
    kind, words, train, until, monkeypatch, tmp_path
):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr("node.network.link_life.MESSAGES_PER_S", 500)  # A slow machine reads more in a second.
    monkeypatch.setattr(links, "OUTBOX_FRAMES", 16)  # Otherwise the kernel would hold the short answers of a minute.
    ours = train(nn.Linear(4, 2))
    culprit, honest = Identity.fresh(), Identity.fresh()
    for _ in range(4):
        trio.run(speak, ours.node, honest, encode(Ping(1, ())) * 8)  # The connection then ends without a Close.
    for _ in range(2):
        trio.run(speak, ours.node, culprit, words)
    assert named(ours.node) == ()
    trio.run(speak, ours.node, culprit, words)
    until(lambda: named(ours.node) == ((culprit.id.hex(), kind, 3),))  # Noted when the link has ended.
    log = (tmp_path / "log.jsonl").read_text()
    assert log.count(f"Member {culprit.id.hex()[:8]} misbehaves") == 1
    assert honest.id.hex()[:8] + " misbehaves" not in log


def test_a_host_whose_connections_never_greet_is_named(train, until):
    ours = train(nn.Linear(4, 2))
    for number in range(20):
        socket.create_connection(parse_address(ours.node.address)).close()
        if number == 14:
            assert named(ours.node) == ()
    until(lambda: [row[:2] for row in named(ours.node)] == [("127.0.0.1", "strangers")])
