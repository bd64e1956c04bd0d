"""Nodes of this version and the next work together, whichever came first.

Incompatible versions are both named in the error.
"""

import contextlib
import json
import subprocess
import threading
from pathlib import Path

import msgpack
import pytest
import trio
from torch import nn

from gossip.errors import ProtocolError, RefusedError
from gossip.ids import parse_address
from gossip.wire.frames import PREFIX, encode
from gossip.wire.messages import VERSION_MAX, VERSION_MIN, Hello, Ping, StatusReply, Unknown
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.links.reading import read_link
from node.observe.status import METRICS, query, read_pages
from tests.harness import warm
from tests.memory_stream import memory_stream_pair
from tests.node import offline
from tests.node.offline import in_trio

NEWER = Path(__file__).with_name("newer.py")
EXTRA = ("blue", 7, None, 2.5, b"\0\xff")  # The same as in newer.py, which must not be imported here.


class Newer:
    """Nodes of the next version, in one process since its imports take long. ``said`` has what each printed last."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = warm.Python(NEWER, anew=True, **pipes)
        self.said, self.ended = [], 0
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def start(self, listen, *seeds):
        """Start a node; return its number."""
        self.said.append({})
        self.ask([listen, *seeds])
        return len(self.said) - 1

    def end_nodes(self):
        while self.ended < len(self.said):
            self.ask(self.ended)
            self.ended += 1

    def ask(self, what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def read(self):
        for line in self.process.stdout:
            said = json.loads(line)
            self.said[said["number"]] = said

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join(10)
            self.process.stdout.close()


@pytest.fixture(scope="module")
def newer_process():
    with contextlib.closing(Newer()) as process:
        yield process


@pytest.fixture
def newer(newer_process):
    yield newer_process
    newer_process.end_nodes()


def test_a_node_passes_on_between_nodes_of_the_next_version_what_it_does_not_understand(train, until, newer):
    ours = train(nn.Linear(4, 2))
    # No node can dial them, so each is linked with ours alone.
    both = [newer.start("none", ours.node.address) for _ in range(2)]
    until(lambda: all(newer.said[node].get("mixes", 0) >= 3 for node in both), 120)
    ids = [newer.said[node]["id"] for node in both]
    for node, other in zip(both, reversed(ids), strict=True):
        # The record came through ours. Its owner's signature over all of it was checked on arrival.
        until(lambda node=node, other=other: newer.said[node]["extra"].get(other) == repr(EXTRA))
        assert newer.said[node]["links"] == [ours.node.id]
        assert newer.said[node]["dances"] == 0  # Its only neighbour is ours, which lacks the message.
        assert set(newer.said[node]["colours"]) <= {"grey"}  # Our Offer lacks the field.
    assert ours.node.metrics().exchanges_done >= 3
    assert query(parse_address(ours.node.address))["metrics"]["messages_ignored"] >= 2


def test_a_node_of_ours_joins_the_swarm_of_the_next_version_and_trains_there(train, until, newer):
    theirs = newer.start("127.0.0.1:0")
    until(lambda: "address" in newer.said[theirs], 60)
    ours = train(nn.Linear(4, 2), seeds=[newer.said[theirs]["address"]])
    until(lambda: ours.node.metrics().exchanges_done >= 3 and newer.said[theirs]["mixes"] >= 3, 30)
    members = ours.do(lambda node: node._training.network.peer.membership.members())
    records = {record.id.hex(): record for record, _ in members}
    assert records[newer.said[theirs]["id"]].extra == EXTRA


# -- other versions ----------------------------------------------------------------------------------------------------
def frame(table, body=b""):
    header = msgpack.packb(table)
    return PREFIX.pack(b"GSP1", len(header), len(body)) + header + body


@in_trio
async def test_an_unknown_message_is_skipped_with_its_body_and_counted():
    (link, far), told = offline.link(capacity_bytes=1 << 16), []
    link.reader.is_peer_newer, link.used_at = True, 0.0
    for said in (frame({"t": "later"}, bytes(5_000)), encode(Ping(1, ())), frame({"t": "later"})):
        await far.stream.send_all(said)
    await far.stream.aclose()
    await read_link(link, told.append, None, None)
    assert told == [Unknown("later"), Ping(1, ()), Unknown("later")]
    assert link.ignored_messages == 2
    assert link.used_at > 0.0


@in_trio
async def test_versions_that_do_not_meet_are_both_named_on_both_sides():
    near, far = memory_stream_pair()
    await far.send_all(frame({"t": "hello", "version_min": 7, "version_max": 9, "swarm": {"name": "x"}, "key": b"k"}))
    observer = Hello(VERSION_MIN, VERSION_MAX, "swarm", "", (), None)
    with pytest.raises(RefusedError, match="shows no membership"):  # It would be taken for the member.
        Greeter("swarm", None).check(observer, near, None, None, offline.OTHER)
    with pytest.raises(RefusedError) as ours:
        await Greeter("swarm", None).greet(near, FrameReader(near), None, None, None)
    reader = FrameReader(far)
    await reader.read_message()
    theirs, _ = await reader.read_message()
    assert ours.value.code == theirs.code == "version"
    for sentence in (str(ours.value), theirs.sentence):
        assert "versions 7 to 9" in sentence
        assert f"version {VERSION_MAX}" in sentence


# -- status ------------------------------------------------------------------------------------------------------------
def ask(*pages):
    """Return what read_pages makes of a node that answers with ``pages``, after a message of a later version."""

    async def main():
        near, far = memory_stream_pair()
        for said in (frame({"t": "later"}), *map(encode, pages)):
            await far.send_all(said)
        reader = FrameReader(near)
        reader.is_peer_newer = True
        with trio.fail_after(5):
            return await read_pages(near, reader)

    return trio.run(main)


METRIC_VALUES = ("ab" * 16, "h:1", "swarm", *[1] * (len(METRICS) - 3))
ROW = (b"i" * 16, "h:2", "alive", 1, 2, 0.5, True, 0.05, 2.5)


def test_a_status_with_more_values_is_read_for_those_that_are_known():
    answer = ask(StatusReply((*METRIC_VALUES, 5, ("new",)), ((*ROW, "punched", "more", 7),), False))
    assert set(answer["metrics"]) == set(METRICS) - {"id", "address", "swarm"}
    assert answer["members"] == [
        {"id": "69" * 16, "address": "h:2", "state": "alive", "steps": 1, "samples": 2, "loss": 0.5, "ready": True,
         "rtt_s": 0.05, "mb_s": 2.5, "link": "punched"}
    ]  # fmt: skip


def test_a_status_with_fewer_values_leaves_the_others_open():
    answer = ask(StatusReply(METRIC_VALUES[:5], (ROW[:4],), False))
    assert answer["metrics"]["exchanges_done"] is None
    assert answer["metrics"]["refused"] == ()
    assert answer["members"][0]["samples"] is answer["members"][0]["rtt_s"] is None


@pytest.mark.parametrize(
    "page",
    [
        StatusReply((10**11, *METRIC_VALUES[1:]), (), False),
        StatusReply(METRIC_VALUES, ((10**11, *ROW[1:]),), False),
        StatusReply(METRIC_VALUES, ((b"short", *ROW[1:]),), False),
        StatusReply(METRIC_VALUES, (ROW, ROW), False),
        StatusReply(METRIC_VALUES, (5, ()), False),
        StatusReply((), (), False),
    ],
    ids=["number for an id", "number for a member", "short id", "same id again", "no rows", "nothing"],
)
def test_an_answer_that_is_no_status_is_refused_in_a_sentence(page):
    """``bytes`` of a large number would allocate as many bytes."""
    with pytest.raises(ProtocolError, match="The node's answer is not a status"):
        ask(page)


def test_a_node_that_names_members_without_end_is_left(monkeypatch):
    monkeypatch.setattr("node.observe.status.MAX_MEMBERS", 3)
    pages = [StatusReply(METRIC_VALUES, ((bytes([number]) * 16,),), True) for number in range(1, 9)]
    with pytest.raises(ProtocolError, match="more members"):
        ask(*pages)


def test_nothing_that_a_terminal_obeys_is_shown_of_a_status():
    answer = ask(StatusReply(METRIC_VALUES, ((b"i" * 16, "\x1b[2J", "x" * 500),), False))
    assert answer["members"][0]["address"] is None
    assert answer["members"][0]["state"] is None
