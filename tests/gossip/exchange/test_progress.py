"""One node's sample count: how steps and exchanges move it, and how far a partner's claim can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.exchange.progress import (
    LAST_CLAIMS,
    LAST_EXCHANGES,
    MAX_BUDGET_INTERVALS,
    MAX_EXCHANGE_INTERVALS,
    MAX_INTERVAL_RATIO,
    RunProgress,
)
from gossip.ids import MOST_SAMPLES, UNSTATED, Claim
from gossip.wire.frames import encode
from gossip.wire.messages import Accept
from tests.gossip.membership.members import peer_id

EVERY, SAMPLES, MEMBERS = 4, 8, 3
INTERVAL = EVERY * SAMPLES * MEMBERS  # samples that a node of these tests adds between two mixes


def trained(steps: int = EVERY) -> RunProgress:
    progress = RunProgress(EVERY)
    progress.add_samples(steps * SAMPLES, steps, MEMBERS, dialable=True)
    return progress


def test_a_step_counts_its_samples_for_every_member_in_contact():
    assert trained().samples == INTERVAL


@given(st.integers(0, MOST_SAMPLES), st.integers(0, MOST_SAMPLES))
def test_an_exchange_keeps_the_sum_of_both_numbers(one_has, other_has):
    one, other = trained(), trained()
    one.samples, other.samples = one_has, other_has
    ours, theirs = one.claim, other.claim
    one.mix(ours, theirs, peer_id(1), chosen=True)
    other.mix(theirs, ours, peer_id(0), chosen=False)
    assert one.samples + other.samples == one_has + other_has
    assert abs(one.samples - other.samples) <= abs(one_has - other_has)


claims = st.builds(Claim, *[st.integers(0, MOST_SAMPLES)] * 4)
ids = st.integers(0, 20).map(peer_id)


@given(st.lists(st.tuples(claims, ids, st.booleans()), min_size=1, max_size=60))
def test_no_claims_move_the_number_beyond_the_intervals_of_its_limit(stated):
    progress = trained()
    longest = MAX_INTERVAL_RATIO * INTERVAL
    for claim, partner, chosen in stated:
        before = progress.samples
        progress.mix(progress.claim, claim, partner, chosen=chosen)
        assert abs(progress.samples - before) <= MAX_EXCHANGE_INTERVALS * longest
    # Offering often gains nothing. A node that trains nothing gives a partner of its own choice an eighth of a budget.
    budgets = 1 + sum(chosen for *_, chosen in stated) / LAST_EXCHANGES
    assert progress.samples <= INTERVAL + budgets * MAX_BUDGET_INTERVALS * longest


def test_among_partners_that_are_close_one_that_is_far_moves_the_number_little():
    progress = trained()
    for number in range(LAST_EXCHANGES):
        progress.add_samples(SAMPLES * EVERY, EVERY, MEMBERS, dialable=True)
        near = Claim(progress.samples + number, MOST_SAMPLES, MEMBERS, INTERVAL)
        progress.mix(progress.claim, near, peer_id(number), chosen=True)
    before = progress.samples
    for _ in range(100):
        progress.mix(progress.claim, Claim(*[MOST_SAMPLES] * 4), peer_id(20), chosen=False)
    assert progress.samples - before <= INTERVAL


def test_a_slow_node_follows_partners_that_are_all_far_ahead():
    progress = trained()
    for number in range(2 * LAST_EXCHANGES):
        progress.add_samples(SAMPLES * EVERY, EVERY, MEMBERS, dialable=True)
        before = progress.samples
        ahead = Claim(before + 10 * INTERVAL, MOST_SAMPLES, MEMBERS, INTERVAL)
        progress.mix(progress.claim, ahead, peer_id(number), chosen=True)
    assert progress.samples - before == MAX_EXCHANGE_INTERVALS * INTERVAL


def test_a_node_of_small_batches_takes_over_the_shortest_interval_of_its_partners():
    progress = trained()
    for number in range(LAST_EXCHANGES):
        progress.mix(progress.claim, Claim(0, 0, MEMBERS, (3 + number) * INTERVAL), peer_id(number), chosen=True)
    assert progress.claim.most == MAX_EXCHANGE_INTERVALS * 3 * INTERVAL
    assert progress.claim.interval == INTERVAL, "it states its own"


def test_a_node_that_trains_nothing_is_moved_by_no_single_liar():
    progress = RunProgress(EVERY)
    for _ in range(LAST_CLAIMS - 1):
        progress.mix(progress.claim, Claim(*[MOST_SAMPLES] * 4), peer_id(1), chosen=False)
    progress.mix(progress.claim, Claim(0, 5, MEMBERS, INTERVAL), peer_id(2), chosen=False)
    progress.mix(progress.claim, Claim(*[MOST_SAMPLES] * 4), peer_id(1), chosen=False)
    assert progress.samples <= 5


def test_nodes_that_have_stopped_training_still_come_to_their_mean():
    one, other = trained(), trained()
    one.samples = 40 * INTERVAL
    for _ in range(50):
        ours, theirs = one.claim, other.claim
        one.mix(ours, theirs, peer_id(1), chosen=True)
        other.mix(theirs, ours, peer_id(0), chosen=True)
    assert abs(one.samples - other.samples) <= 1


@pytest.mark.parametrize(
    ("dialable", "stated", "members"),
    [(True, 40, MEMBERS), (False, 40, 40), (False, MOST_SAMPLES, 16 * MEMBERS)],
    ids=["has an address", "has none", "has none, and partners lie"],
)
def test_only_a_node_without_an_address_counts_members_by_what_partners_say(dialable, stated, members):
    progress = trained()
    for _ in range(5):
        progress.mix(progress.claim, Claim(INTERVAL, INTERVAL, stated), peer_id(1), chosen=True)
    progress.add_samples(SAMPLES, 1, MEMBERS, dialable=dialable)
    assert progress.members == members


def test_another_run_or_a_checkpoint_brings_its_number():
    progress = trained()
    progress.begin(5, resumed=True)
    assert (progress.samples, progress.resumed) == (5, True)
    progress.begin(2**80)
    assert progress.samples == MOST_SAMPLES


@pytest.mark.parametrize(
    ("claim", "most"), [(Claim(10**9, 10**6, 60, 10**5), 12), (Claim(*[MOST_SAMPLES] * 4), 32)], ids=["usual", "widest"]
)
def test_progress_costs_an_exchange_a_few_bytes_of_two_messages(claim, most):
    """A claim of 0 takes five bytes; this is what any other one adds."""

    def size(stated):
        return len(encode(Accept(1, 0.0, 0.5, "fp32", stated)))

    assert 0 < size(claim) - size(UNSTATED) <= most


def test_nodes_that_join_end_with_the_higher_number_as_far_as_their_limits_allow():
    ahead, behind, far = trained(), trained(), trained()
    ahead.samples, behind.samples, far.samples = 1_000_010, 1_000_000, 0
    claims = [progress.claim for progress in (ahead, behind, far)]
    ahead.mix(claims[0], claims[1], peer_id(1), chosen=True, joins=True)
    behind.mix(claims[1], claims[0], peer_id(0), chosen=False, joins=True)
    far.mix(claims[2], claims[0], peer_id(0), chosen=False, joins=True)
    assert (ahead.samples, behind.samples) == (1_000_010, 1_000_010)
    assert far.samples == claims[2].most < 1_000_000
