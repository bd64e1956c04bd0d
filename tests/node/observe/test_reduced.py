"""Figures over the swarm: the room in a record, the influence of a liar, and two nodes with real ones."""

import dataclasses
import math

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import ConfigError
from gossip.ids import MemberRecord, PeerId
from gossip.wire.records import MAX_EXTRA_BYTES, is_keepable
from node import Node
from node.observe.reduced import MAX_MARKS, SETTLING, Figures, Reduced, mark_in, reduce, values_in
from tests.node.conftest import QUICK

RUN, OTHER = b"r" * 16, b"o" * 16
RECORD = MemberRecord(PeerId(b"i" * 16), b"", 1)


def telling(packed: object) -> MemberRecord:
    return dataclasses.replace(RECORD, extra=(packed,))


def said(**figures: float) -> MemberRecord:
    return telling(Figures().pack(figures, RUN, 100))


def test_figures_told_at_different_times_stand_side_by_side():
    own = Figures()
    own.pack({"accuracy": torch.tensor(0.5), "seen": 360}, RUN, 1_000)
    packed = own.pack({"loss": 2.0}, RUN, 2_000)
    assert values_in(telling(packed)) == {"accuracy": (0.5, 1_000), "seen": (360.0, 1_000), "loss": (2.0, 2_000)}
    assert values_in(telling(own.pack({"accuracy": 0.75}, RUN, 3_000)))["accuracy"] == (0.75, 3_000)


def test_another_run_begins_without_figures():
    own = Figures()
    own.pack({"accuracy": 0.5}, RUN, 1_000)
    assert own.pack({}, OTHER, 0) == b""
    assert own.values == {}


def test_that_a_loop_settles_is_told_beside_its_figures_and_is_none_of_them():
    own = Figures()
    own.pack({"accuracy": 0.5}, RUN, 1_000)
    here = telling(own.pack_mark(SETTLING, (1.0, 0), RUN, 2_000))
    assert mark_in(here, SETTLING) == (1.0, 0)
    assert mark_in(telling(own.pack({"loss": 1.0}, RUN, 3_000)), SETTLING) == (1.0, 0)
    assert list(reduce({}, [here])) == ["accuracy"]
    assert mark_in(telling(own.pack_mark(SETTLING, None, RUN, 4_000)), SETTLING) is None
    assert mark_in(RECORD, SETTLING) is None
    with pytest.raises(ConfigError, match="name is ''"):
        own.pack({"": 1.0}, RUN, 5_000)
    with pytest.raises(ConfigError, match="give a text"):
        own.pack({SETTLING: 1.0}, RUN, 5_000)


def test_what_is_not_finite_is_told_no_more():
    own = Figures()
    own.pack({"loss": 1.0, "seen": 1}, RUN, 1_000)
    assert values_in(telling(own.pack({"loss": math.nan}, RUN, 2_000))) == {"seen": (1.0, 1_000)}
    assert own.pack({"seen": math.inf}, RUN, 3_000) == b""


@pytest.mark.parametrize("figures", [{"a": "much"}, {"a": torch.zeros(2)}, {"a": None}, {1: 1.0}, {"a": 10**400}])
def test_what_is_no_number_is_refused(figures):
    with pytest.raises(ConfigError, match=r"give a (float|text)"):
        Figures().pack(figures, RUN, 0)


def test_more_than_a_record_has_room_for_is_refused_and_changes_nothing():
    own = Figures()
    own.marks = {f"\0{number}": (0.5, 2**53 - 1) for number in range(MAX_MARKS)}
    before = own.pack({f"validation/{number}": 0.5 for number in range(8)}, RUN, 10**9)
    with pytest.raises(ConfigError, match=r"validation/9 take 281 bytes, .* has room for 248: tell fewer"):
        own.pack({"validation/8": 0.5, "validation/9": 0.5}, RUN, 10**9)
    assert own.pack({}, RUN, 0) == before
    assert is_keepable((b"x" * (MAX_EXTRA_BYTES - 4),))
    assert not is_keepable((b"x" * (MAX_EXTRA_BYTES - 3),))


def test_every_member_weighs_alike_and_the_age_is_the_oldests():
    own = {"accuracy": (0.5, 900), "mine": (1.0, 900)}
    found = reduce(own, [said(accuracy=0.75), said(accuracy=1.0, theirs=3.0), RECORD])
    assert found["accuracy"] == Reduced(0.75, 0.75, 2.25, 0.5, 1.0, 3, 100)
    assert (found["mine"].members, found["theirs"].sum) == (1, 3.0)


def test_a_liar_moves_the_mean_and_hardly_the_median():
    honest = [said(accuracy=value) for value in (0.90, 0.91, 0.92, 0.93)]
    for lie in (1e308, -1e308):
        found = reduce({}, [*honest, said(accuracy=lie), said(accuracy=lie, other=lie)])["accuracy"]
        assert 0.90 <= found.median <= 0.93
        assert abs(found.mean) > 1


@pytest.mark.parametrize(
    "packed",
    [
        7, "text", None, b"", b"\xc1", b"\x81", msgpack.packb(3), msgpack.packb([1, 2]), msgpack.packb({"a": 1.0}),
        msgpack.packb({"a": [1.0]}), msgpack.packb({"a": [math.nan, 1]}), msgpack.packb({"a": ["b", 1]}),
        msgpack.packb({"a": [1.0, 1.5]}), msgpack.packb({b"a": [1.0, 1]}), msgpack.packb({1: [1.0, 1]}),
        b"\x91" * 253, msgpack.packb({"a": [1.0, True]}), b"\xc7\x03\xff123",
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_else_stands_there_is_nothing(packed):
    assert values_in(telling(packed)) == {}


@given(st.binary(max_size=MAX_EXTRA_BYTES - 4))
def test_any_bytes_are_read_without_an_error(packed):
    found = reduce({"a": (1.0, 1)}, [telling(packed), telling(packed)])
    assert found["a"].members >= 1


def test_two_nodes_reduce_what_both_tell(train, until):
    a = train(torch.nn.Linear(2, 2))
    b = train(torch.nn.Linear(2, 2), seeds=[a.node.address])
    assert b.do(lambda node: node.reduce()) == {}
    a.do(lambda node: node.reduce({"accuracy": 0.5, "seen": 10}))
    b.do(lambda node: node.reduce({"accuracy": 1.0}))

    def both(node):
        found = node.reduce()
        return "accuracy" in found and found["accuracy"].members == 2 and found

    for one in (a, b):
        until(lambda one=one: one.do(both))
        found = one.do(both)
        assert (found["accuracy"].mean, found["seen"].sum, found["seen"].members) == (0.75, 10.0, 1)
        assert found["accuracy"].oldest_samples <= one.node.swarm_samples


def test_whoever_tells_no_figures_pays_no_byte(train, until):
    a = train(torch.nn.Linear(2, 2))
    assert a.do(lambda node: node.reduce()) == {}
    assert a.side.network.peer.membership.me.extra == ()


def test_a_node_that_does_not_run_says_so():
    with pytest.raises(Exception, match="not running: use it inside its with block"):
        Node({"w": torch.zeros(2)}, config=QUICK).reduce({"a": 1.0})
