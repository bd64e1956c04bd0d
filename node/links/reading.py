"""The reading of a link: messages and chunks are taken from its stream until the other side ends."""

from collections.abc import Callable

from gossip.errors import ProtocolError
from gossip.wire.messages import Chunk, Message, Unknown
from node.links.bulk import Inflow
from node.links.link import Link
from node.transport.blocking_io import WHOLE_BYTES, BlockingIoPool, BlockingStream


async def read_link(
    link: Link, on_message: Callable[[Message], None], buffer_for: Callable[[Chunk, int], memoryview | None],
    on_body: Callable[[Chunk], None], inflow_of: Callable[[Chunk], Inflow | None] = lambda chunk: None,
    on_inflow: Callable[[Chunk], None] = lambda chunk: None,
) -> None:  # fmt: skip
    """Read until the other side ends.

    Args:
        link: The link.
        on_message: Called with each message that is not a chunk.
        buffer_for: Returns the buffer for a chunk's body of this many bytes; None to discard the body.
        on_body: Called when that buffer is full.
        inflow_of: Returns the vector of a chunk if an I/O thread may receive the rest of it.
        on_inflow: Called when the I/O thread has returned, with the first chunk that it received.
    """
    reader, motion, io_pool = link.reader, link.motion, link.io_pool
    # The next message, with the length of its body. It is None here, unless an I/O thread has read one that is not of
    # its vector.
    frame: tuple[Message, int] | None = None
    while (frame := frame or await reader.read_message()) is not None:
        (message, body_bytes), frame = frame, None
        link.used_at = link.clock.current_time()
        if not isinstance(message, Chunk):
            if isinstance(message, Unknown):
                link.ignored_messages += 1
                await reader.discard(body_bytes)
            on_message(message)  # Unknown messages count against the rate limit of the link, too.
            continue
        if not body_bytes:
            raise ProtocolError("A chunk came without a body.")
        buffer = buffer_for(message, body_bytes)
        if buffer is None:
            await reader.discard(body_bytes)
            continue
        inflow = None if io_pool is None or body_bytes < WHOLE_BYTES else inflow_of(message)
        blocking_stream = None if io_pool is None or inflow is None else io_pool.lend(link.stream)
        motion.is_receiving = True
        if io_pool is None or inflow is None or blocking_stream is None:  # Trio's thread receives the chunk.
            await reader.read_exactly(buffer)
            motion.is_receiving = False
            on_body(message)
        else:
            frame = await receive_in_thread(link, io_pool, blocking_stream, inflow, message, buffer)
            motion.is_receiving = False
            on_inflow(message)


async def receive_in_thread(
    link: Link, io_pool: BlockingIoPool, stream: BlockingStream, inflow: Inflow, chunk: Chunk, buffer: memoryview
) -> tuple[Message, int] | None:
    """Receive this chunk and those of the same vector that follow, in an I/O thread.

    Returns:
        The first message that is not of this vector, as :meth:`FrameReader.read_message` returns it; None if none was
        read.
    """
    reader = link.reader

    async def receive_chunks(blocking: BlockingStream) -> tuple[Message, int] | None:
        """Receive chunks into their buffers until a message of another kind comes, or nothing more is needed."""
        current, body = chunk, buffer
        reader.stream = blocking
        while True:
            await reader.read_exactly(body)
            if not inflow.on_body(current):
                return None
            if not (reader.has_read_ahead or blocking.wait_readable(lambda: inflow.is_over)):
                return None
            frame = await reader.read_message()
            if frame is None:
                return None
            message, body_bytes = frame
            if not isinstance(message, Chunk) or message.session != chunk.session or not body_bytes:
                return frame
            next_body = inflow.buffer_for(message, body_bytes)
            if next_body is None:
                return frame
            current, body = message, next_body

    link.inflow, before_waiting = inflow, reader.before_waiting
    before_waiting()
    reader.before_waiting = lambda: None  # It sends replies, which trio's thread alone may do.
    try:
        return await io_pool.run(stream, "gossip-receive", receive_chunks)
    finally:
        reader.stream, reader.before_waiting, link.inflow = link.stream, before_waiting, None
