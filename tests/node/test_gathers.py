"""Group means on real links: all come to one vector, from our own layout's memory, or the group has failed."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trio
import xxhash
from torch import nn

from gossip.codecs import ALIGN, CODECS
from gossip.config import Config
from gossip.effects import Gather
from gossip.errors import ProtocolError
from gossip.exchange import Local, State
from gossip.filters import trimmed_mean
from gossip.frames import PREFIX_BYTES, decode
from gossip.gathering import slices
from gossip.ids import PeerId
from gossip.messages import Chunk
from node.boundary import VectorPool
from node.gathers import Gathers
from node.sessions import Sessions
from node.snapshot import ModelState

SESSION = 7
RAW = [name for name in CODECS if not CODECS[name].needs_spread]


class Pool(VectorPool):
    out = 0

    def take(self, parts, size=None):
        self.out += 1
        return super().take(parts, size)

    def give(self, vector):
        self.out -= vector.users == 1
        super().give(vector)


class End:
    """One end of a link; ``peer`` is who is at the other."""

    def __init__(self, peer):
        self.peer, self.bulk, self.closed = peer, {}, False

    def start_bulk(self, session, bulk):
        self.bulk[session] = bulk

    def stop_bulk(self, session):
        self.bulk.pop(session, None)

    def close_now(self):
        self.closed = True


class One:
    """A node without its network: what it was told is in ``said``."""

    def __init__(self, me, vector, config):
        self.me, self.vector, self.config, self.said = me, vector, config, []
        state = ModelState({"x": vector.copy()})
        self.pool, self.links = Pool(state), {}
        self.sessions = Sessions(self.pool)
        exchange = SimpleNamespace(state=State.OFFERED, initiator=False, optimizer_keys=())
        self.peer = SimpleNamespace(
            exchanges=SimpleNamespace(table={SESSION: exchange}),
            local=Local("", vector.size, 0),
            gathered=lambda *what: self.said.append(("gathered", *what)) or [],
            failed=lambda *what: self.said.append(("failed", *what)) or [],
        )
        self.tasks = []
        newest = SimpleNamespace(newest=lambda peer: self.links.get(peer))
        self.gathers = Gathers(
            self.peer, config, self.pool, newest, self.sessions, lambda effects: None,
            lambda task, *arguments: self.tasks.append((task, arguments)),
        )  # fmt: skip
        snapshot = self.pool.take("weights")
        snapshot.array[:] = vector
        self.sessions.snapshots[SESSION] = snapshot

    def begin(self, members, codec):
        effect = Gather(SESSION, members, members.index(self.me), False, codec, 10.0)
        return self.gathers.gather(effect, self.vector.size)

    def release(self):
        self.gathers.release(SESSION)
        self.sessions.release(SESSION)


class Group:
    """Nodes and links between all of them; ``pump`` moves one chunk over one link, in an order of its own."""

    def __init__(self, members=3, elements=5_000, codec="fp32", seed=0, **changes):
        config = Config(mixing="group", **{"chunk_elements": 1024, **changes})
        self.ids = tuple(PeerId(bytes([k + 1]) * 16) for k in range(members))
        self.codec, self.rng = codec, random.Random(seed)
        vectors = np.random.default_rng(seed).normal(size=(members, elements)).astype(np.float32)
        self.nodes = [One(me, vector, config) for me, vector in zip(self.ids, vectors, strict=True)]
        for a in self.nodes:
            for b in self.nodes:
                if a is not b:
                    a.links[b.me] = End(b.me)
        self.change = lambda sender, to, chunk, body: (chunk, body)

    def begin(self, *which):
        for k in which or range(len(self.nodes)):
            assert self.nodes[k].begin(self.ids, self.codec)

    def ways(self):
        return [
            (a, b) for a in self.nodes for b in self.nodes
            if a is not b and a.links[b.me].bulk and not b.links[a.me].closed
        ]  # fmt: skip

    def pump(self):
        """False when nothing is left to send."""
        ways = self.ways()
        if not ways:
            return False
        a, b = self.rng.choice(ways)
        end = a.links[b.me]
        session, bulk = end.bulk.popitem()
        frame = bulk.next_frame()
        if frame is None:
            return True
        end.bulk[session] = bulk
        header, body = frame
        self.deliver(b, b.links[a.me], *self.change(a, b, decode(header[PREFIX_BYTES:], len(body)), bytes(body)))
        return True

    @staticmethod
    def deliver(node, link, chunk, body):
        node.gathers.place(link, chunk, len(body))[:] = body
        node.gathers.arrived(link, chunk)

    def run(self):
        while self.pump():
            pass

    def expected(self, trim=0):
        """mean - Q(ours) of each, straight from what the parts are."""
        code, size = CODECS[self.codec], self.nodes[0].vector.size

        def through(values, start=0):
            out = values.copy()
            if not code.raw:
                code.quantised(values, out, SESSION, start)
            return out

        ours = np.stack([through(node.vector) for node in self.nodes])
        mean = np.concatenate([through(trimmed_mean(ours[:, c], trim), c.start) for c in slices(size, len(ours))])
        return mean - ours

    def differences(self):
        return np.stack([node.sessions.table[SESSION].difference.array for node in self.nodes])


def in_trio(what):
    async def main():
        what()

    trio.run(main)


@pytest.mark.parametrize("codec", RAW)
@pytest.mark.parametrize(("members", "elements"), [(2, 5_000), (3, 2_500), (5, 40_001), (4, 300), (16, 20_000), (3, 1)])
def test_all_come_to_the_mean_of_what_all_decode_bit_for_bit(codec, members, elements):
    def check():
        group = Group(members, elements, codec, seed=members)
        group.begin()
        group.run()
        assert np.array_equal(group.differences(), group.expected())
        for one, difference in zip(group.nodes, group.expected(), strict=True):
            ((kind, session, difference_sq, own_sq, refused, _),) = one.said
            assert (kind, session, refused) == ("gathered", SESSION, [])
            assert difference_sq == pytest.approx(float(np.sum(difference.astype(np.float64) ** 2)), rel=1e-4)
            assert own_sq == pytest.approx(float(np.sum(one.vector.astype(np.float64) ** 2)), rel=0.2)

    in_trio(check)


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_before_a_group_began_here_waits_for_it(seed):
    def check():
        group = Group(4, 9_000, "int8", seed)
        early = 0
        for k in group.rng.sample(range(4), 4):
            group.begin(k)
            for _ in range(group.rng.randrange(1, 12)):
                group.pump()
                early += sum(len(kept) for one in group.nodes for kept in one.gathers.early.values())
        assert early
        group.run()
        assert np.array_equal(group.differences(), group.expected())
        assert not any(one.gathers.early for one in group.nodes)

    in_trio(check)


def test_a_body_that_was_on_its_way_when_the_group_began_is_used_once_it_is_filled():
    def check():
        group = Group(2, 3_000)
        a, b = group.nodes
        group.begin(0)
        sent = []
        group.change = lambda sender, to, chunk, body: sent.append((chunk, body)) or (chunk, body)
        header, body = a.links[b.me].bulk[SESSION].next_frame()
        chunk = decode(header[PREFIX_BYTES:], len(body))
        place = b.gathers.place(b.links[a.me], chunk, len(body))
        group.begin(1)
        place[:] = bytes(body)
        b.gathers.arrived(b.links[a.me], chunk)
        group.run()
        assert np.array_equal(group.differences(), group.expected())
        assert chunk.start + chunk.elements == sent[0][0].start or sent[0][0].start == 0

    in_trio(check)


def test_streams_to_a_member_begin_when_there_is_a_link():
    def check():
        group = Group(3, 4_000)
        a, _, c = group.nodes
        ends = a.links.pop(c.me), c.links.pop(a.me)
        group.begin()
        while any(one.links.get(other.me) and one.links[other.me].bulk for one in group.nodes for other in group.nodes):
            group.ways = lambda: [
                (x, y) for x in group.nodes for y in group.nodes
                if x is not y and y.me in x.links and x.links[y.me].bulk
            ]  # fmt: skip
            group.pump()
        assert not any(one.said for one in group.nodes)
        a.links[c.me], c.links[a.me] = ends
        group.begin()
        group.run()
        assert np.array_equal(group.differences(), group.expected())

    in_trio(check)


def test_a_large_slice_is_averaged_beside_and_comes_to_the_same(monkeypatch):
    monkeypatch.setattr("node.gathers.INLINE_ELEMENTS", 0)
    group = Group(3, 9_000, "bf16", filter="trimmed")

    async def main():
        group.begin()
        group.run()
        for one in group.nodes:
            ((task, arguments),) = one.tasks
            await task(*arguments)
        group.run()

    trio.run(main)
    assert np.array_equal(group.differences(), group.expected(trim=1))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5, 15, 25, 1000])
def test_whenever_a_group_ends_its_buffers_go_back(after, beside, monkeypatch):
    if beside:
        monkeypatch.setattr("node.gathers.INLINE_ELEMENTS", 0)
    group = Group(3, 9_000, "int8")

    async def main():
        group.begin()
        for _ in range(after):
            group.pump()
        for one in group.nodes:
            one.release()
            one.release()
        for one in group.nodes:
            for task, arguments in one.tasks:
                await task(*arguments)

    trio.run(main)
    assert [one.pool.out for one in group.nodes] == [0, 0, 0]
    assert not any(end.bulk for one in group.nodes for end in one.links.values())
    assert not any(one.gathers.table or one.gathers.early for one in group.nodes)


def test_a_buffer_that_a_link_still_fills_is_not_used_again():
    def check():
        group = Group(2, 3_000)
        a, b = group.nodes
        group.begin()
        header, body = a.links[b.me].bulk[SESSION].next_frame()
        b.gathers.place(b.links[a.me], decode(header[PREFIX_BYTES:], len(body)), len(body))
        b.release()
        assert b.pool.out == 1

    in_trio(check)


def test_a_flipped_bit_costs_the_link_and_nothing_is_reported():
    def check():
        group = Group(3, 4_000)
        a, b, _ = group.nodes

        def flip(sender, to, chunk, body):
            return chunk, (body[:-1] + bytes([body[-1] ^ 1]) if (sender, to) == (a, b) else body)

        group.change = flip
        group.begin()
        group.run()
        assert b.links[a.me].closed
        assert not b.said
        b.gathers.unlinked(b.links[a.me])
        assert [what[:3] for what in b.said] == [("failed", SESSION, "broken")]

    in_trio(check)


def test_chunks_that_belong_to_no_part_are_protocol_errors():
    def check():
        group = Group(3, 4_000)
        a, b, _ = group.nodes
        group.begin()
        own, theirs = slices(4_000, 3)[1], slices(4_000, 3)[0]
        link = b.links[a.me]
        right = Chunk(SESSION, own.start, 1024, 0)
        assert len(b.gathers.place(link, right, 4096)) == 4096
        for chunk in (
            dataclasses.replace(right, start=slices(4_000, 3)[2].start),  # the slice of another
            dataclasses.replace(right, start=own.start + ALIGN),  # out of order
            dataclasses.replace(right, start=4_000),
            dataclasses.replace(right, elements=own.stop - own.start + 1),
            dataclasses.replace(right, start=theirs.start, elements=theirs.stop - theirs.start + 1),
        ):
            with pytest.raises(ProtocolError):
                b.gathers.place(link, chunk, 4 * chunk.elements)
        with pytest.raises(ProtocolError):
            b.gathers.place(End(PeerId(b"s" * 16)), right, 4096)

    in_trio(check)


def test_what_is_kept_of_what_comes_early_is_no_more_than_a_vector():
    def check():
        one = Group(2, 4_000).nodes[0]
        link = one.links[PeerId(b"\x02" * 16)]
        for number in range(3):  # 12,288 of 16,000 bytes
            one.gathers.place(link, Chunk(SESSION, 1024 * number, 1024, 0), 4096)
        with pytest.raises(ProtocolError, match="early"):
            one.gathers.place(link, Chunk(SESSION, 3072, 1024, 0), 4096)
        one.gathers.release(SESSION)
        assert not one.gathers.early

    in_trio(check)


def test_early_chunks_are_kept_only_of_a_group_that_this_node_joined():
    def check():
        one = Group(2).nodes[0]
        assert one.gathers.expects(SESSION)
        assert not one.gathers.expects(SESSION + 1)
        exchange = one.peer.exchanges.table[SESSION]
        exchange.initiator = True
        assert not one.gathers.expects(SESSION)
        exchange.initiator, exchange.state = False, State.PREPARING
        assert not one.gathers.expects(SESSION)

    in_trio(check)


def test_early_chunks_that_fit_nowhere_end_their_link():
    def check():
        group = Group(2, 4_000)
        a, b = group.nodes
        group.deliver(b, b.links[a.me], Chunk(SESSION, 512, 1024, 0), bytes(4096))
        group.begin(1)
        assert b.links[a.me].closed

    in_trio(check)


def test_only_links_over_which_something_is_owed_have_stalled():
    def check():
        group = Group(3, 4_000)
        a, b, c = group.nodes
        group.begin()
        now = trio.current_time()
        assert a.gathers.stalled(now + 1.0, 3.0) == []
        assert set(a.gathers.stalled(now + 4.0, 3.0)) == {a.links[b.me], a.links[c.me]}
        while b.links[a.me].bulk and a.gathers.table[SESSION].missing.get(1) is not None:
            header, body = b.links[a.me].bulk[SESSION].next_frame()
            group.deliver(a, a.links[b.me], decode(header[PREFIX_BYTES:], len(body)), bytes(body))
        now = trio.current_time()
        assert a.gathers.stalled(now + 4.0, 3.0) == [a.links[c.me]]  # b's mean waits for c as well

    in_trio(check)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_mean_that_nobody_may_take_is_reported_with_its_owner(value):
    def check():
        group = Group(3, 4_000)
        for one in group.nodes:
            one.config = dataclasses.replace(one.config, norm_bound=1e-9 if one is group.nodes[0] else 10.0)
        a, b, _ = group.nodes

        def lie(sender, to, chunk, body):
            own = slices(4_000, 3)[0]
            if sender is a and own.start <= chunk.start < own.stop:
                body = np.full(len(body) // 4, value, np.float32).tobytes()
                chunk = dataclasses.replace(chunk, checksum=checksum(body))
            return chunk, body

        group.change = lie
        group.begin()
        group.run()
        kind, _, difference_sq, _, refused, _ = b.said[0]
        assert kind == "gathered"
        assert not difference_sq < 1e50
        assert refused == [a.me]

    in_trio(check)


def checksum(body):
    return xxhash.xxh3_64_intdigest(body)


def test_without_a_snapshot_nothing_begins():
    def check():
        one = Group(2, 4_000).nodes[0]
        one.release()
        assert not one.begin((one.me, PeerId(b"\x02" * 16)), "fp32")
        assert one.pool.out == 0

    in_trio(check)


# -- real nodes ------------------------------------------------------------------------------------------------------
def linear(value):
    model = nn.Linear(40, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def mixed(nodes, times):
    """Counts from now."""
    before = [one.node.metrics().exchanges_done for one in nodes]
    return lambda: all(one.node.metrics().exchanges_done > b + times for one, b in zip(nodes, before, strict=True))


@pytest.mark.parametrize("changes", [{}, {"codec": "int8"}, {"group_size": 3, "filter": "trimmed"}])
def test_nodes_average_as_groups_over_sockets(train, until, quick, changes):
    config = dataclasses.replace(quick, mixing="group", **changes)
    models = [linear(0.0) for _ in range(4)]
    nodes = [train(models[0], config=config)]
    nodes += [train(model, config=config, seeds=[nodes[0].node.address]) for model in models[1:]]
    until(lambda: all(one.node.metrics().members_alive == 4 for one in nodes))
    for number, (one, model) in enumerate(zip(nodes, models, strict=True)):
        one.do(lambda _, model=model, number=number: [p.data.add_(float(number)) for p in model.parameters()])
    until(mixed(nodes, 8))
    both = zip(nodes, models, strict=True)
    flat = [one.do(lambda _, model=model: model.weight.detach().clone()) for one, model in both]
    spread = max(float((a - b).abs().max()) for a in flat for b in flat)
    assert spread < 0.05
    assert 0.0 < float(flat[0].mean()) < 3.0
    if changes == {}:
        assert float(flat[0].mean()) == pytest.approx(1.5, abs=0.1)
        assert spread < 1e-5
    assert sum(one.node.metrics().exchanges_failed for one in nodes) == 0


def test_a_group_goes_on_when_a_node_goes(train, until, quick):
    config = dataclasses.replace(quick, mixing="group", group_size=0)
    nodes = [train(linear(0.0), config=config)]
    nodes += [train(linear(0.0), config=config, seeds=[nodes[0].node.address]) for _ in range(2)]
    until(lambda: all(one.node.metrics().exchanges_done > 5 for one in nodes))
    nodes[0].stop()
    until(mixed(nodes[1:], 5))


def test_the_optimizers_state_goes_along_where_it_is_averaged(train, until, quick):
    config = dataclasses.replace(quick, mixing="group", average_optimizer=True)
    models = [linear(0.0) for _ in range(3)]
    adams = [torch.optim.Adam(model.parameters()) for model in models]
    for model, adam in zip(models, adams, strict=True):
        model(torch.ones(1, 40)).sum().backward()
        adam.step()
    nodes = [train(models[0], adams[0], config=config)]
    for model, adam in zip(models[1:], adams[1:], strict=True):
        nodes.append(train(model, adam, config=config, seeds=[nodes[0].node.address]))
    until(lambda: all(one.node.metrics().members_alive == 3 for one in nodes))
    for number, (one, model, adam) in enumerate(zip(nodes, models, adams, strict=True)):
        one.do(lambda _, m=model, o=adam, k=number: o.state[m.weight]["exp_avg"].fill_(float(k)))

    def moments():
        return [float(adam.state[model.weight]["exp_avg"].mean()) for model, adam in zip(models, adams, strict=True)]

    until(lambda: np.ptp(moments()) < 1e-4)
    assert moments()[0] == pytest.approx(1.0, abs=0.1)
