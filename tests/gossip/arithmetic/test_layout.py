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


def test_parameters_come_first_and_what_is_frozen_last_so_that_each_outer_step_and_exchange_has_a_prefix():
    layout = Layout([BASE, WEIGHT, MEAN, BIAS])
    assert layout.segments == (WEIGHT, BIAS, MEAN, BASE)
    assert (layout.parameters, layout.exchanged, layout.size) == (16, 20, 30)


def test_what_is_frozen_makes_another_layout_of_the_same_contents():
    thawed = replace(BASE, kind="parameter")
    ours, all_trained = Layout([BASE, WEIGHT, MEAN]), Layout([thawed, WEIGHT, MEAN])
    other = Layout([thawed, replace(WEIGHT, kind="frozen"), MEAN])
    assert len({ours.fingerprint, all_trained.fingerprint, other.fingerprint}) == 3
    contents = {layout.contents_fingerprint for layout in (ours, other, all_trained)}
    assert contents == {all_trained.fingerprint}
    assert Layout([WEIGHT, MEAN]).contents_fingerprint not in contents
    learned_mean = Layout([BASE, WEIGHT, replace(MEAN, kind="parameter")])
    for here, there, sentence in (
        (ours, all_trained, "'base.weight' is frozen here and trained there: freeze the same ones on every node"),
        (all_trained, ours, "'base.weight' is trained here and frozen there: freeze the same ones on every node"),
        (ours, other, "'net.0.weight' is trained here and frozen there: freeze"),
        (ours, learned_mean, "'net.1.running_mean' is a statistic that is averaged here and trained there: freeze"),
    ):
        assert here.fingerprint != there.fingerprint
        assert here.difference(travelled(there)).startswith(f"Tensor {sentence}")


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ([WEIGHT, MEAN, BIAS], ""),
        ([WEIGHT, MEAN], "Tensor 'net.0.bias' exists here and not there."),
        ([WEIGHT, BIAS], "Tensor 'net.1.running_mean' exists here and not there."),
        ([WEIGHT, replace(BIAS, name="extra"), BIAS, MEAN], "Tensor 'extra' exists there and not here."),
        ([WEIGHT, BIAS, MEAN, replace(MEAN, name="late")], "Tensor 'late' exists there and not here."),
        ([replace(WEIGHT, name="other"), BIAS, MEAN], "Tensor 'other' exists there and not here."),
        ([BIAS, WEIGHT, MEAN], "Tensor 1 is 'net.0.weight' here and 'net.0.bias' there."),
        ([WEIGHT, replace(BIAS, shape=(5,)), MEAN], "Tensor 'net.0.bias' has shape (4,) here and (5,) there."),
        ([replace(WEIGHT, shape=(3, 4)), BIAS, MEAN], "Tensor 'net.0.weight' has shape (4, 3) here and (3, 4) there."),
        ([replace(WEIGHT, shape=(12,)), BIAS, MEAN], "Tensor 'net.0.weight' has shape (4, 3) here and (12,) there."),
        (
            [WEIGHT, replace(BIAS, dtype="bfloat16"), MEAN],
            "Tensor 'net.0.bias' has dtype float32 here and bfloat16 there.",
        ),
    ],
)
def test_a_difference_names_the_first_one_and_shows_in_the_fingerprint(theirs, sentence):
    ours, other = Layout([WEIGHT, BIAS, MEAN]), Layout(theirs)
    assert ours.difference(other) == sentence
    assert ours.difference(travelled(other)) == sentence
    assert (ours.fingerprint == other.fingerprint) == (sentence == "")


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
NO_SEGMENTS = [
    ("a" * 513, (1,), "float32", False), ("a", (1,), "int64", False), ("a", (1,), ["float32"], False),
    ("a", (1,), "float32", 0), ("a", (1.0,), "float32", False), ("a", (True,), "float32", False),
    ("a", (1,) * 65, "float32", False), ("a", 3, "float32", False),
]  # fmt: skip


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
        *[(PRINT, 1, 1, (segment,)) for segment in NO_SEGMENTS],
        (PRINT, 1, 5000, (("a", (1,), "float32", False),) * 4097),
        (PRINT, 1, 200, (("a" * 500, (1,), "float32", False),) * 200),
    ],
)
def test_a_summary_that_no_peer_sends_is_refused(summary):
    with pytest.raises(ProtocolError):
        Layout.parse(summary)


@pytest.mark.parametrize("given", [
    [], [replace(WEIGHT, shape=(0, 5))], [WEIGHT, WEIGHT], [replace(WEIGHT, dtype="complex64")],
    [replace(MEAN, dtype="int64")], [BASE],
])  # fmt: skip
def test_what_cannot_be_averaged_is_refused_in_a_sentence(given):
    with pytest.raises(LayoutError, match=r"\.$"):
        Layout(given)
