"""Detection of stalled streams."""

import math
from types import SimpleNamespace

import trio

from gossip.averaging.streams import Receiver
from gossip.codecs import CODECS
from gossip.exchange.session import MAX_NEIGHBOURS
from gossip.wire.messages import Chunk
from node.network.transfers.transfer import LinkTransfer, LinkTransfers
from tests.node.offline import in_trio


class Fills(Receiver):
    """A receiver of 2,048 elements that discards its bytes."""

    def __init__(self):
        super().__init__(1, 2048, CODECS["fp32"])

    def body_buffer(self, positions, size):
        return memoryview(bytearray(size))


def under_way(receiver):
    """Return the transfers and the only one, which sends as well. It began 0 s ago."""
    link = SimpleNamespace(start_bulk=lambda *_, **__: None, stream=None, received_at=-math.inf, sent_at=-math.inf)
    transfer = LinkTransfer(1, trio.lowlevel.current_clock().current_time)
    transfer.start(link, SimpleNamespace(done=False), receiver)
    return LinkTransfers({1: transfer}), transfer


@in_trio
def test_as_many_ended_sessions_are_remembered_as_can_end_at_once():
    transfers = LinkTransfers({})
    for session in [*range(2 * MAX_NEIGHBOURS)] * 2:
        transfers.expect_late_chunks(session)
    assert all(map(transfers.is_known, range(2 * MAX_NEIGHBOURS)))
    assert len(transfers.ended) == 2 * MAX_NEIGHBOURS, "each once"


@in_trio
def test_a_partner_that_reads_and_sends_nothing_has_stalled():
    """Once, the partner's reading of our bytes counted as progress."""
    transfers, transfer = under_way(Fills())
    begun = transfer.heard_at
    transfer.moved_at = begun + 2.9
    assert transfers.stalled_links(begun + 2.9, 3.0) == []
    assert transfers.stalled_links(begun + 3.1, 3.0) == [transfer.link]
    transfer.heard_at = -math.inf
    transfers.buffer_for(transfer.link, Chunk(1, 0, 1024, 0), 4096)
    assert transfers.stalled_links(begun + 2.9, 3.0) == [], "a chunk that begins is something of theirs"


@in_trio
def test_a_vector_that_is_here_is_waited_for_by_what_we_send():
    transfers, transfer = under_way(SimpleNamespace(is_complete=True))
    transfer.heard_at -= 100.0
    assert transfers.stalled_links(transfer.moved_at + 2.9, 3.0) == []
    assert transfers.stalled_links(transfer.moved_at + 3.1, 3.0) == [transfer.link]


@in_trio
def test_a_stream_that_only_goes_out_has_nothing_to_hear():
    transfers, transfer = under_way(None)
    transfer.heard_at -= 100.0
    assert transfers.stalled_links(transfer.moved_at + 2.9, 3.0) == []


@in_trio
def test_bytes_of_an_incomplete_chunk_are_movement():
    transfers, transfer = under_way(Fills())
    begun = transfer.heard_at
    transfer.link.sent_at = begun + 5.0
    assert transfers.stalled_links(begun + 5.1, 3.0) == [transfer.link], "nothing of theirs came"
    transfer.link.received_at = begun + 5.0
    assert transfers.stalled_links(begun + 7.9, 3.0) == []
    assert transfers.stalled_links(begun + 8.1, 3.0) == [transfer.link]


@in_trio
def test_a_transfer_whose_link_has_ended_does_not_stall():
    """Once, an exchange in doubt whose link had broken was found stalled every second, and its partner blamed."""
    transfers, transfer = under_way(Fills())
    link, stopped = transfer.link, []
    link.stop_bulk = lambda session, sender: stopped.append((session, sender))
    assert transfers.stalled_links(transfer.moved_at + 9.0, 3.0) == [link]
    assert not transfer.on_link_ended(SimpleNamespace())
    assert transfer.on_link_ended(link)
    assert stopped == [(1, transfer.sender)], "so that its vector goes back to the pool"
    assert transfers.stalled_links(transfer.moved_at + 9.0, 3.0) == []
