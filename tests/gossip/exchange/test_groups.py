"""One peer's rules for group means: invitations, the beginning, which messages count, and how each group ends."""

import pytest

from gossip.effects import Dial, LeaveOut, MemberState, Mix, Release, Send, Snapshot
from gossip.exchange.groups.group import MAX_DOUBTS
from gossip.exchange.session import MAX_GAP_ROUNDS, State
from gossip.ids import Address, Claim, PeerId
from gossip.wire.messages import Abort, Begin, Busy, Joined, Outcome, Refuse, Settled
from tests.gossip.exchange.mates import A, B, C, D, Mates, groups, invite, invited, inviting, take_part, verified
from tests.gossip.exchange.sides import PlayedExchanges


def test_a_busy_member_is_replaced_and_the_others_begin_without_who_stays_silent() -> None:
    one = inviting(State.OFFERED)
    one.partners.spare = [B, D]
    assert one.on_busy(C, 1, 0.2) == [Send(D, invite(1, B, D, version=2.0))]
    assert one.on_joined(B, Joined(1, 2.0, "fp32"), 0.2) == []
    late = one.tick(0.1 + one.config.reply_timeout_s)
    assert late[:2] == [Send(D, Abort(1, "late")), Send(B, Begin(1, (A, B), 2.0, "fp32"))]
    assert one.on_joined(D, Joined(1, 2.0, "fp32"), 5.2) == [Send(D, Abort(1, "late"))]
    assert one.partners.benched == []  # It had less time than the others.
    silent = inviting(State.OFFERED)
    silent.tick(0.1 + silent.config.reply_timeout_s)
    assert silent.partners.benched == [B, C]


def test_a_group_whose_last_members_values_are_late_counts_as_a_mix_and_hands_over_its_steps() -> None:
    one = inviting()
    one.local.steps = 5
    one.table[1].snapshot_steps = 5
    assert one.on_gathered(1, 1.0, 1.0, {}, [B], 0.3) == []
    one.on_commit(B, 1, 0.4)
    ended = one.tick(one.deadline)
    assert Mix(1, 1.0) in ended
    assert one.mixed_partners == [B, C]
    assert one.local.mixed_steps == 5


def test_a_member_with_other_terms_makes_room_for_a_substitute() -> None:
    one = inviting(State.OFFERED)
    one.partners.spare = [D]
    answer = one.on_joined(C, Joined(1, -1.0, "fp32"), 0.2)
    assert answer == [Send(C, Abort(1, "terms")), Send(D, invite(1, B, D, version=2.0))]
    assert one.partners.benched == [C]


def test_a_groups_streams_may_stand_still_as_long_as_a_pairs() -> None:
    """Before, streams had one second more than their bytes take, less than distant members need to dial each other."""
    one = inviting()
    begun_s = one.table[1].phase_began_at
    bytes_s = 8 * one.local.elements / (1e6 * one.config.slowest_rate_mb_s)
    assert one.deadline == pytest.approx(begun_s + bytes_s + one.config.stall_s)
    assert one.tick(one.deadline - 0.01) == []
    assert one.tick(one.deadline) == [LeaveOut(1, None, means=False)]


def test_with_nobody_there_is_no_group_and_no_failure() -> None:
    one = inviting(State.OFFERED)
    one.on_busy(B, 1, 0.2)
    assert one.on_refuse(C, 1, 0.2) == [Release(1)]
    assert (one.table, one.failures, one.has_given_up, one.partners.benched) == ({}, 0, True, [C])


@pytest.mark.parametrize(
    ("hidden", "invitees"), [((B, C), (B, D)), ((A, C), (B, D)), ((), (B, C, D))], ids=["both", "one is us", "none"]
)
def test_of_two_that_nobody_can_dial_one_alone_is_invited(
    hidden: tuple[PeerId, ...], invitees: tuple[PeerId, ...]
) -> None:
    one = groups(A, Mates(B, C, D, hidden=hidden))
    one.begin_mix(0.0)
    assert one.table[1].invite_list == invitees


def test_members_without_a_link_are_dialled_and_streamed_to_once_there_is_one() -> None:
    one = invited()
    one.partners.unlinked.add(C)
    begun = one.on_begin(A, Begin(7, (A, B, C), 3.0, "fp32"), 0.2)
    assert begun[0] == Dial(Address("10.0.0.1", 7703), C)
    again = one.on_linked(C, 0.5)
    assert again == [begun[1]]
    assert one.on_linked(D, 0.5) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"fingerprint": "other"}, "layout"), ({"run_id": b"o" * 16}, "run_id"), ({"codec": "none"}, "codec"),
     ({"codec": "moniqua4"}, "codec"), ({"version": -1.0}, "version"), ({"version": float("nan")}, "version")],
)  # fmt: skip
def test_an_invitation_that_cannot_work_is_refused(changes: dict[str, object], code: str) -> None:
    one = groups(B, Mates())
    assert one.on_invite(A, invite(7, B, **changes), 0.0) == [Send(A, Refuse(7, code))]


@pytest.mark.parametrize(
    "begin",
    [Begin(7, (A, C), 3.0, "fp32"), Begin(7, (B, A), 3.0, "fp32"), Begin(7, (B, C), 3.0, "fp32"),
     Begin(7, (B,), 3.0, "fp32"), Begin(7, (A, B), 3.0, "none"),
     Begin(7, (A, B, B), 3.0, "fp32"), Begin(7, (A, B), float("inf"), "fp32")],
)  # fmt: skip
def test_a_beginning_that_makes_no_sense_is_no_group(begin: Begin) -> None:
    one = invited()
    assert one.on_begin(A, begin, 0.2) == [Send(A, Abort(7, "terms")), Release(7)]
    assert one.table == {}


def test_who_is_invited_twice_stays_unless_the_two_inviters_invited_each_other() -> None:
    def invited_by(inviter: PeerId, *members: PeerId) -> PlayedExchanges:
        one = groups(D, Mates())
        one.on_invite(inviter, invite(7, *members), 0.0)
        return one

    assert invited_by(B, C, D).on_invite(A, invite(8, C, D), 0.0) == [Send(A, Busy(8))]
    leaves = invited_by(B, A, D)
    assert leaves.on_invite(A, invite(8, B, D), 0.0) == [Send(B, Busy(7)), Release(7), Snapshot(8)]
    joined = invited_by(B, A, D)
    joined.on_snapshotted(7, 0.1)
    assert joined.on_invite(A, invite(8, B, D), 0.2)[0] == Send(B, Abort(7, "late"))
    assert invited_by(A, B, D).on_invite(B, invite(8, A, D), 0.0) == [Send(B, Busy(8))]


def test_an_inviter_gives_way_while_it_prepares_and_then_to_a_smaller_id_that_it_invited() -> None:
    preparing = groups(B, Mates(C, D))
    preparing.begin_mix(0.0)
    assert preparing.on_invite(C, invite(7, B), 0.0) == [Release(1), Snapshot(7)]
    sent = groups(B, Mates(A, C))
    sent.begin_mix(0.0)
    sent.on_snapshotted(1, 0.1)
    assert sent.on_invite(C, invite(8, B), 0.2) == [Send(C, Busy(8))]
    left = sent.on_invite(A, invite(7, B), 0.2)
    assert sorted(left[:2], key=lambda send: send.to) == [Send(A, Abort(1, "late")), Send(C, Abort(1, "late"))]
    assert left[2:] == [Release(1), Snapshot(7)]
    assert sent.failures == 0


def test_who_has_committed_may_go() -> None:
    one = inviting(State.VERIFIED)
    one.on_commit(B, 1, 0.4)
    assert one.on_unlinked(B, 0.5) == []
    assert one.on_abort(B, 1, "late", 0.5) == []
    assert one.on_commit(C, 1, 0.6)[-2:] == [Mix(1, 1.0), Release(1)]
    assert one.on_outcome(B, 1, 0.7) == [Send(B, Settled(1, True))]


@pytest.mark.parametrize("doubts", [False, True], ids=["before it asks", "in doubt"])
def test_the_inviters_word_alone_says_how_a_group_ended(doubts: bool) -> None:
    """If members believed other members' answers, some could mix and others not."""
    one = verified()
    if doubts:
        assert one.on_unlinked(A, 1.0) == [Send(A, Outcome(7))]
    for committed in (False, True):
        assert one.on_settled(C, Settled(7, committed), 1.1) == []
        assert one.on_settled(D, Settled(7, committed), 1.1) == []
    assert one.on_settled(A, Settled(7, True), 1.2) == [Mix(7, 1.0), Release(7)]
    other = verified()
    other.on_unlinked(A, 1.0)
    assert other.on_settled(A, Settled(7, False), 1.1) == [Release(7)]
    assert (other.done_count, other.failures) == (0, 1)


def test_doubt_lasts_from_when_the_inviter_must_have_decided() -> None:
    one = verified()
    decided = one.table[7].timer_at
    one.on_unlinked(A, 1.0)
    assert one.tick(decided + one.config.internal.doubt_s - 0.1)[0] == Send(A, Outcome(7))
    assert one.tick(decided + one.config.internal.doubt_s + 1.0) == [Release(7)]


def test_who_remembers_nothing_of_a_group_proves_nothing() -> None:
    assert groups(A, Mates()).on_outcome(B, 7, 0.0) == []


def test_doubts_about_groups_are_few_and_the_oldest_is_dropped_for_another() -> None:
    one = groups(B, Mates())
    for session in range(MAX_DOUBTS + 2):
        now = one.local.boundary_at = float(session)
        take_part(one, session, now)
        ended = one.on_unlinked(A, now + 0.5)
        assert ended[-1:] == [Send(A, Outcome(session))]
        assert (Release(session - MAX_DOUBTS) in ended) == (session >= MAX_DOUBTS)
        assert len(one.table) == min(session + 1, MAX_DOUBTS)


def test_a_groups_version_is_a_claim_of_its_inviter() -> None:
    one = verified()
    one.table[7].mean_version = 2.0**53 - 1
    one.on_settled(A, Settled(7, True), 1.0)
    assert one.local.version == 2.0 + MAX_GAP_ROUNDS


def test_in_doubt_about_one_group_the_next_may_begin() -> None:
    one = verified()
    one.on_unlinked(A, 1.0)
    one.partners.mates = [C]
    assert one.begin_mix(1.1) == [Snapshot(1)]
    assert one.on_invite(C, invite(9, B), 1.2) == [Release(1), Snapshot(9)]


FIVE = tuple(PeerId(bytes([n]) * 16) for n in range(1, 6))


@pytest.mark.parametrize(
    ("members", "others", "plain"),
    [((A, B), True, True), ((A, B), False, False), (FIVE, True, False)],
    ids=["two of many", "two that are all", "five, enough for the momentum of DiLoCo"],
)
def test_a_group_too_small_for_its_momentum_mixes_plainly_unless_it_is_everybody(members, others, plain) -> None:
    one = verified(members, others, group_size=0, outer_momentum=0.9, outer_rate=0.7)
    assert one.on_settled(A, Settled(7, True), 0.4) == [Mix(7, 1.0, plain=plain), Release(7)]


def test_a_member_held_dead_is_not_waited_for() -> None:
    states = {B: MemberState.SUSPECT, C: MemberState.ALIVE}
    one = inviting(State.OFFERED)
    assert one.leave_lost_members(states.get, 0.2) == []
    assert [*one.table[1].pending_peers] == [C]
    begun = inviting()
    assert begun.leave_lost_members(states.get, 0.3) == []  # a suspicion may pass
    states[B] = MemberState.DEAD
    assert begun.leave_lost_members(states.get, 0.4) == [LeaveOut(1, (B,), means=True)]


def test_weights_that_are_replaced_end_every_group_with_a_word() -> None:
    assert Send(B, Abort(1, "replaced")) in inviting().abandon()
    assert Send(B, Abort(1, "late")) in inviting(State.OFFERED).abandon()
    assert invited().abandon() == [Send(A, Abort(7, "late")), Release(7)]
    assert verified().abandon() == [Release(7)]  # it counts as one that mixed


def test_a_group_counts_members_by_those_that_meet_most_others() -> None:
    one = inviting(State.OFFERED)
    met = one.table[1].our_claim.members
    one.on_joined(B, Joined(1, 4.0, "fp32", Claim(0, 0, met + 3)), 0.2)
    begun = one.on_joined(C, Joined(1, 6.0, "fp32", Claim(0, 0, met + 3)), 0.2)
    assert begun[0].message.progress.members == met + 3, "an inviter without an address meets fewer"
