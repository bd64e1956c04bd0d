"""Groups with members that are late, break off or send refused vectors: they are left out and charged."""

import pytest

from gossip.effects import LeaveOut, Mix, Release, Send, Snapshot
from gossip.exchange.groups.group import MAX_WITHDRAWALS
from gossip.exchange.session import State
from gossip.wire.messages import Abort, Begin, Joined, Outcome, Settled
from tests.gossip.exchange.mates import A, B, C, D, Mates, gathering, groups, invite, inviting, take_part, verified
from tests.gossip.exchange.sides import PlayedExchanges


def test_the_inviter_goes_on_without_a_member_that_aborts() -> None:
    forming = inviting(State.OFFERED)
    assert forming.on_abort(C, 1, "checksum", 0.5) == []
    assert forming.on_joined(B, Joined(1, 2.0, "fp32"), 0.5)[0] == Send(B, Begin(1, (A, B), 2.0, "fp32"))
    assert forming.partners.benched == []
    streaming = inviting()
    assert streaming.on_abort(C, 1, "checksum", 0.5) == [LeaveOut(1, (C,), means=True)]
    verified = inviting(State.VERIFIED)
    verified.on_commit(B, 1, 0.4)
    assert verified.on_abort(C, 1, "checksum", 0.5)[-2:] == [Mix(1, 1.0), Release(1)]
    assert streaming.partners.shunned == verified.partners.shunned == [C]


@pytest.mark.parametrize("code", ["replaced", "late"])
def test_an_innocent_reason_of_an_abort_excuses_a_member_once(code: str) -> None:
    one = inviting()
    one.on_abort(C, 1, code, 0.5)
    assert one.partners.benched == []
    one.table[1].state = State.STREAMING
    one.on_abort(C, 1, code, 0.6)
    assert one.partners.shunned == [C]


def test_a_member_that_refuses_our_values_is_not_charged() -> None:
    one = inviting()
    one.on_abort(C, 1, "norm", 0.5)
    assert one.partners.benched == []


def test_a_group_that_all_others_leave_fails() -> None:
    one = inviting()
    one.on_abort(C, 1, "checksum", 0.5)
    assert one.on_abort(B, 1, "checksum", 0.6)[-1] == Release(1)
    assert (one.table, one.failures) == ({}, 1)
    assert one.on_outcome(B, 1, 0.7) == [Send(B, Settled(1, False))]


def learned(one: PlayedExchanges) -> PlayedExchanges:
    """Teach ``one`` that waits take a tenth of a second."""
    for waits in (one.answer_waits, one.stream_waits):
        for peer in (B, C, D, A):
            waits.add(peer, 0.1)
    return one


def test_no_step_of_a_group_waits_for_more_than_four_times_its_usual_time() -> None:
    one = learned(groups(A, Mates(B, C)))
    one.begin_mix(0.0)
    one.on_snapshotted(1, 0.0)
    one.on_joined(B, Joined(1, 4.0, "fp32"), 0.2)
    for now, expected in (
        (0.4, [Send(C, Abort(1, "late")), Send(B, Begin(1, (A, B), 3.0, "fp32"))]),
        (0.8, [LeaveOut(1, None, means=False)]),
        (1.2, [LeaveOut(1, None, means=True)]),
        (1.6, [Send(B, Abort(1, "deadline")), Release(1)]),
    ):
        assert one.deadline == pytest.approx(now)
        assert one.tick(one.deadline)[:2] == expected


def test_an_invited_member_waits_for_begin_and_for_the_outcome_no_longer() -> None:
    one = learned(groups(B, Mates()))
    one.on_invite(A, invite(7, B, C), 0.0)
    one.on_snapshotted(7, 0.0)
    assert one.tick(one.deadline) == [Send(A, Abort(7, "late")), Release(7)]
    assert (one.partners.benched, one.partners.shunned) == ([A], [])  # A is not shunned: one late group is forgiven
    again = learned(verified())
    again.table[7].stream_patience_s = 0.4
    again.table[7].state = State.STREAMING
    again.on_gathered(7, 1.0, 1.0, {}, [], 1.0)
    assert again.deadline == pytest.approx(2.6)
    assert again.tick(again.deadline) == [Send(A, Outcome(7))]


def test_waits_of_groups_that_somebody_was_late_for_are_not_learned_from() -> None:
    one = inviting()
    one.on_commit(B, 1, 8.0)
    one.on_gathered(1, 1.0, 1.0, {}, [C], 9.0)
    assert one.done_count == 1
    assert [*one.stream_waits.waits_s] == []
    assert [*one.answer_waits.waits_s] == [B]


def test_absent_members_are_charged_once_and_an_inviter_is_excused_once() -> None:
    one = inviting()
    one.on_gathered(1, 1.0, 1.0, {}, [C], 0.3)
    one.on_commit(B, 1, 0.4)
    assert (one.partners.benched, one.partners.shunned, one.mixed_partners) == ([C], [], [B])
    member = groups(B, Mates())
    for session in (7, 8):
        member.local.steps = 1_000 * session  # Intervals apart.
        take_part(member, session, 0.0, A)
        member.on_settled(A, Settled(session, True), 0.4)
    assert (member.partners.benched, member.partners.shunned) == ([A, A], [A])


def test_an_inviter_that_takes_back_one_invitation_after_another_is_declined() -> None:
    one = groups(B, Mates())
    for number in range(MAX_WITHDRAWALS + 1):
        assert one.partners.shunned == []
        assert one.on_invite(A, invite(7 + number, B, C), 0.0) == [Snapshot(7 + number)]
        one.on_abort(A, 7 + number, "late", 0.0)
    assert one.partners.shunned == [A]


def test_a_group_of_which_all_means_were_refused_fails_for_that_reason() -> None:
    assert gathering().on_gathered(7, 1.0, 1.0, {A: "norm", C: "norm"}, [], 0.3)[0] == Send(A, Abort(7, "norm"))
