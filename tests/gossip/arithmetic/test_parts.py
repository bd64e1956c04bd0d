"""A part of the vector: the same elements on both sides, as many as both expect, and each one in its turn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.subsets import ALL, MAX_FRAGMENTS, MAX_RUN_ELEMENTS, Fragments, Subset, fragments_of
from gossip.config import Config
from gossip.effects import Send
from gossip.errors import ConfigError
from gossip.wire.messages import Refuse
from tests.gossip.exchange.sides import B, C, Side, offer

sessions = st.integers(0, 2**62 - 1)
shares = st.floats(1e-6, 1).map(lambda share: float(f"{share:.6g}"))
seeds = st.one_of(st.none(), st.integers(0, 2**32 - 1))
masks = st.builds(lambda share, seed: Subset("mask", share, seed=seed), shares, seeds)
fragments = st.integers(1, MAX_FRAGMENTS).flatmap(
    lambda count: st.builds(lambda index: Subset("fragment", 1 / count, index, count), st.integers(0, count - 1))
)


@given(st.one_of(masks, fragments), st.integers(1, 20_000), sessions)
def test_positions_ascend_lie_within_the_vector_and_are_as_many_as_stated(part, size, session):
    positions = part.positions(size, session)
    assert positions.dtype == np.int64
    assert len(positions) == part.elements(size)
    assert np.all(np.diff(positions) > 0)
    assert np.all((positions >= 0) & (positions < size))


@given(shares, st.integers(1, 5_000), sessions, sessions)
def test_a_drawn_mask_is_where_it_is_whatever_the_session(share, size, one, other):
    """Each partner that is asked sees another session number, and the snapshot precedes them all."""
    part = Subset("mask", share).with_seed(one)
    np.testing.assert_array_equal(part.positions(size, one), part.positions(size, other))
    assert Subset("mask", share).with_seed(one + 1).seed != part.seed
    assert ALL.with_seed(one) is ALL


def test_the_next_mix_is_of_what_was_said_before_and_every_mix_of_another_mask():
    side = Side(partners=(B, C), config=Config(part="mask 0.01"))
    seen = []
    for _ in range(3):
        seen.append(side.exchanges.next_part)
        [wish] = side.exchanges.begin_mix(0.0)
        assert wish.part is seen[-1]
        [sent] = side.exchanges.on_snapshotted(wish.session, 0.0)
        assert sent.message.part == str(seen[-1])
        renamed, again = side.exchanges.on_busy(sent.to, wish.session, 0.0)
        assert again.message.session == renamed.to != wish.session
        assert again.message.part == str(seen[-1]), "the snapshot holds these elements"
        side.exchanges.abandon()
    assert len(set(seen)) == 3
    side.local.settling = True
    assert side.exchanges.next_part is ALL


@given(st.integers(1, 5_000), sessions)
def test_all_of_them_has_no_positions_and_a_mask_of_everything_names_each(size, session):
    assert ALL.positions(size, session) is None
    assert ALL.elements(size) == size
    np.testing.assert_array_equal(Subset("mask", 1.0).positions(size, session), np.arange(size))


@given(masks, st.integers(1, 10**12))
def test_a_mask_has_at_least_its_share_and_less_than_one_element_more(part, size):
    elements = part.elements(size)
    assert 1 <= elements <= size
    assert part.share * size <= elements < part.share * size + 1 or elements == 1


def test_a_mask_of_a_model_too_large_to_hold_costs_its_share_alone():
    positions = Subset("mask", 1e-6).positions(2_000_000_000, 5)
    assert len(positions) == 2_000
    assert 0 <= positions[0] < positions[-1] < 2_000_000_000


@pytest.mark.parametrize(("size", "share"), [(7, 0.4), (3, 0.6), (10, 0.05), (64, 0.25), (11, 0.9)])
def test_every_position_of_a_mask_is_equally_likely(size, share):
    """Strata of unequal length would favour the elements of the shorter ones, by half for 7 elements and 3 strata.

    Each count is binomial, and none of 95 lies further out than 4.5 standard deviations (odds of one in 1,500).
    """
    part, count = Subset("mask", share), 4_000
    drawn = np.concatenate([part.positions(size, session) for session in range(count)])
    seen = np.bincount(drawn, minlength=size)
    chance = part.elements(size) / size
    assert np.abs(seen - count * chance).max() <= 4.5 * np.sqrt(count * chance * (1 - chance))


@given(st.integers(1, MAX_FRAGMENTS), st.integers(1, 50_000))
def test_fragments_partition_the_vector_exactly(count, size):
    parts = [Subset("fragment", 1 / count, index, count) for index in range(count)]
    together = np.concatenate([part.positions(size, 0) for part in parts])
    np.testing.assert_array_equal(np.sort(together), np.arange(size))
    assert sum(part.elements(size) for part in parts) == size


@given(st.integers(2, 8), st.integers(4_096, 200_000))
def test_fragments_are_runs_of_one_length_and_of_nearly_one_size(count, size):
    """The obvious version: element k belongs to fragment (k / run) mod count."""
    parts = [Subset("fragment", 1 / count, index, count) for index in range(count)]
    run = parts[0].run_elements(size)
    assert 1 <= run <= MAX_RUN_ELEMENTS
    owner = np.arange(size) // run % count
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(part.positions(size, 0), np.flatnonzero(owner == index))
    assert max(part.elements(size) for part in parts) - min(part.elements(size) for part in parts) <= run
    assert run <= size / count / 8


@given(st.integers(2, 20), st.lists(st.integers(0, 19), max_size=40))
def test_each_fragment_comes_once_in_as_many_mixes_whatever_others_asked_for_before(count, asked):
    turns = Fragments(count)
    for index in asked:
        of = count if index < count else 21  # a fragment of another division changes no turn
        turns.on_mixed(Subset("fragment", 1 / of, index, of))
    mixed = []
    for _ in range(count):
        part = turns.next_fragment()
        assert turns.next_fragment() is part, "one that failed is offered again"
        turns.on_mixed(part)
        mixed.append(part.index)
    assert sorted(mixed) == list(range(count))


def test_no_fragment_without_elements_is_offered_or_accepted():
    side = Side(config=Config(part="fragments 256"))
    assert side.local.elements == 100
    division = fragments_of(side.config.part, side.local.elements)
    assert [part.elements(100) for part in division.order] == [1] * 100
    assert side.exchanges.on_offer(B, offer(7, part="fragment 255/256"), 0.0) == [Send(B, Refuse(7, "part"))]
    assert side.table == {}


@given(st.one_of(st.just(ALL), masks, fragments))
def test_what_is_written_reads_back_and_fits_an_offer(part):
    assert Subset.parse(str(part)) == part
    assert len(str(part)) <= 32
    assert Subset.parse("all") is ALL


@given(
    st.one_of(
        st.text(max_size=20),
        st.from_regex(r"(mask|top) [0-9]\.?[0-9]{0,12}(e-?[0-9]{1,2})?", fullmatch=True),
        st.from_regex(r"fragment [0-9]{1,4}/[0-9]{1,4}", fullmatch=True),
    )
)
def test_no_other_text_than_what_is_written_reads_as_a_part(text):
    part = Subset.parse(text)
    assert part is None or str(part) == text


@pytest.mark.parametrize(
    "text",
    ["", "ALL", "all ", "mask", "mask 0", "mask 1.1", "mask 0.50", "mask 1e-5", "mask 1e-07", "mask -0.1", "mask nan",
     "mask .5", "mask 0..5", "mask 1.0000001", "mask 0.1234567", "mask \u0665e-01", "mask 0.5 -1", "mask 0.5 07",
     "mask 0.5 4294967296", "mask 0.5 ", "top 0.01", "fragment 4/4", "fragment 0/0", "fragment 00/4", "fragment 0/257",
     "fragment -1/4", "fragment 1/ 4", "fragment 1/4 5", "fragments 4"],
)  # fmt: skip
def test_what_a_stranger_may_write_instead_is_no_part(text):
    assert Subset.parse(text) is None


@pytest.mark.parametrize(
    ("text", "meant"),
    [("mask 0.50", "mask 0.5"), ("mask 1e-5", "mask 1e-05"), ("mask 0.00012345678", "mask 0.000123457"),
     ("mask 1.0", "mask 1")],
)  # fmt: skip
def test_a_share_written_another_way_is_refused_with_the_right_one(text, meant):
    with pytest.raises(ConfigError, match="write ") as caught:
        Config(part=text)
    assert repr(meant) in str(caught.value)
    assert Config(part=meant).part == meant


@pytest.mark.parametrize("text", ["", "half", "mask", "mask 2", "mask 1e-9", "mask 0.1.2", "fragments 1",
                                  "fragments 08", "fragments 257", "fragments", "fragments 4.0", "fragment 0/4",
                                  "to"])  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_naming_three_that_do(text):
    with pytest.raises(ConfigError) as caught:
        Config(part=text)
    for word in (repr(text), "'all'", "mask 0.005", "fragments 8"):
        assert word in str(caught.value)
