"""Nodes without their network, and links that carry a chunk on command, for tests of group means."""

import math
import random
from types import SimpleNamespace

import numpy as np

from gossip.arithmetic.group_mean import member_slices, trimmed_mean
from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.averager import Averager
from gossip.averaging.boundary import Boundary
from gossip.codecs import CODECS
from gossip.effects import Gather, LeaveOut
from gossip.exchange.groups import group as exchange_group
from gossip.exchange.session import State
from gossip.ids import PeerId
from gossip.wire.frames import PREFIX_BYTES, decode
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.transfers import streams
from node.network.transfers.gathers import GroupTransfers
from node.network.transfers.transfer import LinkTransfer
from tests.harness.configs import tuned

SESSION = 7


class Pool(VectorPool):
    out = 0

    def take(self, elements=None):
        self.out += 1
        return super().take(elements)

    def give(self, vector):
        self.out -= vector.users == 1
        super().give(vector)


class End:
    """One end of a link to ``peer``."""

    received_at = sent_at = -math.inf

    def __init__(self, peer):
        self.peer, self.bulk, self.is_closed = peer, {}, False
        self.motion = SimpleNamespace(elements=1 << 20)

    def start_bulk(self, session, bulk):
        self.bulk[session] = bulk

    def stop_bulk(self, session, bulk):
        self.bulk.pop(session, None)
        bulk.let_go()

    def close_now(self):
        self.is_closed = True


class One:
    """A node without its network; ``said`` collects its reports."""

    def __init__(self, me, vector, config, members):
        self.me, self.vector, self.config, self.said = me, vector, config, []
        state = ModelState({"x": vector.copy()})
        self.pool, self.links = Pool(state), {}
        self.tasks = []
        exchange = exchange_group.Group(
            exchanges=None, session=SESSION, is_initiator=False, phase_began_at=0.0, timer_at=0.0, state=State.OFFERED,
            codec="fp32", inviter=members[0], invite_list=members,
        )  # fmt: skip
        self.peer = SimpleNamespace(
            exchanges=SimpleNamespace(table={SESSION: exchange}),
            view=SimpleNamespace(elements=vector.size),
            on_gathered=lambda *what: self.said.append(("gathered", *what)) or [],
            on_failed=lambda *what: self.said.append(("failed", *what)) or [],
        )
        driver = SimpleNamespace(
            now=0.0, perform=lambda effects: None, run_job=self.run_job,
            new_transfer=lambda session: LinkTransfer(session, lambda: 0.0),
        )  # fmt: skip
        boundary, outer = Boundary(state, self.pool, KeptWeights(state)), OuterStep(vector.size, 0.0, 1.0)
        self.averager = Averager(self.peer, config, boundary, self.pool, outer, driver)
        newest = SimpleNamespace(newest=lambda peer: self.links.get(peer))
        self.gathers = GroupTransfers(self.peer, config, self.averager, self.pool, newest)
        snapshot = self.pool.take()
        snapshot.array[:] = vector
        self.transfer = self.averager.open(SESSION)
        self.transfer.snapshot = snapshot

    def begin(self, members, codec):
        group = self.averager.begin_group(Gather(SESSION, members, members.index(self.me), codec))
        if not isinstance(group, str):
            self.gathers.stream_to_members(self.transfer, group)
        return group

    def leave_out(self, peers, means):
        group = self.averager.leave_out(LeaveOut(SESSION, None if peers is None else tuple(peers), means))
        self.gathers.go_on(self.transfer, group)

    def run_job(self, job):
        """Run a small job; leave a large one in ``tasks`` for the test."""
        if job.elements > streams.INLINE_ELEMENTS:
            self.tasks.append(job)
        else:
            job.run()
            job.finish()

    def release(self):
        self.transfer.end()
        self.averager.release(SESSION)


class Group:
    """Nodes with links between all of them; ``pump`` moves one chunk over a random link."""

    def __init__(self, members=3, elements=5_000, codec="fp32", seed=0, **changes):
        config = tuned(mixing="group", **{"chunk_elements": 1024, **changes})
        self.ids = tuple(PeerId(bytes([k + 1]) * 16) for k in range(members))
        self.codec, self.rng = codec, random.Random(seed)
        vectors = np.random.default_rng(seed).normal(size=(members, elements)).astype(np.float32)
        self.nodes = [One(me, vector, config, self.ids) for me, vector in zip(self.ids, vectors, strict=True)]
        for a in self.nodes:
            for b in self.nodes:
                if a is not b:
                    a.links[b.me] = End(b.me)
        self.change = lambda sender, to, chunk, body: (chunk, body)

    def begin(self, *which):
        for k in which or range(len(self.nodes)):
            assert self.nodes[k].begin(self.ids, self.codec)

    def ways(self):
        """Return the pairs of nodes that are linked, of which the first has something to send to the second."""
        return [
            (a, b) for a in self.nodes for b in self.nodes
            if b.me in a.links and a.links[b.me].bulk and not b.links[a.me].is_closed
        ]  # fmt: skip

    def pump(self):
        """Move one chunk; return False if none is left to send."""
        ways = self.ways()
        if not ways:
            return False
        a, b = self.rng.choice(ways)
        sent = self.next_chunk(a, b)
        if sent is not None:
            self.deliver(b, b.links[a.me], *self.change(a, b, *sent))
        return True

    @staticmethod
    def next_chunk(sender, to):
        """Return the next chunk from one node to another, and its body; None after the last."""
        bulk = sender.links[to.me].bulk
        frame = bulk[SESSION].next_frame()
        if frame is None:
            del bulk[SESSION]
            return None
        header, body = frame
        return decode(header[PREFIX_BYTES:], len(body)), bytes(body)

    @staticmethod
    def deliver(node, link, chunk, body):
        node.gathers.buffer_for(node.transfer, link, chunk, len(body))[:] = body
        node.gathers.on_body(node.transfer, link, chunk)

    def run_jobs(self):
        for node in self.nodes:
            for job in node.tasks:
                job.run()
                job.finish()

    def run(self):
        while self.pump():
            pass

    def expected(self, trim=0):
        """Return mean - Q(ours) of each node, computed from the definition."""
        code, size = CODECS[self.codec], self.nodes[0].vector.size

        def through(values, start=0):
            out = values.copy()
            if not code.is_raw:
                code.quantised(values, out, SESSION, start)
            return out

        ours = np.stack([through(node.vector) for node in self.nodes])
        mean = np.concatenate(
            [through(trimmed_mean(ours[:, c], trim), c.start) for c in member_slices(size, len(ours))]
        )
        return mean - ours

    def differences(self):
        return np.stack([node.transfer.group.difference.array for node in self.nodes])
