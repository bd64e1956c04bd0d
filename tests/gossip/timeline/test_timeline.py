"""Tests of timelines: the file, its bounds, a node's spans, and merging with aligned clocks."""

import json
import threading

import pytest

from gossip.errors import ConfigError
from gossip.timeline import NodeTimeline, TimelineWriter, merge
from gossip.timeline.merge import read_timeline
from gossip.timeline.recorder import MAX_TRACKS

A, B, C = "aa" * 16, "bb" * 16, "cc" * 16


def events(path):
    return json.loads(path.read_text())


def spans(found, name=None):
    return [one for one in found if one["ph"] == "X" and name in (None, one["name"])]


def test_the_file_is_json_whose_times_are_microseconds(tmp_path):
    with TimelineWriter(tmp_path / "one.json") as writer:
        node = NodeTimeline(writer, 7, "node")
        node.record_span("loop", "train", 1.0, 1.5, step=3)
        node.record_event("joined", 2.0, "loop")
    named, track, order, span, mark = events(tmp_path / "one.json")
    assert named["args"] == {"name": "node"}
    assert track["args"] == {"name": "loop"}
    assert order["name"] == "thread_sort_index"
    assert (span["ts"], span["dur"], span["args"], span["pid"], span["tid"]) == (1e6, 5e5, {"step": 3}, 7, track["tid"])
    assert (mark["ph"], mark["ts"]) == ("i", 2e6)


def test_an_empty_timeline_is_json(tmp_path):
    TimelineWriter(tmp_path / "none.json").close()
    assert events(tmp_path / "none.json") == []


def test_events_beyond_the_bound_are_counted_and_not_written(tmp_path):
    writer = TimelineWriter(tmp_path / "one.json", max_bytes=1_000)
    for number in range(100):
        writer.write(1, "loop", "X", "train", number, dur=1.0)
    assert writer.close() is None
    assert (tmp_path / "one.json").stat().st_size <= 1_010
    written = len(spans(events(tmp_path / "one.json")))
    assert written > 5
    assert writer.dropped == 100 - written


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot write the timeline .*No such file"):
        TimelineWriter(tmp_path / "missing" / "one.json")


def test_threads_may_write_at_the_same_time(tmp_path):
    with TimelineWriter(tmp_path / "one.json") as writer:
        threads = [
            threading.Thread(target=lambda: [writer.write(1, f"track {n}", "X", "x", n) for n in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = events(tmp_path / "one.json")
    assert len(spans(found)) == 800
    names = [one["args"]["name"] for one in found if one["name"] == "thread_name"]
    assert sorted(names) == sorted({f"track {n}" for n in range(200)}), "each track is named once"


# A node --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path):
    with TimelineWriter(tmp_path / "node.json") as writer:
        made = NodeTimeline(writer, 1, "node")
        made.found = lambda: (writer.close(), events(tmp_path / "node.json"))[1]
        yield made


def test_a_step_is_a_span_from_boundary_to_boundary(node):
    node.record_step(1, 10.0, 10.1, copies=1)
    node.record_step(2, 10.5, 10.5001)
    node.record_step(3, 11.0, 11.2)
    found = node.found()
    assert [(one["ts"], one["dur"]) for one in spans(found, "train")] == [
        (pytest.approx(10.1e6), pytest.approx(0.4e6)),
        (pytest.approx(10.5001e6), pytest.approx(0.4999e6)),
    ]
    assert [one["args"] for one in spans(found, "boundary")] == [{"step": 1, "copies": 1}, {"step": 3}], (
        "a short call without a visit is no span"
    )


def test_time_spent_otherwise_is_no_training(node):
    node.record_step(1, 1.0, 1.0)
    node.record_time("settle", 2.0, 5.0)
    node.record_step(2, 6.0, 6.0)
    found = node.found()
    assert [one["ts"] for one in spans(found, "settle")] == [2e6]
    assert [(one["ts"], one["dur"]) for one in spans(found, "train")] == [(5e6, 1e6)]


def test_exchanges_at_the_same_time_are_on_tracks_of_their_own(node):
    node.record_exchange(1, (A, B), 1.0, 1.2, 2.0)
    node.record_exchange(2, (A, C), 1.5, 1.6, 2.5)
    node.record_exchange(3, (A, B), 2.1, 2.2, 3.0)
    found = node.found()
    names = {one["tid"]: one["args"]["name"] for one in found if one["name"] == "thread_name"}
    tracks = [names[one["tid"]] for one in spans(found) if one["name"].startswith("exchange")]
    assert tracks == ["exchanges 1", "exchanges 2", "exchanges 1"]


def test_tracks_are_bounded(node):
    for session in range(3 * MAX_TRACKS):
        node.record_exchange(session, (A, B), 1.0, None, 2.0, "busy")
    names = [one for one in node.found() if one["name"] == "thread_name"]
    assert len(names) == MAX_TRACKS


def test_a_failure_has_its_reason_and_no_arrow(node):
    node.record_exchange(1, (A, B), 1.0, 1.2, 2.0, "late")
    node.record_exchange(2, (A,), 3.0, None, 4.0, "unanswered")
    found = node.found()
    assert [one["name"] for one in spans(found) if one["name"] != "streams"] == [
        "failed: late with bbbbbbbb",
        "failed: unanswered with no member",
    ]
    assert not [one for one in found if one["ph"] in "sf"]


# Several nodes -------------------------------------------------------------------------------------------------------


def write(path, me, exchanges, shift_s=0.0):
    """Write the timeline of a node whose clock is ahead by ``shift_s``."""
    with TimelineWriter(path) as writer:
        node = NodeTimeline(writer, 1, me[:8])
        for session, other, begin_s, end_s in exchanges:
            begin_s, end_s = begin_s + shift_s, end_s + shift_s
            node.record_exchange(session, (me, other), begin_s - 0.01, begin_s, end_s)


def test_clocks_are_aligned_by_shared_exchanges_also_through_others(tmp_path):
    files = [tmp_path / f"{name}.json" for name in "abc"]
    write(files[0], A, [(n, B, n, n + 0.5) for n in range(9)])
    write(files[1], B, [(n, A, n + 0.01, n + 0.51) for n in range(9)] + [(99, C, 20.0, 20.4)], shift_s=-30.0)
    write(files[2], C, [(99, B, 20.0, 20.4)], shift_s=3600.0)
    merged = merge(files, tmp_path / "all.json")
    assert merged.shifts_s == (0.0, pytest.approx(29.99), pytest.approx(-3600.01))
    found = events(tmp_path / "all.json")
    assert len(found) == merged.events == sum(len(events(file)) for file in files)
    begins = [one["ts"] / 1e6 for one in spans(found, "streams") if one["args"]["exchange"].startswith("63-")]
    assert begins[0] == pytest.approx(begins[1], abs=0.02)
    assert len({one["pid"] for one in found}) == 3
    arrows = [one for one in found if one["ph"] in "sf"]
    assert {one["ph"] for one in arrows if one["id"].startswith("3-")} == {"s", "f"}


def test_a_delayed_exchange_does_not_move_a_clock(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write(files[0], A, [(n, B, n, n + 0.5) for n in range(9)])
    write(files[1], B, [(n, A, n, n + (30.0 if n == 4 else 0.5)) for n in range(9)])
    assert merge(files, tmp_path / "all.json").shifts_s == (0.0, 0.0)


def test_a_stranger_keeps_its_clock(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write(files[0], A, [(1, B, 1.0, 2.0)])
    write(files[1], C, [(2, B, 1.0, 2.0)], shift_s=100.0)
    assert merge(files, tmp_path / "all.json").shifts_s == (0.0, None)
    assert max(one["ts"] for one in spans(events(tmp_path / "all.json"), "streams")) == pytest.approx(101e6)


def test_the_file_of_a_killed_node_is_read_to_its_last_whole_event(tmp_path):
    write(tmp_path / "a.json", A, [(n, B, n, n + 0.5) for n in range(9)])
    whole = (tmp_path / "a.json").read_text()
    (tmp_path / "cut.json").write_text(whole[: whole.rindex('"dur"')])
    assert 0 < len(read_timeline(tmp_path / "cut.json")) < len(read_timeline(tmp_path / "a.json"))


def test_a_merged_file_keeps_its_nodes_apart_when_it_is_merged_again(tmp_path):
    files = [tmp_path / f"{name}.json" for name in "abc"]
    for file, me in zip(files, (A, B, C), strict=True):
        write(file, me, [(1, A if me == B else B, 1.0, 2.0)])
    (tmp_path / "killed.json").touch()  # Its process wrote nothing.
    merge([files[0], tmp_path / "killed.json", files[1]], tmp_path / "ab.json")
    merge([tmp_path / "ab.json", files[2]], tmp_path / "abc.json")
    assert len({one["pid"] for one in events(tmp_path / "abc.json")}) == 3


@pytest.mark.parametrize(
    "text", ["nothing", "{}", "[1]", "[\n1\n]", '[\n{"pid":"x"}\n]', "[\n{,\n{}\n]", '[\n{"pid":1,"ts":"x"}\n]']
)
def test_another_file_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is no timeline: give files that --trace has written"):
        merge([tmp_path / "a.json"], tmp_path / "all.json")


def test_a_file_that_is_not_there_or_is_the_result_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no timeline to merge"):
        merge([], tmp_path / "all.json")
    with pytest.raises(ConfigError, match="Cannot read the timeline"):
        merge([tmp_path / "a.json"], tmp_path / "all.json")
    with pytest.raises(ConfigError, match="name another file for the result"):
        merge([tmp_path / "a.json"], tmp_path / "a.json")
