"""Mixes of one node that overlap: how an averager treats snapshots taken while another exchange streams."""

import numpy as np
import pytest

from gossip.arithmetic.outer_step import BLOCK_ELEMENTS, OuterStep
from gossip.averaging.averager import Averager
from gossip.averaging.boundary import Boundary
from gossip.averaging.transfer import VectorTransfer
from gossip.config import Config
from gossip.effects import Mix, Transfer
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from tests.gossip.exchange.sides import B

SIZE = BLOCK_ELEMENTS + 3


class Peer:
    """A peer that knows every session: donations are those in ``given``, all others are exchanges."""

    elements = SIZE

    def __init__(self):
        self.given = set()
        self.view = self

    def needs_snapshot(self, session):
        return True

    def has_donation(self, session):
        return session in self.given

    def has_exchange(self, session):
        return session not in self.given

    def on_snapshotted(self, session, now, mass=0.0, moved=0.0):
        return []

    on_recalled = on_snapshotted


class Node:
    """A model, its averager, and a driver that runs jobs at once."""

    now = 0.0

    def __init__(self):
        self.model = ModelState({"x": np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)})
        self.pool, self.peer = VectorPool(self.model), Peer()
        self.boundary = Boundary(self.model, self.pool, KeptWeights(self.model))
        self.outer = OuterStep(SIZE, 0.5, 0.7)
        self.outer.reset(self.read())
        config = Config(outer_momentum=0.5, outer_rate=0.7, filter="none")
        self.averager = Averager(self.peer, config, self.boundary, self.pool, self.outer, self)

    def read(self):
        vector = np.empty(SIZE, np.float32)
        self.model.begin_read(vector)
        return vector

    def perform(self, effects):
        assert effects == []

    def new_transfer(self, session):
        return VectorTransfer(session)

    def call_soon(self, report, *arguments):
        report(*arguments)

    def run_job(self, job):
        job.run()
        job.finish()

    def visit(self):
        self.averager.use_copies(self.boundary.visit(self.averager.on_weights_replaced))

    def train(self, step):
        self.model.add(np.full(SIZE, step, np.float32))

    def begin(self, session):
        self.averager.request_copy(session)
        self.visit()

    def mix(self, session, theirs=None, weight=0.5):
        """Commit and mix an exchange; without ``theirs`` the partner has what this node has."""
        pair = self.averager.begin_pair(Transfer(session, B, "fp32"))
        pair.receive_whole(pair.decoded_ours.copy() if theirs is None else theirs)
        assert self.averager.mix(Mix(session, weight))
        self.averager.release(session)


def test_mixes_that_overlap_count_local_progress_once():
    node = Node()
    for session in range(3):
        node.train(1.0)
        node.begin(session)
    for session in range(3):
        node.mix(session)
    node.visit()
    in_turn = Node()
    for session in range(3):
        in_turn.train(1.0)
        in_turn.begin(session)
        in_turn.mix(session)
        in_turn.visit()
    np.testing.assert_allclose(node.read(), in_turn.read(), atol=1e-4)
    np.testing.assert_allclose(node.outer.state(), in_turn.outer.state(), atol=1e-4)


def test_one_that_ends_behind_a_newer_one_is_added_plainly():
    node = Node()
    for session in range(2):
        node.train(1.0)
        node.begin(session)
    node.mix(1)
    theirs = node.averager.snapshot_of(0).array + 2.0
    node.visit()
    before, (phi, momentum) = node.read(), map(np.copy, node.outer.state())
    node.mix(0, theirs)
    node.visit()
    np.testing.assert_allclose(node.read() - before, 1.0, atol=1e-5)
    np.testing.assert_allclose(node.outer.state()[0] - phi, 1.0, atol=1e-5)
    np.testing.assert_array_equal(node.outer.state()[1], momentum)


def test_the_outer_step_and_the_weights_stay_together_whatever_overlaps():
    """Without local steps phi equals the live vector, in whatever order exchanges begin and end."""
    random, node, flying = np.random.default_rng(2), Node(), []
    for session in range(200):
        node.begin(session)
        flying.append(session)
        while len(flying) > random.integers(0, 4):
            ended = flying.pop(random.integers(len(flying)))
            theirs = node.averager.snapshot_of(ended).array + random.standard_normal(SIZE).astype(np.float32)
            node.mix(ended, theirs, random.choice([0.5, 1 / 3, 0.25]))
        if random.random() < 0.5:
            node.visit()
    for session in flying:
        node.mix(session)
    node.visit()
    np.testing.assert_allclose(node.outer.state()[0], node.read(), atol=1e-3)


def test_exchanges_that_wanted_the_same_snapshot_overlap_as_well():
    node = Node()
    node.train(1.0)
    node.averager.request_copy(0)
    node.averager.request_copy(1)
    node.visit()
    assert node.averager.snapshot_of(0) is node.averager.snapshot_of(1)
    node.mix(0)
    node.mix(1)
    node.visit()
    alone = Node()
    alone.train(1.0)
    for session in range(2):
        alone.begin(session)
        alone.mix(session)
        alone.visit()
    np.testing.assert_allclose(node.read(), alone.read(), atol=1e-5)


@pytest.mark.parametrize("ends", ["mixed", "failed"])
def test_what_a_snapshot_lacks_is_given_back_with_it(ends):
    node = Node()
    for session in range(2):
        node.begin(session)
    node.mix(0)
    assert node.averager.snapshot_of(1).added_since is not None
    node.mix(1) if ends == "mixed" else node.averager.release(1)
    node.visit()
    assert len(node.pool.free_arrays[SIZE]) == 4


def test_what_a_newcomer_is_given_keeps_no_account_of_mixes():
    node = Node()
    node.peer.given.add(1)
    for session in range(2):
        node.begin(session)
    node.mix(0)
    assert node.averager.snapshot_of(1).added_since is None
