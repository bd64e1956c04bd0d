"""A newcomer's piece at a node's boundary: no snapshot of the weights, and in memory of its own."""

from __future__ import annotations

from gossip.config import Config
from gossip.effects import CopyPiece
from gossip.state_transfer.donating import ServedPiece
from gossip.wire.messages import Fetch
from tests.node.offline import ELEMENTS, OTHER, in_trio, runtime


def ignore(vector):
    """Do nothing when weights are adopted."""


@in_trio
def test_a_piece_for_a_newcomer_is_no_snapshot_of_the_weights():
    node = runtime(Config())
    averager = node.averager
    averager.boundary.request_snapshot(1)
    node.peer.donating.table.update(
        {session: ServedPiece(OTHER, Fetch(session, (), 0, 1), 1e9) for session in (1, 2, 3)}
    )
    moved = []
    averager.movement.measure = averager.movement.measure_sample = lambda values: moved.append(values.size) or 0.0
    averager.boundary.model.optimizer_range = lambda: range(ELEMENTS, ELEMENTS + 5)
    averager.boundary.model.begin_read_optimizer = lambda out, start: out.fill(7.0)
    averager.perform(CopyPiece(2, ELEMENTS, ELEMENTS + 5))
    averager.perform(CopyPiece(3, 0, 5))
    averager.use_copies(averager.boundary.visit(ignore))
    weights, state, piece = (averager.snapshots[session] for session in (1, 2, 3))
    assert piece.has_piece(0, 5)
    assert not piece.has_piece(0, 6)
    assert (state.start, state.array.tolist()) == (ELEMENTS, [7.0] * 5)
    assert state.has_piece(ELEMENTS + 1, ELEMENTS + 5)
    assert not state.has_piece(0, 5)
    assert not weights.has_piece(0, ELEMENTS + 1)
    assert node.streams.pool.newest is weights
    assert moved == [ELEMENTS], "how far local steps went is of the weights"


@in_trio
def test_no_boundary_pays_for_fresh_memory_for_a_newcomer():
    """Once, while exchanges had all the vectors, the copy went into untouched pages."""
    node = runtime(Config())
    averager, pool = node.averager, node.streams.pool
    node.peer.donating.table.update({session: ServedPiece(OTHER, Fetch(session, (), 0, 1), 1e9) for session in (1, 2)})
    taken = [pool.take() for _ in range(3)]
    averager.boundary.model.optimizer_range = lambda: range(ELEMENTS, ELEMENTS + 5)
    averager.boundary.model.begin_read_optimizer = lambda out, start: out.fill(7.0)
    averager.perform(CopyPiece(1, 3, 9))
    averager.perform(CopyPiece(2, ELEMENTS, ELEMENTS + 5))
    pool.allocate = None  # Any further allocation fails.
    averager.use_copies(averager.boundary.visit(ignore))
    assert averager.snapshots.keys() == {1, 2}
    assert all(averager.snapshots[1].array is not one.array for one in taken)
