"""All carriers of vectors between two links, and the pairs of ends for the tests of their contract."""

import contextlib
import functools
import math
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
import trio
import trio.lowlevel

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.codecs import get_codec
from gossip.ids import PeerId
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.links.reading import read_link
from node.links.stripes import Lane
from node.network.transfers.transfer import LinkTransfer, LinkTransfers
from node.transport.blocking_io import BlockingIoPool
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream
from node.transport.sealed import RECORD_BYTES, leave_tls
from tests.node.transport.sealing import ACCEPTOR, DIALLER
from tests.node.transport.test_tls import receive_exactly, tls_ends

SIZE, CHUNK = 1 << 20, 1 << 16  # 4 MiB in 16 chunks: more than both sockets hold
SOCKET_BYTES = 65_536
PARTNER = PeerId(bytes(16))
FP32 = get_codec("fp32")
CONNECTED: list[PlainStream] = []


# -- the streams -------------------------------------------------------------------------------------------------------
async def loopback_pair() -> list[PlainStream]:
    """Return two ends with small buffers, so that an end that sends more waits for the other."""
    with trio.socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = trio.socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        await client.connect(listener.getsockname())
        server, _ = await listener.accept()
    for sock in (client, server):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    CONNECTED.extend([PlainStream(client), PlainStream(server)])
    return CONNECTED[-2:]


async def tls_pair() -> list[ByteStream]:
    return list(await tls_ends(loopback_pair))


async def sealed_pair() -> list[ByteStream]:
    """Return two ends, each of which has read that the other left TLS."""
    alice, bob = await tls_ends(loopback_pair)
    ends = [await leave_tls(alice, DIALLER, ACCEPTOR), await leave_tls(bob, ACCEPTOR, DIALLER)]
    for end in ends:
        await end.send_all(b"w")
    for end in ends:
        await receive_exactly(end, 1)
    return ends


class Carrier(NamedTuple):
    """A carrier of vectors: the streams of its link, whether vectors are worth a thread, and its lanes."""

    streams: Callable[[], Awaitable[list]]
    large: bool = False
    lanes: int = 0
    threads: bool = False  # Threads carry the vector.
    chunk: int = CHUNK  # Elements of a chunk where both ends are ours.


CARRIERS = {
    "loop": Carrier(loopback_pair),
    "threads": Carrier(loopback_pair, large=True, threads=True),
    "TLS": Carrier(tls_pair, large=True),
    "sealed": Carrier(sealed_pair),
    # Raw chunks of several records, of which the last is short. Elsewhere such a chunk is one whole record.
    "sealed threads": Carrier(sealed_pair, large=True, threads=True, chunk=3 * RECORD_BYTES // 4 + 256),
    "stripes": Carrier(loopback_pair, large=True, lanes=3),
}


# -- the ends ----------------------------------------------------------------------------------------------------------
def shut_down() -> None:
    for stream in CONNECTED:
        with contextlib.suppress(OSError), stream.lend() as sock:
            sock.shutdown(socket.SHUT_RDWR)


def in_trio(test):
    """Run a test in trio for 30 s at most, and close all that :func:`loopback_pair` made.

    A timer in a thread of its own ends blocking threads that nothing else would end.
    """

    @functools.wraps(test)
    def run(**arguments):
        async def main():
            bound = threading.Timer(35.0, shut_down)
            bound.start()
            try:
                with trio.fail_after(30):
                    await test(**arguments)
            finally:
                bound.cancel()
                while CONNECTED:
                    CONNECTED.pop().close_now()

        trio.run(main)

    return run


def at_work() -> list[str]:
    """Return the names of the threads that carry vectors now."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gossip-"))


async def until(what) -> None:
    while not what():  # noqa: ASYNC110 - the state of a thread
        await trio.sleep(0.005)


def vectors(count=2):
    return np.random.default_rng(0).standard_normal((count, SIZE)).astype(np.float32)


async def unless_cancelled(task) -> None:
    """Run a task of a link, and raise no BrokenLinkError once it is cancelled: a cancelled link cuts its stream."""
    try:
        await task()
    except BrokenLinkError:
        if trio.current_effective_deadline() > -math.inf:
            raise


class Receiver(DifferenceReceiver):
    """A receiver that records the names of the threads in which it computes."""

    threads: set[str]

    def use_chunk(self, where, body):
        self.threads.add(threading.current_thread().name)
        super().use_chunk(where, body)


class End:
    """One end of a connection: a link and one session. Its vector is worth a thread unless ``large`` is False."""

    def __init__(self, stream, ours, codec=FP32, receiver=None, io_pool=None, chunk=CHUNK, large=True):
        self.link = Link(stream, FrameReader(stream), PARTNER)
        self.link.io_pool = io_pool or BlockingIoPool()
        self.messages, self.flowed = [], []
        self.receiver = receiver or Receiver(1, ours, np.zeros_like(ours), codec)
        self.receiver.threads = set()
        self.large = large
        self.sender = Sender(1, ours, codec, chunk)
        self.transfer = LinkTransfer(1, self.link.clock.current_time)
        self.transfers = LinkTransfers({1: self.transfer})

    def begin(self, nursery, both=True):
        """Start the link and the transfer, which sends nothing unless ``both``."""
        self.start(self.sender if both else None)
        nursery.start_soon(unless_cancelled, self.write)
        nursery.start_soon(unless_cancelled, self.read)
        nursery.start_soon(self.link.cut_when_cancelled)

    def start(self, sender):
        self.transfer.start(self.link, sender, self.receiver, large=self.large)

    def release(self):
        """End the session, and expect late chunks of it."""
        self.transfers.table.pop(1).end()
        self.transfers.expect_late_chunks(1)

    async def write(self):
        await self.link.write_loop(lambda session: None, lambda session: None)

    async def read(self):
        await read_link(
            self.link,
            self.messages.append,
            functools.partial(self.transfers.buffer_for, self.link),
            self.transfer.on_body,
            lambda chunk: self.transfers.table.get(chunk.session) if self.large else None,
            self.flowed.append,
        )

    async def join(self, nursery, stream, dialled):
        """Run another connection as a lane of the link. Return once it is admitted."""
        lane = Lane(self.link, stream, FrameReader(stream))
        nursery.start_soon(lane.run, dialled, self.place, self.transfer.on_body)
        await until(lambda: lane.is_open)

    async def place(self, chunk, size):
        await trio.lowlevel.checkpoint()
        return self.transfers.buffer_for(self.link, chunk, size, over_lane=True)


async def two_ends(name, nursery, a, b, codec=FP32):
    """Return two ends joined by a carrier, their lanes open."""
    carrier = CARRIERS[name]
    near, far = await carrier.streams()
    options = {"chunk": carrier.chunk, "large": carrier.large}
    ends = [End(near, a, codec, **options), End(far, b, codec, **options)]
    for _ in range(carrier.lanes):
        near, far = await loopback_pair()
        nursery.start_soon(ends[0].join, nursery, near, True)
        await ends[1].join(nursery, far, False)
    await until(lambda: all(len(end.link.lanes) == carrier.lanes for end in ends))
    return ends


async def one_end(name, nursery, ours, receiver=None):
    """Return an end, and the stream over which its vector's chunks are to come."""
    carrier = CARRIERS[name]
    near, far = await carrier.streams()
    end = End(near, ours, large=carrier.large, receiver=receiver)
    if not carrier.lanes:
        return end, far
    near, lane = await loopback_pair()
    await end.join(nursery, near, False)
    await FrameReader(lane).read_message()
    return end, lane


def check_differences(ends, a, b, codec):
    """Assert that each of two ends holds the other's vector less its own, both as the codec gives them, bit for bit."""
    quantised = np.empty_like(a), np.empty_like(b)
    codec.quantised(a, quantised[0], 1)
    codec.quantised(b, quantised[1], 1)
    assert np.array_equal(ends[0].receiver.out, quantised[1] - quantised[0])
    assert np.array_equal(ends[1].receiver.out, quantised[0] - quantised[1])


async def half_a_chunk(stream, theirs):
    """Send the header and a part of the first chunk. Return the rest."""
    header, body = Sender(1, theirs, FP32, CHUNK).next_frame()
    await stream.send_all(header)
    await stream.send_all(body[:100_000])
    return body[100_000:]


def stall(end, other, nursery):
    """End a link like the runtime does when it finds, 9 s later, that the session has stalled."""
    (stalled,) = end.transfers.stalled_links(end.link.clock.current_time() + 9.0, 3.0)
    stalled.close_now()


ENDS = {
    "cut": lambda end, other, nursery: other.close_now(),
    "stall": stall,
    "cancel": lambda end, other, nursery: nursery.cancel_scope.cancel(),
}
