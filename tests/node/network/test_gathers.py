"""Group means on real links: all members reach the same vector, or the group fails."""

import dataclasses
import math
import time

import numpy as np
import pytest
import trio
import xxhash

from gossip.arithmetic.group_mean import member_slices
from gossip.codecs import ALIGN, CODECS
from gossip.errors import ProtocolError
from gossip.exchange.session import State
from gossip.ids import PeerId
from gossip.wire.messages import Chunk
from node.network.transfers import streams
from node.network.transfers.transfer import LinkTransfer
from tests.harness.configs import tuned
from tests.node.network.gather_harness import SESSION, End, Group
from tests.node.offline import in_trio

# The codecs that need no bounds.
RAW = [name for name in CODECS if not CODECS[name].needs_spread]


def begin_chunk(node, sender, start):
    """Return the buffer for a raw chunk of 1,024 elements, whose body is about to come to ``node``."""
    return node.gathers.buffer_for(node.transfer, node.links[sender.me], Chunk(SESSION, start, 1024, 0), 4096)


@pytest.mark.parametrize("codec", RAW)
@pytest.mark.parametrize(("members", "elements"), [(2, 5_000), (3, 2_500), (5, 40_001), (4, 300), (16, 20_000), (3, 1)])
@in_trio
def test_all_come_to_the_mean_of_what_all_decode_bit_for_bit(codec, members, elements):
    group = Group(members, elements, codec, seed=members)
    group.begin()
    group.run()
    assert np.array_equal(group.differences(), group.expected())
    for one, difference in zip(group.nodes, group.expected(), strict=True):
        ((kind, session, difference_sq, own_sq, refused, absent, _),) = one.said
        assert (kind, session, refused, absent) == ("gathered", SESSION, {}, [])
        assert difference_sq == pytest.approx(float(np.sum(difference.astype(np.float64) ** 2)), rel=1e-4)
        assert own_sq == pytest.approx(float(np.sum(one.vector.astype(np.float64) ** 2)), rel=0.2)


@pytest.mark.parametrize("seed", range(8))
@in_trio
def test_chunks_that_come_before_a_group_began_here_are_kept_for_it(seed):
    group = Group(4, 9_000, "int8", seed)
    early = 0
    for k in group.rng.sample(range(4), 4):
        group.begin(k)
        for _ in range(group.rng.randrange(1, 12)):
            group.pump()
            early += sum(one.transfer.early.chunks for one in group.nodes if one.transfer.early)
    assert early
    group.run()
    assert np.array_equal(group.differences(), group.expected())
    assert not any(one.transfer.early for one in group.nodes)


@in_trio
def test_a_body_that_was_on_its_way_when_the_group_began_is_used_once_it_is_filled():
    group = Group(2, 3_000)
    a, b = group.nodes
    group.begin(0)
    chunk, body = group.next_chunk(a, b)
    place = b.gathers.buffer_for(b.transfer, b.links[a.me], chunk, len(body))
    group.begin(1)
    place[:] = body
    b.gathers.on_body(b.transfer, b.links[a.me], chunk)
    group.run()
    assert np.array_equal(group.differences(), group.expected())


@in_trio
def test_streams_to_a_member_begin_when_there_is_a_link():
    group = Group(3, 4_000)
    a, _, c = group.nodes
    ends = a.links.pop(c.me), c.links.pop(a.me)
    group.begin()
    group.run()
    assert not any(one.said for one in group.nodes)
    a.links[c.me], c.links[a.me] = ends
    group.begin()
    group.run()
    assert np.array_equal(group.differences(), group.expected())


@in_trio
def test_a_large_slice_is_averaged_in_a_job_and_comes_to_the_same(monkeypatch):
    monkeypatch.setattr(streams, "INLINE_ELEMENTS", 0)
    group = Group(3, 9_000, "bf16", filter="trimmed")
    group.begin()
    group.run()
    assert [len(one.tasks) for one in group.nodes] == [1, 1, 1]
    group.run_jobs()
    group.run()
    assert np.array_equal(group.differences(), group.expected(trim=1))


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("after", [0, 1, 5, 15, 25, 1000])
@in_trio
def test_whenever_a_group_ends_its_buffers_go_back(after, inline, monkeypatch):
    if not inline:
        monkeypatch.setattr(streams, "INLINE_ELEMENTS", 0)
    group = Group(3, 9_000, "int8")
    group.begin()
    for _ in range(after):
        group.pump()
    for one in group.nodes:
        one.release()
        one.release()
    group.run_jobs()
    assert [one.pool.out for one in group.nodes] == [0, 0, 0]
    assert not any(end.bulk for one in group.nodes for end in one.links.values())
    assert not any(one.averager.transfers or one.transfer.early for one in group.nodes)


def flipped(body):
    return body[:-1] + bytes([body[-1] ^ 1])


@in_trio
def test_a_flipped_bit_costs_the_link_and_its_member_is_left_out():
    group = Group(3, 4_000)
    a, b, _ = group.nodes
    group.change = lambda sender, to, chunk, body: (chunk, flipped(body) if (sender, to) == (a, b) else body)
    group.begin()
    group.run()
    assert b.links[a.me].is_closed
    assert not b.said
    b.leave_out([a.me], means=True)
    group.run()
    assert [(one.said[0][0], one.said[0][5]) for one in group.nodes] == [
        ("gathered", []), ("gathered", [a.me]), ("gathered", [])
    ]  # fmt: skip
    first, second, third = member_slices(4_000, 3)
    of_b = b.transfer.group.difference.array
    assert not of_b[first].any()
    assert np.array_equal(of_b[third], group.expected()[1, third])
    assert np.allclose(of_b[second], (group.nodes[2].vector - b.vector)[second] / 2, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@in_trio
def test_chunks_of_a_member_that_was_left_out_change_nothing(codec):
    """A chunk of its mean is arriving when the member is left out. A raw codec writes into the result's own memory."""
    group = Group(2, 4_000, codec)
    a, b = group.nodes
    group.begin()
    chunks, where = [], member_slices(4_000, 2)[0]

    def hold(sender, to, chunk, body):
        if to is b and chunk.start < where.stop:
            chunks.append((chunk, body))
        return chunk, body

    group.change, deliver = hold, group.deliver
    group.deliver = lambda node, link, *what: None if what in chunks else deliver(node, link, *what)
    group.run()
    assert len(chunks) >= 2
    assert not b.said
    link, (first, body) = b.links[a.me], chunks[0]
    buffer = b.gathers.buffer_for(b.transfer, link, first, len(body))
    b.leave_out(None, means=False)
    assert not b.said
    b.leave_out(None, means=True)
    assert [(what[0], what[5]) for what in b.said] == [("gathered", [a.me])]
    result = b.transfer.group.difference.array
    before = result.copy()
    assert not before[where].any()
    buffer[:] = body
    b.gathers.on_body(b.transfer, link, first)
    for chunk, body in chunks[1:]:
        deliver(b, link, chunk, body)
    assert np.array_equal(result, before)
    assert not link.is_closed
    assert len(b.said) == 1


@in_trio
def test_statistics_stay_as_they_are_where_a_mean_is_missing():
    """Statistics are values in the result, where weights are differences."""
    group = Group(2, 4_000)
    b = group.nodes[1]
    b.averager.outer_step.parameters = 1_000
    group.begin(1)
    b.leave_out(None, means=False)
    b.leave_out(None, means=True)
    where = member_slices(4_000, 2)[0]
    result = b.transfer.group.difference.array[where]
    assert not result[:1_000].any()
    assert np.array_equal(result[1_000:], b.vector[where][1_000:])


@pytest.mark.parametrize("is_left_out", [False, True])
@pytest.mark.parametrize("part", ["values", "mean"])
@in_trio
def test_a_vector_that_a_link_still_fills_is_not_used_again(part, is_left_out):
    group = Group(2, 4_000)
    a, b = group.nodes
    group.begin()
    theirs, own = member_slices(4_000, 2)
    buffer = begin_chunk(b, a, own.start if part == "values" else theirs.start)
    if is_left_out:
        b.leave_out([a.me], means=True)
    b.release()
    reused = [b.pool.take_scratch(4_000 + 17 * ALIGN).array, *(b.pool.take().array for _ in range(4))]
    buffer[:] = bytes([255]) * 4096
    assert not any(np.isnan(vector).any() for vector in reused)


@in_trio
def test_vectors_of_a_group_that_left_members_out_go_back():
    group = Group(3, 4_000)
    before, deliver = [one.pool.out for one in group.nodes], group.deliver
    group.deliver = lambda node, *what: None if node is group.nodes[2] else deliver(node, *what)
    group.begin(0, 1)
    group.run()
    for one in group.nodes[:2]:
        one.leave_out(None, means=False)
    group.run()
    for one in group.nodes[:2]:
        one.leave_out(None, means=True)
        assert one.said[0][5] == [group.ids[2]]
        one.release()
    assert [one.pool.out - then for one, then in zip(group.nodes, before, strict=True)] == [-1, -1, 0]


@in_trio
def test_chunks_that_belong_to_no_part_are_protocol_errors():
    group = Group(3, 4_000)
    a, b, _ = group.nodes
    group.begin()
    theirs, own, another = member_slices(4_000, 3)
    link, right = b.links[a.me], Chunk(SESSION, own.start, 1024, 0)
    assert len(begin_chunk(b, a, own.start)) == 4096
    for chunk in (
        dataclasses.replace(right, start=another.start),
        dataclasses.replace(right, start=own.start + ALIGN),  # A chunk out of order.
        dataclasses.replace(right, start=4_000),
        dataclasses.replace(right, elements=own.stop - own.start + 1),
        dataclasses.replace(right, start=theirs.start, elements=theirs.stop - theirs.start + 1),
    ):
        with pytest.raises(ProtocolError):
            b.gathers.buffer_for(b.transfer, link, chunk, 4 * chunk.elements)
    with pytest.raises(ProtocolError):
        b.gathers.buffer_for(b.transfer, End(PeerId(b"s" * 16)), right, 4096)


@in_trio
def test_early_chunks_take_no_more_than_a_vector():
    one, other = Group(2, 4_000).nodes
    for number in range(3):  # 12,288 of 16,000 bytes
        begin_chunk(one, other, 1024 * number)
    with pytest.raises(ProtocolError, match="early"):
        begin_chunk(one, other, 3072)
    one.release()
    assert not one.transfer.early


@in_trio
def test_one_member_that_sends_too_much_early_costs_the_others_nothing():
    """Once, such a member used up the room of all, and the next honest chunk ended an honest link."""
    one, liar, honest, _ = Group(4, 8_000).nodes
    for number in range(6):
        begin_chunk(one, liar, 1024 * number)
    begin_chunk(one, honest, 0)
    assert begin_chunk(one, honest, 1024).nbytes == 4096
    assert one.links[liar.me].is_closed
    assert not one.links[honest.me].is_closed
    assert one.transfer.early.chunks == 2
    assert one.transfer.early.bytes == 8192


@in_trio
def test_small_chunks_that_come_early_are_looked_at_one_by_one():
    """Searching all early chunks for each one takes minutes of the network thread."""
    group = Group(2, 1 << 22)
    one, other = group.nodes
    begun = time.process_time()
    for number in range(4_000):
        group.deliver(one, one.links[other.me], Chunk(SESSION, 1024 * number, 1024, 0), bytes(4096))
    assert one.transfer.early.chunks == 4_000
    assert len(one.transfer.early.filled_chunks()) == 4_000
    # It takes 0.02 s. Once, it took 2 s, and four times as much for twice as many.
    assert time.process_time() - begun < 5.0


@in_trio
def test_early_chunks_of_a_member_that_was_not_invited_end_its_link_alone():
    group = Group(3)
    one, _, stranger = group.nodes
    one.peer.exchanges.table[SESSION].invite_list = group.ids[:2]
    with pytest.raises(ProtocolError, match="invited"):
        begin_chunk(one, stranger, 0)
    assert not one.transfer.early


@in_trio
def test_early_chunks_are_kept_only_of_a_group_that_this_node_joined():
    one = Group(2).nodes[0]
    assert one.gathers.is_group(one.transfer)
    assert not one.gathers.is_group(LinkTransfer(SESSION + 1, trio.current_time))
    exchange = one.peer.exchanges.table[SESSION]
    exchange.is_initiator = True
    assert not one.gathers.is_group(one.transfer)
    exchange.is_initiator, exchange.state = False, State.PREPARING
    assert not one.gathers.is_group(one.transfer)


@in_trio
def test_early_chunks_that_fit_nowhere_end_their_link():
    group = Group(2, 4_000)
    a, b = group.nodes
    group.deliver(b, b.links[a.me], Chunk(SESSION, 512, 1024, 0), bytes(4096))
    group.begin(1)
    assert b.links[a.me].is_closed


@in_trio
def test_only_links_over_which_something_is_owed_have_stalled():
    group = Group(3, 4_000)
    a, b, c = group.nodes
    group.begin()
    now = trio.current_time()
    assert a.gathers.stalled_links(now + 1.0, 3.0) == []
    assert set(a.gathers.stalled_links(now + 4.0, 3.0)) == {a.links[b.me], a.links[c.me]}
    a.links[b.me].received_at = now + 2.0  # Bytes of an incomplete chunk arrive.
    assert a.gathers.stalled_links(now + 4.0, 3.0) == [a.links[c.me]]
    a.links[b.me].received_at = -math.inf
    while a.transfer.group.missing_values.get(1) is not None:
        group.deliver(a, a.links[b.me], *group.next_chunk(b, a))
    now = trio.current_time()
    assert a.gathers.stalled_links(now + 4.0, 3.0) == [a.links[c.me]]  # b's mean waits for c as well.


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@in_trio
def test_a_refused_mean_changes_nothing_and_its_owner_is_reported(value):
    group = Group(3, 4_000)
    for one in group.nodes:
        one.config = tuned(one.config, norm_bound=1e-9 if one is group.nodes[0] else 10.0)
    a, b, _ = group.nodes

    def lie(sender, to, chunk, body):
        own = member_slices(4_000, 3)[0]
        if sender is a and own.start <= chunk.start < own.stop:
            body = np.full(len(body) // 4, value, np.float32).tobytes()
            chunk = dataclasses.replace(chunk, checksum=xxhash.xxh3_64_intdigest(body))
        return chunk, body

    group.change = lie
    group.begin()
    group.run()
    kind, _, difference_sq, _, refused, absent, _ = b.said[0]
    assert (kind, refused, absent) == ("gathered", {a.me: "not-finite"}, [])
    result, where = b.transfer.group.difference.array, member_slices(4_000, 3)[0]
    assert not result[where].any()
    assert difference_sq == pytest.approx(float(np.sum(result.astype(np.float64) ** 2)), rel=1e-4)


@in_trio
def test_without_a_snapshot_nothing_begins():
    one = Group(2, 4_000).nodes[0]
    one.release()
    assert one.begin((one.me, PeerId(b"\x02" * 16)), "fp32") == "layout"
    assert one.pool.out == 0
