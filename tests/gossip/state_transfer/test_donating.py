"""A member with a run's weights gives them to newcomers within bounds, and says why where it does not."""

import pytest

from gossip.effects import CopyFrozen, CopyPiece, Release, Send, SendPiece, Snapshot, UseLastSnapshot
from gossip.exchange.session import Local
from gossip.state_transfer.donating import ASLEEP, MAX_SERVED, MIN_PIECES, PIECE_ELEMENTS, Donor, max_piece_elements
from gossip.wire.messages import Abort, Busy, Fetch, Refuse, Serving
from tests.gossip.state_transfer.taker import CONFIG, DONORS, RUN_ID, SIZE, A, B, C


def giver(**fields):
    fields = {"run_id": RUN_ID, "version": 2.0, "ready": True, "optimizer_keys": ("m",)} | fields
    return Donor(Local("f", SIZE, 500, **fields), CONFIG)


@pytest.mark.parametrize(
    "fetch",
    [
        Fetch(1, (), 5, 4),
        Fetch(1, (), 0, SIZE + 1),
        Fetch(1, ("m",), SIZE, SIZE + 501),
        Fetch(1, ("v",), 0, 10),
        Fetch(1, ("m",), SIZE - 1, SIZE + 1),
    ],
    ids=["backwards", "beyond", "beyond the state", "other state", "weights and state"],
)
def test_a_range_that_is_not_there_is_refused(fetch):
    assert giver().on_fetch(A, fetch, 0.0) == [Send(A, Refuse(1, "range"))]


@pytest.mark.parametrize("weights", [PIECE_ELEMENTS + 1, MIN_PIECES * (PIECE_ELEMENTS + 1)], ids=["some", "many"])
def test_of_a_large_model_a_newcomer_gets_a_piece_and_no_more_at_once(weights):
    """A larger piece would let a newcomer decide how much memory a donor holds for it."""
    local = Local("f", weights, weights, run_id=RUN_ID, ready=True, optimizer_keys=("m",))
    most = max_piece_elements(weights)
    assert most == max(PIECE_ELEMENTS, weights // MIN_PIECES)
    for start in (0, weights):
        donating = Donor(local, CONFIG)
        piece, more = Fetch(1, ("m",), start, start + most), Fetch(2, ("m",), start, start + most + 1)
        assert donating.on_fetch(A, piece, 0.0) == [CopyPiece(1, start, start + most)]
        assert donating.on_fetch(A, more, 0.0) == [Send(A, Refuse(2, "range"))]


def test_a_donor_that_is_not_ready_busy_or_asleep_says_so():
    assert giver(ready=False).on_fetch(A, Fetch(1, (), 0, 0), 0.0) == [Send(A, Refuse(1, "not-ready"))]
    donating = giver()
    for session in range(MAX_SERVED):
        assert donating.on_fetch(DONORS[session], Fetch(session, (), 0, 10), 0.0) == [Snapshot(session)]
    assert donating.on_fetch(C, Fetch(9, (), 0, 10), 0.0) == [Send(C, Busy(9))]
    donating = giver()
    assert donating.on_fetch(A, Fetch(1, ("m",), SIZE, SIZE + 10), 60.0) == [CopyPiece(1, SIZE, SIZE + 10)]
    assert donating.deadline == 60.0 + CONFIG.reply_timeout_s / 2, "before the newcomer gives its piece to another"
    assert donating.tick(donating.deadline) == [Send(A, Refuse(1, ASLEEP)), Release(1)]
    assert donating.table == {}


@pytest.mark.parametrize("stood_s", [60.0, 0.0], ids=["stands", "stops in the meantime"])
def test_who_stands_gives_an_earlier_snapshot_of_the_weights_and_one_only(stood_s):
    donating = giver()
    effects = donating.on_fetch(A, Fetch(1, ("m",), 0, SIZE), stood_s)
    if not stood_s:
        assert effects == [Snapshot(1)]
        assert donating.deadline == CONFIG.boundary_patience_s
        effects = donating.tick(donating.deadline)
    assert effects == [UseLastSnapshot(1)]
    assert donating.tick(stood_s + 3.0) == []
    given = [Send(A, Serving(1, 2.0, RUN_ID, ("m",), ())), SendPiece(1, A, 0, SIZE)]
    assert donating.on_snapshotted(1) == given
    assert donating.on_snapshotted(1) == [], "one of the next boundary comes too late"


def test_a_donor_gives_what_is_frozen_whether_it_stands_or_not_and_the_optimizers_state_behind_it_as_ever():
    donating = Donor(Local("f", SIZE, 500, 300, run_id=RUN_ID, ready=True, optimizer_keys=("m",)), CONFIG)
    state = SIZE + 300, SIZE + 800
    assert donating.on_fetch(A, Fetch(3, ("m",), *state), 60.0) == [CopyPiece(3, *state)]
    assert donating.tick(donating.deadline) == [Send(A, Refuse(3, ASLEEP)), Release(3)]
    assert donating.on_fetch(A, Fetch(1, ("m",), SIZE, SIZE + 300), 60.0) == [CopyFrozen(1, SIZE, SIZE + 300)]
    assert donating.tick(60.0 + CONFIG.reply_timeout_s / 2) == []
    given = [Send(A, Serving(1, 0.0, RUN_ID, ("m",), ())), SendPiece(1, A, SIZE, SIZE + 300)]
    assert donating.on_snapshotted(1) == given
    for start, stop in ((SIZE - 1, SIZE + 1), (SIZE + 299, SIZE + 301), (SIZE + 300, SIZE + 801)):
        assert donating.on_fetch(A, Fetch(2, ("m",), start, stop), 60.0) == [Send(A, Refuse(2, "range"))]


def test_a_piece_that_takes_too_long_frees_its_place_and_the_newcomer_hears_of_it():
    donating = giver()
    donating.on_fetch(A, Fetch(1, (), 0, 10), 0.0)
    donating.on_snapshotted(1)
    assert donating.tick(donating.deadline - 0.01) == []
    assert donating.tick(donating.deadline) == [Send(A, Abort(1, "ended")), Release(1)]
    assert donating.deadline == float("inf")
    donating.on_fetch(A, Fetch(2, (), 0, 10), 0.0)
    assert donating.on_unlinked(B) == []
    assert donating.on_unlinked(A) == [Release(2)]
