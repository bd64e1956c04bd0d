"""The status and the layout of a node, which it sends page by page, and the query of a node that joins nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

import trio

from gossip.arithmetic.layout import MAX_SUMMARY_BYTES, MAX_SUMMARY_SEGMENTS, WIRE_KINDS, Layout, Segment, packed_bytes
from gossip.errors import LocalError, ProtocolError, RefusedError, RemoteError
from gossip.ids import Address
from gossip.wire.frames import encode
from gossip.wire.messages import Hello, LayoutQuery, LayoutReply, StatusQuery, StatusReply, Unknown
from node.identity.keys import Identity
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.observe.figures import HEADINGS, SHOWN_ROWS, STATUS, Source, status_reading
from node.transport.byte_stream import ByteStream
from node.transport.tcp import TcpNetwork, numeric_address
from node.transport.tls import TlsStream, swarm_contexts

Reply = TypeVar("Reply", StatusReply, LayoutReply)
PAGE_MEMBERS = 100  # Members of a page: at most 400 B each (a host name has 255) in one header of 64 KiB.
MAX_MEMBERS = 50_000  # Members that are read: 40 MB, twice what a table holds. Any program may be answering.
MAX_TENSORS = 1 << 17  # Tensors of a layout that is read: 20 MB, and more than the largest models have.
MAX_CHARACTERS = 300  # Characters of a text that is shown: enough for an address.
AFTER_ALL = b"\xff" * 16  # No member's id comes after it.
TEXTS = {"id", "address", "swarm", *(figure.name for figure in STATUS if figure.is_text)}
METRICS = ("id", "address", "swarm", *(figure.name for figure in STATUS))
"""The metrics of a reply in their order; later versions append theirs."""


def status_page(source: Source, swarm: str, after: bytes) -> StatusReply:
    """Return the figures, and the members with ids after ``after`` in order, up to one page."""
    peer = source.peer
    me = peer.membership.me
    address = str(me.address) if me.address is not None else None
    figures = status_reading(source).values()
    later = sorted((record.id, record, state) for record, state in peer.membership.members() if record.id > after)
    page = tuple(
        (record.id, str(record.address) if record.address else None, state.value, record.steps, record.samples,
         record.loss, record.ready, peer.membership.rtt_s(record.id),
         peer.exchanges.durations.rate(record.id), source.links.path_of(record.id))
        for _, record, state in later[:PAGE_MEMBERS]
    )  # fmt: skip
    return StatusReply((me.id.hex(), address, swarm, *figures), page, len(later) > PAGE_MEMBERS)


def layout_page(layout: Layout, first: int) -> LayoutReply:
    """Return the tensors from number ``first`` on that one message holds."""
    page: list[tuple[object, ...]] = []
    room = MAX_SUMMARY_BYTES
    for segment in layout.segments[first : first + MAX_SUMMARY_SEGMENTS]:
        room -= packed_bytes(segment)
        if room < 0:
            break
        page.append((segment.name, segment.shape, segment.dtype, WIRE_KINDS[segment.kind]))
    return LayoutReply((layout.fingerprint, layout.size, len(layout.segments), tuple(page)))


def query(address: Address, secret: bytes | None = None, timeout_s: float = 5.0) -> dict[str, Any]:
    """Ask the node at ``address`` for its id, members and metrics, as an observer that joins nothing.

    Raises LocalError in one sentence if nothing answers there, or the secret is wrong.
    """
    try:
        return trio.run(query_node, address, secret, timeout_s)
    except RefusedError as error:
        raise LocalError(str(error)) from error
    except (OSError, RemoteError, trio.TooSlowError) as error:
        raise no_answer(str(address), secret) from error


def no_answer(where: str, secret: bytes | None) -> LocalError:
    """Return the error of a query that no node has answered at one address or several."""
    secret_hint = "is its secret this one" if secret is not None else "does it need --secret-file"
    return LocalError(f"No node answers at {where}: is it running, is the address right, and {secret_hint}?")


async def query_node(
    address: Address, secret: bytes | None, timeout_s: float, after: bytes = b"",
    allows: Callable[[str], bool] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Query as :func:`query` does, in the caller's trio loop, for members with ids larger than ``after``.

    After :data:`AFTER_ALL` at most a page of them is read, whatever the node sends. ``allows`` is asked with each
    numeric address just before it is dialled.

    Raises:
        OSError, RemoteError, trio.TooSlowError: The node does not answer.
    """
    with trio.fail_after(timeout_s):
        stream = await TcpNetwork(None, timeout_s).connect(address, allows)
        try:
            return (await query_over(stream, secret, after))[0]
        finally:
            stream.close_now()


async def query_layout(address: Address, secret: bytes | None, timeout_s: float) -> tuple[Layout, str]:
    """Return the layout that the node at an address trains, and its swarm's name.

    Raises:
        OSError, RemoteError, LayoutError, trio.TooSlowError: The node does not answer, or describes no layout.
    """
    segments: list[Segment] = []
    with trio.fail_after(timeout_s):
        stream = await TcpNetwork(None, timeout_s).connect(address)
        try:
            reader, theirs = await observe(stream, secret)
            while True:
                await reader.stream.send_all(encode(LayoutQuery(len(segments))))
                page = Layout.parse((await next_reply(reader, LayoutReply)).layout)
                segments += page.segments
                if not page.segments or len(segments) >= min(page.count, MAX_TENSORS):
                    break
        finally:
            stream.close_now()
    return Layout(segments), theirs.swarm


async def query_over(
    stream: ByteStream, secret: bytes | None, after: bytes = b""
) -> tuple[dict[str, Any], Address | None]:
    """Query over a fresh connection; return the answer, and where the node sees this end. Raises RemoteError."""
    reader, theirs = await observe(stream, secret)
    return await read_pages(reader.stream, reader, after), numeric_address(theirs.seen)


async def observe(stream: ByteStream, secret: bytes | None) -> tuple[FrameReader, Hello]:
    """Greet a node as an observer, which is no member; return the reader of what it sends. Raises RemoteError."""
    proven = None
    if secret is not None:
        tls = TlsStream(stream, swarm_contexts(Identity.fresh(), secret), server_side=False)
        await tls.handshake()
        stream, proven = tls, tls.peer_id
    reader = FrameReader(stream)
    return reader, await Greeter("", None).greet(stream, reader, None, proven, None)


async def read_pages(stream: ByteStream, reader: FrameReader, after: bytes = b"") -> dict[str, Any]:
    """Return all pages as one answer. A value that a node of another version does not send is None."""
    members: list[dict[str, Any]] = []
    while True:
        await stream.send_all(encode(StatusQuery(after)))
        reply = await next_reply(reader, StatusReply)
        for row in reply.members:
            members.append(member_of(row, after))
            after = bytes.fromhex(members[-1]["id"])
        if not reply.more or not reply.members:
            break
        if len(members) >= MAX_MEMBERS:
            raise ProtocolError("The node names more members than a swarm can have.")
    values = (*reply.metrics, *[None] * len(METRICS))
    metrics: dict[str, Any] = {
        name: text_of(value) if name in TEXTS else number_of(value)
        for name, value in zip(METRICS, values, strict=False)
    }
    for name in HEADINGS:
        metrics[name] = rows_of(values[METRICS.index(name)])
    identity = metrics.pop("id")
    if not isinstance(identity, str) or len(identity) != 32 or set(identity) - set("0123456789abcdef"):
        raise ProtocolError("The node's answer is not a status.")
    return {
        "id": identity, "address": metrics.pop("address"), "swarm": metrics.pop("swarm"), "metrics": metrics,
        "members": members,
    }  # fmt: skip


async def next_reply(reader: FrameReader, kind: type[Reply]) -> Reply:
    """Return the next reply of this kind; messages that this version does not know are skipped."""
    while True:
        frame = await reader.read_message()
        if frame is None:
            raise ProtocolError("The node closed the connection.")
        message, body_bytes = frame
        if isinstance(message, kind):
            return message
        if isinstance(message, Unknown):
            await reader.discard(body_bytes)


def member_of(row: Any, after: bytes) -> dict[str, Any]:
    """Return one member of a page. Ids must rise, or a node could repeat the same ones for ever."""
    peer = row[0] if isinstance(row, tuple) and row else None
    if type(peer) is not bytes or len(peer) != 16 or peer <= after:
        raise ProtocolError("The node's answer is not a status.")
    values = (*row[1:], *[None] * 9)  # Values that an older version does not send are None.
    names = ("steps", "samples", "loss", "ready", "rtt_s", "mb_s")
    numbers = {name: number_of(value) for name, value in zip(names, values[2:8], strict=True)}
    texts = {"address": text_of(values[0]), "link": text_of(values[8]), "state": text_of(values[1])}
    return {"id": peer.hex(), **texts, **numbers}


def rows_of(value: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the rows (member, code, count) of a figure of that shape; malformed rows are left out."""
    rows = value if isinstance(value, tuple) else ()
    return tuple(
        (text_of(row[0]), text_of(row[1]), number_of(row[2])) for row in rows[:SHOWN_ROWS]
        if isinstance(row, tuple) and len(row) >= 3
    )  # fmt: skip


def text_of(value: Any) -> str | None:
    """Return a short printable text, and None for anything else."""
    is_safe = isinstance(value, str) and len(value) <= MAX_CHARACTERS and value.isprintable()
    return value if is_safe else None


def number_of(value: Any) -> float | None:
    """Return a number or a truth value, and None for anything else."""
    return value if isinstance(value, bool | int | float) else None
