"""No figure of our own ends a link or a thread: what leaves a node is what others read."""

import dataclasses
import math
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.ids import MOST_SAMPLES, Address, Claim, MemberRecord
from gossip.wire.frames import FIELDS, MAX_INT, PREFIX_BYTES, decode, encode
from gossip.wire.messages import MESSAGES, Close, Gossip, Offer, Serving, StatusReply
from gossip.wire.records import check, trusting
from tests.fuzz.grammar import World, make_message
from tests.gossip.membership.members import member, peer_id

ANY_NUMBERS = st.one_of(
    st.integers(-(2**80), 2**80), st.floats(), st.sampled_from([2**53, 2**53 - 1, 2**63, -1, math.nan, math.inf])
)
NUMBERS = ("int", "float", "claim")  # forms of fields
HOSTS = st.one_of(
    st.text(max_size=300),
    st.sampled_from(["a..b", "\u00fc.example", "h" * 300, "h" * 64, "", "10.0.0.5", "::1", "h\n"]),
)
OWN = st.fixed_dictionaries({}, optional={
    "address": st.none() | st.builds(Address, HOSTS, st.integers(-5, 70_000)),
    "homes": st.lists(st.integers(0, 9).map(peer_id), max_size=6).map(tuple),
    "ready": st.booleans(), "finished": st.booleans(),
    "run_id": st.binary(max_size=20), "progress": ANY_NUMBERS, "steps": ANY_NUMBERS, "samples": ANY_NUMBERS,
    "loss": st.none() | ANY_NUMBERS, "version": ANY_NUMBERS,
})  # fmt: skip
STARTS = st.fixed_dictionaries({}, optional={
    "sequence": ANY_NUMBERS, "steps": ANY_NUMBERS, "samples": ANY_NUMBERS, "progress": ANY_NUMBERS,
    "version": ANY_NUMBERS, "loss": ANY_NUMBERS, "run_id": st.binary(max_size=20),
    "address": st.builds(Address, HOSTS, st.integers(-5, 70_000)),
})  # fmt: skip


def read_again(message):
    return decode(encode(message)[PREFIX_BYTES:])


def taken_by_others(record):
    """Check that others accept the record and read it unchanged from a frame."""
    check(record, trusting)
    assert read_again(Gossip((record,))) == Gossip((record,))


@settings(max_examples=4 * settings.default.max_examples)
@given(STARTS, ANY_NUMBERS, st.lists(OWN, max_size=4))
def test_whatever_a_node_comes_to_say_of_itself_others_take_it(start, incarnation, changes):
    me = member(incarnation=incarnation, **start)
    taken_by_others(me.me)
    for turn, own in enumerate(changes):
        me.update_me(10.0 * turn + 10.0, **own)
        me.tick(10.0 * turn + 15.0)
        taken_by_others(me.me)
        assert type(me.my_samples) is int
        assert 0 <= me.my_samples < 2**53
    me.leave(1000.0)
    taken_by_others(me.me)


def test_figures_beyond_bounds_are_signed_as_the_largest_that_there_are():
    me = member(samples=2**53 - 10)
    me.update_me(10.0, steps=7, samples=1000, version=1e300, loss=math.nan, progress=-5)
    record = me.me
    assert (record.steps, record.samples, record.version) == (7, 2**53 - 1, 2**53 - 1)
    assert record.loss is None
    assert record.progress == 0
    me.update_me(20.0, loss=0.25)
    assert me.me.loss == 0.25


def test_a_lie_about_our_earlier_life_leaves_a_record_that_others_take():
    """Only our own key signs such a record; a damaged state directory once did."""
    most = 2**53 - 1
    me = member()
    earlier = MemberRecord(peer_id(0), b"", most, most, samples=most, steps=most)
    for _ in range(10):
        me.receive(peer_id(1), Gossip((earlier,)), 1.0)
        me.update_me(2.0, steps=500, samples=500)
        taken_by_others(me.me)


@pytest.mark.parametrize("value", [2**64, -1, 2**63, math.nan, math.inf, -math.inf, 0.5, True, 10**400])
@pytest.mark.parametrize("tag", MESSAGES)
def test_every_number_of_every_message_is_written_within_its_bound(tag, value):
    kinds = dict(FIELDS[MESSAGES[tag]])
    claim = Claim(value, value, value, value)
    wrong = {name: claim if kind.form == "claim" else value for name, kind in kinds.items() if kind.form in NUMBERS}
    if tag == "hello":
        wrong |= {"version_min": 1, "version_max": 1}
    back = read_again(dataclasses.replace(make_message(Random(1), World(), tag), **wrong))
    for name in wrong:
        written = getattr(back, name)
        if kinds[name].form == "int":
            assert 0 <= written <= kinds[name].bound
        elif kinds[name].form == "float":
            assert math.isfinite(written)
        else:
            assert all(0 <= number <= MOST_SAMPLES for number in dataclasses.astuple(written))


def test_what_is_nearest_is_written():
    assert read_again(Serving(2**70, math.inf, b"", (), (("step", math.nan), ("lr", -math.inf)))) == Serving(
        2**63 - 1, sys.float_info.max, b"", (), (("step", 0.0), ("lr", -sys.float_info.max))
    )
    assert read_again(Offer(-3, "f", b"", math.nan, 0.5, "fp32")).version == 0.0
    assert read_again(Close("x" * 40, "two\nlines \x1b[2J\ud800" + "y" * 500, ())) == Close(
        "x" * 32, "two?lines ?[2J?" + "y" * 385, ()
    )


def test_a_status_is_written_whatever_the_sums_come_to():
    """Records of 2,049 members with 2**53 samples each once ended every node that was asked for its status."""
    member = (b"i" * 16, 2**65, (2**64, math.nan))
    page = StatusReply((2**64, -(2**70), math.nan, math.inf, "\ud800", None), (member,), True)
    assert read_again(page) == StatusReply(
        (MAX_INT, -MAX_INT, None, None, "?", None), ((b"i" * 16, MAX_INT, (MAX_INT, None)),), True
    )
