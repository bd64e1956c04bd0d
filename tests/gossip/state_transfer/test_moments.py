"""After a mix, each side fetches a part of its partner's moments; a failure needs no answer and delays no exchange."""

from dataclasses import replace

import pytest

from gossip.arithmetic.moments import MomentForm
from gossip.effects import CopyMoments, MixMoments, ReceiveMoments, Release, Send, SendMoments
from gossip.exchange.session import Local
from gossip.ids import short
from gossip.state_transfer.moments import MAX_SERVED, MOMENTS, MomentMixing
from gossip.wire.messages import Abort, Busy, Fetch, Refuse, Serving
from tests.gossip.state_transfer.taker import CONFIG, DONORS, RUN_ID, A, B

FORM = MomentForm(("exp_avg", "exp_avg_sq"), ("first", "second"), 10_000)
STREAM_S = 3_600.0  # Longer than any deadline of a part.


def member(form: MomentForm | None = FORM, **fields) -> MomentMixing:
    numbers = iter(range(1, 10_000))
    fields = {"run_id": RUN_ID, "version": 2.0, "ready": True, "steps_per_mix": 8} | fields
    mixing = MomentMixing(Local("f", 10_000, 10_000, **fields), CONFIG, lambda: next(numbers))
    mixing.set_form(form)
    return mixing


def fetching() -> MomentMixing:
    """Return the mixing of a member that has asked A for a part of its moments, in session 1."""
    mixing = member()
    mixing.on_mixed(A, 0.0)
    return mixing


def fetch_of(mixing: MomentMixing) -> tuple[int, int, int]:
    """Return the session and the range of the part that is being fetched."""
    ((session, part),) = mixing.fetched.items()
    return session, part.start, part.stop


def test_after_a_mix_a_part_of_the_partners_moments_is_fetched_and_mixed():
    mixing = member()
    receive, send = mixing.on_mixed(A, 0.0)
    assert receive == ReceiveMoments(1, A, FORM, 0, receive.stop)
    assert send == Send(A, Fetch(1, FORM.names, 0, receive.stop, "fs"))
    assert mixing.on_serving(A, Serving(1, 2.0, RUN_ID, FORM.names, ())) == []
    assert mixing.on_moments(1) == [MixMoments(1), Release(1)]
    assert mixing.mixed_count == 1
    assert not mixing.fetched


def test_the_parts_follow_one_another_and_cover_all_elements_within_the_period():
    mixing, ranges = member(), []
    while not ranges or ranges[-1][1] < FORM.elements:
        mixing.on_mixed(A, 0.0)
        session, start, stop = fetch_of(mixing)
        ranges.append((start, stop))
        mixing.on_moments(session)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert len(ranges) * 8 <= FORM.period_steps + 8
    mixing.on_mixed(A, 0.0)
    assert fetch_of(mixing)[1:] == ranges[0]  # From the beginning again.


@pytest.mark.parametrize("state", ["settling", "paused", "not ready", "no moments", "fetching"])
def test_nothing_is_fetched_while_it_cannot_be_mixed(state):
    fields = {"settling": {"settling": True}, "paused": {"paused": True}, "not ready": {"ready": False}}.get(state, {})
    mixing = member(None if state == "no moments" else FORM, **fields)
    if state == "fetching":
        mixing.on_mixed(B, 0.0)
    assert mixing.on_mixed(A, 0.0) == []


def test_a_member_with_other_moments_is_asked_once_and_the_user_is_told_once():
    mixing = fetching()
    release, notice = mixing.on_refused(A, 1, MOMENTS)
    assert release == Release(1)
    assert notice.sentence.startswith(f"The optimizer of this node has exp_avg, exp_avg_sq, and that of {short(A)} has")
    assert mixing.on_mixed(A, 0.0) == []
    assert mixing.on_mixed(B, 0.0) != []
    assert mixing.on_refused(B, 2, MOMENTS) == [Release(2)]


@pytest.mark.parametrize("form", [None, MomentForm(("momentum_buffer",), ("plain",), 10_000)])
def test_a_member_that_asks_for_other_moments_is_refused_and_the_user_is_told_once(form):
    mixing = member(form, mixed_steps=8)
    refuse, notice = mixing.on_fetch(A, fetch(9), 0.0)
    assert refuse == Send(A, Refuse(9, MOMENTS))
    assert ("no moments that are mixed" if form is None else "momentum_buffer") in notice.sentence
    assert mixing.on_fetch(B, fetch(9), 0.0) == [Send(B, Refuse(9, MOMENTS))]


def test_a_node_before_its_first_step_is_asked_again():
    assert member(None).on_fetch(A, fetch(9), 0.0) == [Send(A, Busy(9))]


def test_who_has_switched_mixing_off_is_not_told():
    mixing = member(None, mixed_steps=8)
    mixing.config = replace(CONFIG, mix_state="off")
    assert mixing.on_fetch(A, fetch(9), 0.0) == [Send(A, Refuse(9, MOMENTS))]


def test_a_busy_member_is_asked_again():
    mixing = fetching()
    assert mixing.on_refused(A, 1) == [Release(1)]
    assert mixing.on_mixed(A, 0.0) != []


def test_moments_of_another_run_are_not_taken():
    mixing = fetching()
    assert mixing.on_serving(A, Serving(1, 2.0, b"x" * 16, FORM.names, ())) == [Send(A, Abort(1, MOMENTS)), Release(1)]
    assert mixing.on_moments(1) == []


def test_a_part_that_does_not_come_ends_and_the_next_one_may_come():
    mixing = fetching()
    assert mixing.deadline < STREAM_S
    assert mixing.tick(STREAM_S) == [Send(A, Abort(1, "ended")), Release(1)]
    assert mixing.on_mixed(B, STREAM_S) != []


def test_nobody_else_can_end_or_answer_a_fetch():
    mixing = fetching()
    assert mixing.on_refused(B, 1, MOMENTS) == []
    assert mixing.on_serving(B, Serving(1, 2.0, b"x" * 16, FORM.names, ())) == []
    assert list(mixing.fetched) == [1]


def test_a_member_that_asks_gets_a_copy():
    mixing = member()
    assert mixing.on_fetch(A, Fetch(9, FORM.names, 256, 512, "fs"), 0.0) == [CopyMoments(9, FORM, 256, 512)]
    served = [Send(A, Serving(9, 2.0, RUN_ID, FORM.names, ())), SendMoments(9, A, FORM, 256, 512)]
    assert mixing.on_snapshotted(9) == served
    assert mixing.on_snapshotted(9) == []
    assert mixing.on_served(9) == [Release(9)]


@pytest.mark.parametrize(
    "fetch",
    [
        Fetch(9, ("exp_avg",), 0, 256, "f"),
        Fetch(9, FORM.names, 0, 256, "ff"),
        Fetch(9, ("momentum_buffer",), 0, 256, "p"),
    ],
)
def test_other_moments_are_refused(fetch):
    assert member().on_fetch(A, fetch, 0.0)[0] == Send(A, Refuse(9, MOMENTS))


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (6, 5), (9_900, 10_001), (0, 6_000), (0, 2**48)])
def test_a_range_that_is_not_there_or_too_long_is_refused(start, stop):
    assert member().on_fetch(A, Fetch(9, FORM.names, start, stop, "fs"), 0.0) == [Send(A, Refuse(9, "range"))]


def test_only_so_many_members_are_served_at_once():
    mixing = member()
    for number in range(MAX_SERVED):
        assert isinstance(mixing.on_fetch(DONORS[number], fetch(90 + number), 0.0)[0], CopyMoments)
    assert mixing.on_fetch(DONORS[-1], fetch(99), 0.0) == [Send(DONORS[-1], Busy(99))]
    assert mixing.on_unlinked(DONORS[0]) == [Release(90)]
    assert isinstance(mixing.on_fetch(DONORS[-1], fetch(99), 0.0)[0], CopyMoments)


def fetch(session: int) -> Fetch:
    return Fetch(session, FORM.names, 0, 256, "fs")


def test_an_idle_loop_serves_nobody():
    mixing = member()
    mixing.local.boundary_at = 0.0
    assert mixing.on_fetch(A, fetch(9), 10.0) == [Send(A, Busy(9))]


def test_new_weights_end_all_parts():
    mixing = fetching()
    mixing.on_fetch(B, fetch(9), 0.0)
    assert mixing.drop() == [Send(A, Abort(1, "ended")), Release(1), Send(B, Abort(9, "ended")), Release(9)]


def test_another_optimizer_ends_all_parts_and_asks_everyone_again():
    mixing = fetching()
    mixing.on_refused(A, 1, MOMENTS)
    mixing.on_mixed(B, 0.0)
    assert mixing.set_form(FORM) == []
    other = MomentForm(("momentum_buffer",), ("plain",), 10_000)
    assert mixing.set_form(other) == [Send(B, Abort(2, "ended")), Release(2)]
    assert mixing.on_mixed(A, 0.0) != []
