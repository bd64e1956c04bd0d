from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.layout import Layout, LayoutSummary, Segment
from gossip.errors import LayoutError, ProtocolError

WEIGHT = Segment("net.0.weight", (4, 3), "float32", "parameter")
BIAS = Segment("net.0.bias", (4,), "float32", "parameter")
MEAN = Segment("net.1.running_mean", (4,), "float32", "buffer")
BASE = Segment("base.weight", (5, 2), "bfloat16", "frozen")

segments = st.builds(
    Segment,
    st.text(max_size=40),
    st.lists(st.integers(0, 70_000), max_size=2).map(tuple),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    st.sampled_from(["parameter", "buffer", "frozen"]),
)
layouts = (
    st.lists(segments, min_size=1, max_size=20, unique_by=lambda s: s.name)
    .filter(lambda given: any(s.size and s.kind != "frozen" for s in given))
    .map(Layout)
)


def travelled(layout: Layout) -> LayoutSummary:
    """Return the summary as the other side holds it after it crossed the wire."""
    packed = msgpack.packb(layout.summary())
    assert len(packed) <= 48 * 1024
    return Layout.parse(msgpack.unpackb(packed, max_array_len=4096))


def test_parameters_come_first_so_that_the_outer_step_has_a_prefix():
    layout = Layout([WEIGHT, MEAN, BIAS])
    assert layout.segments == (WEIGHT, BIAS, MEAN)
    assert (layout.parameters, layout.size) == (16, 20)


def test_what_is_frozen_comes_last_so_that_exchanges_have_a_prefix_too():
    layout = Layout([BASE, WEIGHT, MEAN, BIAS])
    assert layout.segments == (WEIGHT, BIAS, MEAN, BASE)
    assert (layout.parameters, layout.exchanged, layout.size) == (16, 20, 30)
    assert Layout([WEIGHT, MEAN]).exchanged == 16
    with pytest.raises(LayoutError, match="nothing to average"):
        Layout([BASE])


def test_what_is_frozen_makes_another_layout_of_the_same_contents():
    thawed = replace(BASE, kind="parameter")
    ours, all_trained = Layout([BASE, WEIGHT, MEAN]), Layout([thawed, WEIGHT, MEAN])
    other = Layout([thawed, replace(WEIGHT, kind="frozen"), MEAN])
    assert len({ours.fingerprint, all_trained.fingerprint, other.fingerprint}) == 3
    assert (
        ours.contents_fingerprint
        == other.contents_fingerprint
        == all_trained.contents_fingerprint
        == all_trained.fingerprint
    )
    assert Layout([WEIGHT, MEAN]).contents_fingerprint != ours.contents_fingerprint
    for here, there, sentence in (
        (
            ours,
            all_trained,
            "Tensor 'base.weight' is frozen here and trained there: freeze the same ones on every node",
        ),
        (
            all_trained,
            ours,
            "Tensor 'base.weight' is trained here and frozen there: freeze the same ones on every node",
        ),
        (ours, other, "Tensor 'net.0.weight' is trained here and frozen there: freeze"),
    ):
        assert here.difference(travelled(there)).startswith(sentence)


def test_the_fingerprint_tells_every_field_and_the_order_apart():
    changed = [
        [WEIGHT, BIAS],
        [BIAS, WEIGHT, MEAN],
        [Segment("other", (4, 3), "float32", "parameter"), BIAS, MEAN],
        [Segment("net.0.weight", (3, 4), "float32", "parameter"), BIAS, MEAN],
        [Segment("net.0.weight", (12,), "float32", "parameter"), BIAS, MEAN],
        [Segment("net.0.weight", (4, 3), "bfloat16", "parameter"), BIAS, MEAN],
        [WEIGHT, BIAS, Segment("net.1.running_mean", (4,), "float32", "parameter")],
    ]
    ours = Layout([WEIGHT, BIAS, MEAN])
    assert Layout([WEIGHT, MEAN, BIAS]).fingerprint == ours.fingerprint
    assert len({ours.fingerprint, *(Layout(other).fingerprint for other in changed)}) == 1 + len(changed)
    assert len(ours.fingerprint) == 32
    for other in changed:
        assert ours.difference(Layout(other)) != ""


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ([WEIGHT, BIAS, MEAN], ""),
        ([WEIGHT, MEAN], "Tensor 'net.0.bias' exists here and not there."),
        ([WEIGHT, BIAS], "Tensor 'net.1.running_mean' exists here and not there."),
        (
            [WEIGHT, Segment("extra", (1,), "float32", "parameter"), BIAS, MEAN],
            "Tensor 'extra' exists there and not here.",
        ),
        (
            [WEIGHT, BIAS, MEAN, Segment("late", (1,), "float32", "buffer")],
            "Tensor 'late' exists there and not here.",
        ),
        ([BIAS, WEIGHT, MEAN], "Tensor 1 is 'net.0.weight' here and 'net.0.bias' there."),
        (
            [WEIGHT, Segment("net.0.bias", (5,), "float32", "parameter"), MEAN],
            "Tensor 'net.0.bias' has shape (4,) here and (5,) there.",
        ),
        (
            [WEIGHT, Segment("net.0.bias", (4,), "bfloat16", "parameter"), MEAN],
            "Tensor 'net.0.bias' has dtype float32 here and bfloat16 there.",
        ),
    ],
)
def test_a_difference_names_the_first_one(theirs, sentence):
    ours, other = Layout([WEIGHT, BIAS, MEAN]), Layout(theirs)
    assert ours.difference(other) == sentence
    assert ours.difference(travelled(other)) == sentence


def large(count: int, last: str = "float32") -> Layout:
    given = [Segment(f"blocks.{i}.attention.weight", (64, 64), "float32", "parameter") for i in range(count - 1)]
    return Layout([*given, Segment("head", (7,), last, "parameter")])


def test_a_cut_summary_says_nothing_about_what_it_left_out():
    there = travelled(large(6000, last="bfloat16"))
    assert 500 < len(there.segments) < there.count == 6000
    same_head = large(6000).difference(there)
    assert same_head.startswith(f"The first {len(there.segments)} tensors are the same and a later one differs")
    assert large(6000, last="bfloat16").difference(there) == ""
    # A tensor of ours that is not among those sent may well exist there.
    moved = Layout([Segment("head", (7,), "float32", "parameter"), *large(6000).segments[:-1]])
    assert moved.difference(there) == "Tensor 1 is 'head' here and 'blocks.0.attention.weight' there."
    assert large(10).difference(there) == "Tensor 'blocks.9.attention.weight' exists there and not here."


@given(layouts)
def test_a_summary_survives_the_wire(layout):
    summary = travelled(layout)
    assert summary == LayoutSummary(layout.fingerprint, layout.size, len(layout.segments), layout.segments)
    assert layout.difference(summary) == ""


@given(layouts, layouts)
def test_a_difference_is_empty_exactly_when_the_layouts_are_equal(ours, theirs):
    assert (ours.difference(theirs) == "") == (ours == theirs) == (ours.fingerprint == theirs.fingerprint)


def test_a_name_from_a_stranger_cannot_write_to_the_terminal():
    there = Layout([Segment("\x1b[2J" + "x" * 400, (1,), "float32", "parameter")])
    sentence = Layout([WEIGHT]).difference(travelled(there))
    assert sentence.isprintable()
    assert len(sentence) < 200


PRINT = "0" * 32


@pytest.mark.parametrize(
    "summary",
    [
        None,
        "text",
        (PRINT, 1, 1),
        ("F" * 32, 1, 0, ()),
        (b"0" * 32, 1, 0, ()),
        (PRINT, True, 0, ()),
        (PRINT, -1, 0, ()),
        (PRINT, 1 << 60, 0, ()),
        (PRINT, 1, 0, (("a", (1,), "float32", False),)),
        (PRINT, 1, 1, (("a" * 513, (1,), "float32", False),)),
        (PRINT, 1, 1, (("a", (1,), "int64", False),)),
        (PRINT, 1, 1, (("a", (1,), ["float32"], False),)),
        (PRINT, 1, 1, (("a", (1,), "float32", 0),)),
        (PRINT, 1, 1, (("a", (1.0,), "float32", False),)),
        (PRINT, 1, 1, (("a", (True,), "float32", False),)),
        (PRINT, 1, 1, (("a", (1,) * 65, "float32", False),)),
        (PRINT, 1, 1, (("a", 3, "float32", False),)),
        (PRINT, 1, 5000, (("a", (1,), "float32", False),) * 4097),
        (PRINT, 1, 200, (("a" * 500, (1,), "float32", False),) * 200),
    ],
)
def test_a_summary_that_no_peer_sends_is_refused(summary):
    with pytest.raises(ProtocolError):
        Layout.parse(summary)


@pytest.mark.parametrize(
    "given",
    [
        [],
        [Segment("empty", (0, 5), "float32", "parameter")],
        [WEIGHT, WEIGHT],
        [Segment("z", (2,), "complex64", "parameter")],
        [Segment("n", (2,), "int64", "buffer")],
    ],
)
def test_what_cannot_be_averaged_is_refused_in_a_sentence(given):
    with pytest.raises(LayoutError, match=r"\.$"):
        Layout(given)
