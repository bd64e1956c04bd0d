"""The layout of a swarm's model, which a node describes page by page to a reader that has no model."""

from __future__ import annotations

from gossip.arithmetic.layout import (
    MAX_SUMMARY_BYTES,
    MAX_SUMMARY_SEGMENTS,
    WIRE_KINDS,
    Layout,
    Segment,
    packed_bytes,
)
from gossip.errors import ProtocolError
from gossip.wire.frames import encode
from gossip.wire.messages import LayoutQuery, LayoutReply
from node.links.frame_reader import FrameReader
from node.observe.status import next_reply

__all__ = ["layout_page", "read_layout"]

MAX_TENSORS = 1 << 17  # Tensors of a layout that is read: 20 MB, and more than the largest models have.


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


async def read_layout(reader: FrameReader, fingerprint: str) -> Layout:
    """Return the layout of a node, which must have this fingerprint.

    Raises:
        RemoteError: The node gives none, or another one.
    """
    segments: list[Segment] = []
    while True:
        await reader.stream.send_all(encode(LayoutQuery(len(segments))))
        page = Layout.parse((await next_reply(reader, LayoutReply)).layout)
        segments += page.segments
        if not page.segments or len(segments) >= min(page.count, MAX_TENSORS):
            break
    layout = Layout(segments)  # It raises LayoutError for a name that occurs twice.
    if layout.fingerprint != fingerprint:
        raise ProtocolError("The node describes another model than it trains.")
    return layout
