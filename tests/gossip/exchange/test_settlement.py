"""A settlement is exact whatever a member's configuration mixes otherwise, and only settling members make one."""

import pytest

from gossip.arithmetic.subsets import ALL
from gossip.config import Config
from gossip.effects import Mix, Release, Send, Snapshot, Transfer
from gossip.exchange.session import State
from gossip.exchange.settling.settlement import Settlement
from gossip.wire.messages import Busy
from tests.gossip.exchange.mates import Mates, groups, invite
from tests.gossip.exchange.sides import A, B, C, Side, offer


def settling(side):
    side.local.settling = True
    assert side.exchanges.begin_settling() == []
    return side.exchanges


def settle_offer(session):
    return offer(session, mixing=Settlement.MIXING)


@pytest.mark.parametrize("settings", [
    {"codec": "int8"}, {"codec": "moniqua4", "part": "fragments 8"}, {"part": "mask 0.01"}, {"mixing": "group"},
    {"mixing": "group", "filter": "trimmed"}, {"mixing": "push-sum"}, {"mixing": "row-stochastic"},
    {"selection": "ring", "partners": 0}, {"filter": "balance"}, {"outer_momentum": 0.3, "outer_rate": 0.9},
], ids=str)  # fmt: skip
def test_a_settlement_carries_all_weights_in_fp32_and_takes_the_plain_mean(settings):
    config = Config(**settings)
    side, other = Side(config=config, version=300.0), Side(B, config=config)
    x, asked = settling(side), settling(other)
    [snapshot] = x.begin_mix(0.0)
    session = snapshot.session
    assert snapshot == Snapshot(session, 0, ALL)
    [sent] = x.on_snapshotted(session, 0.1)
    assert (sent.message.mixing, sent.message.codec, sent.message.part) == ("settle", "fp32", "all")
    assert sent.message.weight == 0.5
    assert asked.on_offer(A, sent.message, 0.1) == [Snapshot(session, 0, ALL)]
    answer, _ = asked.on_snapshotted(session, 0.1)
    assert (answer.message.codec, answer.message.weight) == ("fp32", 0.5)
    side.local.settling = False  # An exchange that has begun stays exact.
    assert x.on_accept(B, answer.message, 0.2) == [Transfer(session, B, "fp32", has_statistics=False)]
    assert side.complete(B, session, 0.4, 1e-6)[-2:] == [Mix(session, 0.5, plain=True), Release(session)]


def test_a_member_that_does_not_settle_is_busy_for_those_that_do():
    assert Side().exchanges.on_offer(B, settle_offer(70), 0.0) == [Send(B, Busy(70))]


def test_a_member_that_settles_makes_one_exchange_at_a_time():
    side = Side(partners=(B, C))
    x = settling(side)
    assert x.on_offer(B, settle_offer(70), 0.0) == [Snapshot(70, 0, ALL)]
    assert x.begin_mix(0.1) == []
    assert x.on_offer(C, settle_offer(71), 0.1) == [Send(C, Busy(71))]


def settled(x, session, difference_sq):
    x.on_offer(B, settle_offer(session), 0.0)
    x.on_snapshotted(session, 0.1)
    x.on_commit(B, session, 0.2)
    [mix] = [effect for effect in x.on_streamed(session, difference_sq, 1.0, 0.3) if isinstance(effect, Mix)]
    return mix.joins, x.equal_since is not None


def test_near_pairs_join_and_whether_the_last_was_equal_is_known():
    x = settling(Side())
    assert settled(x, 70, 1e-2) == (False, False)
    assert settled(x, 71, 1e-6) == (True, False)
    assert settled(x, 72, 0.0) == (True, True)
    assert settled(x, 73, 1e-6) == (True, False)


def test_members_that_agree_are_not_parted_by_one_that_trains():
    side = Side(config=Config(mix_every_steps=4))
    x = settling(side)
    assert x.on_offer(B, offer(70), 0.0) == [Snapshot(70, 0, ALL)]
    x.abandon()
    settled(x, 71, 0.0)
    assert x.on_offer(B, offer(72), 0.0) == [Send(B, Busy(72))]
    assert x.begin_settling() == []  # Settling again begins anew.
    assert x.on_offer(B, offer(73), 0.0) == [Snapshot(73, 0, ALL)]


@pytest.mark.parametrize("state", [State.PREPARING, State.OFFERED])
def test_a_group_that_has_not_begun_is_left_for_settling_and_no_other_is_joined(state):
    x = groups(A, Mates(B, C))
    x.begin_mix(0.0)
    if state is State.OFFERED:
        x.on_snapshotted(1, 0.1)
    x.local.settling = True
    assert x.begin_settling()[-1] == Release(1)
    assert not x.table
    assert x.on_invite(B, invite(70, A, C), 0.2) == [Send(B, Busy(70))]


def test_a_settlement_in_a_swarm_of_groups_answers_how_it_ended():
    x = settling(Side(config=Config(mixing="group")))
    settled(x, 70, 1e-3)
    [answer] = x.on_outcome(B, 70, 1.0)
    assert answer.message.committed
