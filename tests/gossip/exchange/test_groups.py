"""One peer's rules for group means: who is invited, who begins, who believes whom, and how each group ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from gossip.config import Config
from gossip.effects import Dial, Gather, LeaveOut, MemberState, Mix, Release, Send, Snapshot
from gossip.exchange import reservation
from gossip.exchange.groups.group import MAX_DOUBTS, MAX_WITHDRAWALS
from gossip.exchange.session import MAX_GAP_ROUNDS, Local, State
from gossip.ids import Address, Claim, PeerId
from gossip.wire.messages import Abort, Begin, Busy, Commit, Invite, Joined, Outcome, Refuse, Settled
from tests.gossip.exchange.sides import PlayedExchanges

A, B, C, D = (PeerId(bytes([n]) * 16) for n in (1, 2, 3, 4))


class Mates:
    """Whoever is asked for, all within reach."""

    def __init__(self, *group: PeerId, spare: tuple[PeerId, ...] = (), hidden: tuple[PeerId, ...] = ()) -> None:
        self.mixes, self.mates, self.spare, self.hidden = 0, list(group), list(spare), hidden
        self.benched: list[PeerId] = []
        self.shunned: list[PeerId] = []  # Those of them whose invitations are declined too.
        self.unlinked: set[PeerId] = set()
        self.others = False

    def group(self, now: float) -> list[PeerId]:
        return self.mates

    def choose(self, asked: set[PeerId], now: float) -> PeerId | None:
        return next((peer for peer in self.spare if peer not in asked), None)

    def note_failure(self, partner: PeerId, now: float, silent: bool = False) -> None:
        self.benched.append(partner)
        if not silent:
            self.shunned.append(partner)

    def is_declined(self, sender: PeerId, now: float, forgives: bool = True) -> bool:
        return False

    def has_others(self, peers: Collection[PeerId]) -> bool:
        return self.others

    def note_mix(self, partner: PeerId, now: float) -> None:
        """Who had invited."""

    def address(self, peer: PeerId) -> Address | None:
        return None if peer in self.hidden else Address("10.0.0.1", 7700 + peer[0])

    def is_linked(self, peer: PeerId) -> bool:
        return peer not in self.unlinked


def groups(me: PeerId, mates: Mates, **changes: object) -> PlayedExchanges:
    local = Local("f", 1000, 1000, run_id=b"g" * 16, version=2.0, ready=True, boundary_at=0.0)
    return PlayedExchanges(
        me, local, Config(**{"mixing": "group", **changes}), iter(range(1, 99)).__next__, mates, reservation
    )


def invite(session: int, *members: PeerId, **changes: object) -> Invite:
    return replace(Invite(session, "f", b"g" * 16, 4.0, "fp32", members), **changes)


def invited(me: PeerId = B, inviter: PeerId = A, **changes: object) -> PlayedExchanges:
    """One that joined, and knows who takes part."""
    one = groups(me, Mates(), **changes)
    assert one.on_invite(inviter, invite(7, B, C), 0.0) == [Snapshot(7)]
    assert one.on_snapshotted(7, 0.1) == [Send(inviter, Joined(7, 2.0, "fp32"))]
    return one


def verified() -> PlayedExchanges:
    one = invited()
    assert isinstance(one.on_begin(A, Begin(7, (A, B, C), 3.0, "fp32"), 0.2)[-1], Gather)
    assert one.on_gathered(7, 1.0, 1.0, {}, [], 0.3) == [Send(A, Commit(7))]
    return one


def inviting(state: State = State.STREAMING, **changes: object) -> PlayedExchanges:
    """A's own group with B and C."""
    one = groups(A, Mates(B, C), **changes)
    one.begin_mix(0.0)
    one.on_snapshotted(1, 0.1)
    if state is not State.OFFERED:
        one.on_joined(B, Joined(1, 4.0, "fp32"), 0.2)
        one.on_joined(C, Joined(1, 6.0, "fp32"), 0.2)
    if state is State.VERIFIED:
        one.on_gathered(1, 1.0, 1.0, {}, [], 0.3)
    assert one.table[1].state is state
    return one


def test_the_inviter_begins_when_all_have_answered_with_the_mean_of_their_versions() -> None:
    one = inviting(State.OFFERED)
    assert one.on_joined(B, Joined(1, 4.0, "fp32"), 0.2) == []
    begun = one.on_joined(C, Joined(1, 6.0, "bf16"), 0.2)
    begin = Begin(1, (A, B, C), 4.0, "bf16")
    assert begun[:2] == [Send(B, begin), Send(C, begin)]
    gather = begun[2]
    assert isinstance(gather, Gather)
    assert (gather.members, gather.place, gather.codec) == ((A, B, C), 0, "bf16")


def test_the_group_is_settled_when_all_have_committed_and_all_are_as_old_then() -> None:
    one = inviting()
    assert one.on_commit(B, 1, 0.3) == []
    assert one.on_gathered(1, 1.0, 1.0, {}, [], 0.4) == []
    ended = one.on_commit(C, 1, 0.5)
    assert ended == [Send(B, Settled(1, True)), Send(C, Settled(1, True)), Mix(1, 1.0), Release(1)]
    assert one.local.version == 4.0
    member = verified()
    assert member.on_settled(A, Settled(7, True), 0.4) == [Mix(7, 1.0), Release(7)]
    assert member.local.version == 3.0


def test_a_busy_member_is_replaced_and_the_others_begin_without_who_stays_silent() -> None:
    one = groups(A, Mates(B, C, spare=(B, D)))
    one.begin_mix(0.0)
    one.on_snapshotted(1, 0.1)
    assert one.on_busy(C, 1, 0.2) == [Send(D, invite(1, B, D, version=2.0))]
    assert one.on_joined(B, Joined(1, 2.0, "fp32"), 0.2) == []
    late = one.tick(0.1 + one.config.reply_timeout_s)
    assert late[:2] == [Send(D, Abort(1, "late")), Send(B, Begin(1, (A, B), 2.0, "fp32"))]
    assert one.on_joined(D, Joined(1, 2.0, "fp32"), 5.2) == [Send(D, Abort(1, "late"))]
    assert one.partners.benched == [D]


def test_a_groups_streams_may_stand_still_as_long_as_a_pairs() -> None:
    """They had one second beside their bytes, less than members far apart need to dial each other."""
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


def test_of_two_that_nobody_can_dial_one_alone_is_invited() -> None:
    assert inviters(hidden=(B, C)) == (B, D)
    assert inviters(hidden=(A, C)) == (B, D)
    assert inviters(hidden=()) == (B, C, D)


def inviters(hidden: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    one = groups(A, Mates(B, C, D, hidden=hidden))
    one.begin_mix(0.0)
    return one.table[1].invite_list


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
    stays = groups(D, Mates())
    stays.on_invite(B, invite(7, C, D), 0.0)
    assert stays.on_invite(A, invite(8, C, D), 0.0) == [Send(A, Busy(8))]
    leaves = groups(D, Mates())
    leaves.on_invite(B, invite(7, A, D), 0.0)
    assert leaves.on_invite(A, invite(8, B, D), 0.0) == [Send(B, Busy(7)), Release(7), Snapshot(8)]
    joined = groups(D, Mates())
    joined.on_invite(B, invite(7, A, D), 0.0)
    joined.on_snapshotted(7, 0.1)
    assert joined.on_invite(A, invite(8, B, D), 0.2)[0] == Send(B, Abort(7, "late"))
    larger = groups(D, Mates())
    larger.on_invite(A, invite(7, B, D), 0.0)
    assert larger.on_invite(B, invite(8, A, D), 0.0) == [Send(B, Busy(8))]


def test_an_inviter_gives_way_while_it_prepares_and_then_to_a_smaller_id_that_it_invited() -> None:
    preparing = groups(B, Mates(C, D))
    preparing.begin_mix(0.0)
    assert preparing.on_invite(C, invite(7, B), 0.0) == [Release(1), Snapshot(7)]
    offered = groups(B, Mates(A, C))
    offered.begin_mix(0.0)
    offered.on_snapshotted(1, 0.1)
    assert offered.on_invite(C, invite(8, B), 0.2) == [Send(C, Busy(8))]
    left = offered.on_invite(A, invite(7, B), 0.2)
    assert sorted(left[:2], key=lambda send: send.to) == [Send(A, Abort(1, "late")), Send(C, Abort(1, "late"))]
    assert left[2:] == [Release(1), Snapshot(7)]
    assert offered.failures == 0


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
    assert one.on_abort(C, 1, "checksum", 0.5) == [LeaveOut(1, (C,), means=True)]
    assert one.on_abort(B, 1, "checksum", 0.6)[-1] == Release(1)
    assert (one.table, one.failures) == ({}, 1)
    assert one.on_outcome(B, 1, 0.7) == [Send(B, Settled(1, False))]


def test_who_has_committed_may_go() -> None:
    one = inviting(State.VERIFIED)
    one.on_commit(B, 1, 0.4)
    assert one.on_unlinked(B, 0.5) == []
    assert one.on_abort(B, 1, "late", 0.5) == []
    assert one.on_commit(C, 1, 0.6)[-2:] == [Mix(1, 1.0), Release(1)]
    assert one.on_outcome(B, 1, 0.7) == [Send(B, Settled(1, True))]


def test_the_inviter_settles_without_members_that_do_not_commit() -> None:
    unlinked = inviting(State.VERIFIED)
    assert unlinked.on_unlinked(B, 0.5) == []
    assert unlinked.on_commit(C, 1, 0.6)[-2:] == [Mix(1, 1.0), Release(1)]
    late = inviting(State.VERIFIED)
    late.on_commit(C, 1, 0.4)
    assert late.tick(late.deadline)[-2:] == [Mix(1, 1.0), Release(1)]
    assert late.on_outcome(B, 1, 99.0) == [Send(B, Settled(1, True))]  # It may mix as well.
    alone = inviting(State.VERIFIED)
    assert alone.tick(alone.deadline)[-1] == Release(1)
    assert (alone.done_count, alone.failures_by_reason) == (0, {"deadline": 1})
    assert unlinked.partners.benched == late.partners.benched == [B]
    assert alone.partners.benched == [B, C]


def learned(one: PlayedExchanges, seconds: float = 0.1) -> PlayedExchanges:
    """Let it have seen so many waits that it knows how long they take."""
    for waits in (one.answer_waits, one.stream_waits):
        for peer in (B, C, D, A):
            waits.add(peer, seconds)
    return one


def test_no_step_of_a_group_waits_for_more_than_four_times_its_usual_time() -> None:
    one = learned(groups(A, Mates(B, C)))
    one.begin_mix(0.0)
    one.on_snapshotted(1, 0.0)
    one.on_joined(B, Joined(1, 4.0, "fp32"), 0.2)
    assert one.deadline == pytest.approx(0.4)
    assert one.tick(0.4)[:2] == [Send(C, Abort(1, "late")), Send(B, Begin(1, (A, B), 3.0, "fp32"))]
    assert one.deadline == pytest.approx(0.8)
    assert one.tick(0.8) == [LeaveOut(1, None, means=False)]
    assert one.deadline == pytest.approx(1.2)
    assert one.tick(one.deadline) == [LeaveOut(1, None, means=True)]
    assert one.deadline == pytest.approx(1.6)
    assert one.tick(one.deadline) == [Send(B, Abort(1, "deadline")), Release(1)]


def test_an_invited_member_waits_for_begin_and_for_the_outcome_no_longer() -> None:
    one = learned(groups(B, Mates()))
    one.on_invite(A, invite(7, B, C), 0.0)
    one.on_snapshotted(7, 0.0)
    assert one.tick(one.deadline) == [Send(A, Abort(7, "late")), Release(7)]
    assert (one.partners.benched, one.partners.shunned) == ([A], [])  # It is excused once.
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
        member.on_invite(A, invite(session, B, C), 0.0)
        member.on_snapshotted(session, 0.1)
        member.on_begin(A, Begin(session, (A, B, C), 3.0, "fp32"), 0.2)
        member.on_gathered(session, 1.0, 1.0, {}, [A], 0.3)
        member.on_settled(A, Settled(session, True), 0.4)
    assert (member.partners.benched, member.partners.shunned) == ([A, A], [A])


def test_an_inviter_that_takes_back_one_invitation_after_another_is_declined() -> None:
    one = groups(B, Mates())
    for number in range(MAX_WITHDRAWALS + 1):
        assert one.partners.shunned == []
        assert one.on_invite(A, invite(7 + number, B, C), 0.0) == [Snapshot(7 + number)]
        one.on_abort(A, 7 + number, "late", 0.0)
    assert one.partners.shunned == [A]


@pytest.mark.parametrize("doubts", [False, True], ids=["before it asks", "in doubt"])
def test_the_inviters_word_alone_says_how_a_group_ended(doubts: bool) -> None:
    """Another's would have whoever believes it mix, and the others not."""
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
    one = verified()
    for number in range(4):
        session = 7 + number
        if number:
            one.local.boundary_at = float(number)
            one.on_invite(A, invite(session, B, C), float(number))
            one.on_snapshotted(session, float(number))
            one.on_begin(A, Begin(session, (A, B, C), 1.0, "fp32"), float(number))
            one.on_gathered(session, 1.0, 1.0, {}, [], float(number))
        ended = one.on_unlinked(A, number + 0.5)
        assert ended[-1:] == [Send(A, Outcome(session))]
        assert (Release(session - MAX_DOUBTS) in ended) == (number >= MAX_DOUBTS)
        assert len(one.table) == min(number + 1, MAX_DOUBTS)


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


@pytest.mark.parametrize("code", ["norm", "not-finite"])
def test_members_whose_means_were_refused_are_benched_and_the_group_goes_on(code: str) -> None:
    one = invited()
    one.on_begin(A, Begin(7, (A, B, C), 3.0, "fp32"), 0.2)
    assert one.on_gathered(7, 1.0, 1.0, {C: code}, [], 0.3) == [Send(A, Commit(7))]
    assert one.on_settled(A, Settled(7, True), 0.4)[0] == Mix(7, 1.0)
    assert one.mixed_partners == [A]
    assert one.refusals.counts == {(C, code): 1}
    assert one.partners.shunned == [C]
    assert ((C, "refused") in one.misbehaviour.levels) == (code == "not-finite")


@pytest.mark.parametrize(("members", "others", "plain"), [((A, B), True, True), ((A, B), False, False)])
def test_a_group_too_small_for_its_momentum_mixes_plainly_unless_it_is_everybody(members, others, plain) -> None:
    one = invited(group_size=0, outer_momentum=0.9, outer_rate=0.7)
    one.partners.others = others
    one.on_begin(A, Begin(7, members, 3.0, "fp32"), 0.2)
    one.on_gathered(7, 1.0, 1.0, {}, [], 0.3)
    assert one.on_settled(A, Settled(7, True), 0.4) == [Mix(7, 1.0, plain=plain), Release(7)]


def test_five_are_enough_for_the_momentum_of_diloco() -> None:
    five = tuple(PeerId(bytes([n]) * 16) for n in range(1, 6))
    one = invited(group_size=0, outer_momentum=0.9, outer_rate=0.7)
    one.partners.others = True
    one.on_begin(A, Begin(7, five, 3.0, "fp32"), 0.2)
    one.on_gathered(7, 1.0, 1.0, {}, [], 0.3)
    assert one.on_settled(A, Settled(7, True), 0.4) == [Mix(7, 1.0), Release(7)]


def test_late_words_change_nothing() -> None:
    one = verified()
    one.on_settled(A, Settled(7, True), 0.4)
    assert one.on_settled(A, Settled(7, False), 0.5) == []
    assert one.on_abort(A, 7, "late", 0.5) == []
    assert one.on_begin(A, Begin(7, (A, B), 1.0, "fp32"), 0.5) == [Send(A, Abort(7, "late"))]
    assert one.on_gathered(7, 1.0, 1.0, {}, [], 0.5) == one.on_failed(7, "broken", 0.5) == one.on_busy(A, 7, 0.5) == []
    assert (one.done_count, one.failures, one.local.version) == (1, 0, 3.0)


def test_a_member_held_dead_is_not_waited_for() -> None:
    states = {B: MemberState.SUSPECT, C: MemberState.ALIVE}
    one = inviting(State.OFFERED)
    assert one.leave_lost_members(states.get, 0.2) == []
    assert [*one.table[1].pending_peers] == [C]
    begun = inviting()
    assert begun.leave_lost_members(states.get, 0.3) == []  # a doubt passes
    states[B] = MemberState.DEAD
    assert begun.leave_lost_members(states.get, 0.4) == [LeaveOut(1, (B,), means=True)]


def test_weights_that_are_replaced_end_every_group_with_a_word() -> None:
    assert Send(B, Abort(1, "replaced")) in inviting().abandon()
    assert Send(B, Abort(1, "late")) in inviting(State.OFFERED).abandon()
    assert invited().abandon() == [Send(A, Abort(7, "late")), Release(7)]
    assert verified().abandon() == [Release(7)]  # it counts as one that mixed


def test_verdicts_are_bounded() -> None:
    one = groups(A, Mates())
    for session in range(5_000):
        one.remember_outcome(session, True)
    assert len(one.outcomes) == 4_096
    assert 0 not in one.outcomes


def test_with_whom_a_group_is_is_known_as_far_as_it_is() -> None:
    swarm = groups(B, Mates())
    swarm.on_invite(A, invite(1, B, C), 0.0)
    one = swarm.table[1]
    assert one.counterparts == (A,)
    one.members = (A, B, C)
    assert one.counterparts == (A, B, C)


def test_a_group_counts_members_by_those_that_meet_most_others():
    one = inviting(State.OFFERED)
    met = one.table[1].our_claim.members
    one.on_joined(B, Joined(1, 4.0, "fp32", Claim(0, 0, met + 3)), 0.2)
    out = one.on_joined(C, Joined(1, 6.0, "fp32", Claim(0, 0, met + 3)), 0.2)
    begin = next(effect.message for effect in out if isinstance(effect, Send))
    assert begin.progress.members == met + 3, "an inviter without an address meets fewer"
