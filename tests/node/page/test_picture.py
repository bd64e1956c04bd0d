"""The page's view of a swarm: its rows keep what members last reported, and its curves stay within their bound."""

import json
import math

import pytest

from gossip.effects import MemberState
from gossip.ids import Address, MemberRecord
from node.observe.page.picture import MAX_CURVES, MAX_POINTS, MAX_ROWS, OLD_S, Curve, SwarmPicture

ME = bytes(16)


def member(number, **more):
    made = MemberRecord(number.to_bytes(16), b"", 1, address=Address("127.0.0.1", 7000 + number % 1000), ready=True)
    return MemberRecord(**{name: getattr(made, name) for name in made.__slots__} | more)


def looked(picture, others=(), now=100.0, run=b"", **own):
    members = [(member(0), MemberState.ALIVE)] + [
        one if isinstance(one, tuple) else (one, MemberState.ALIVE) for one in others
    ]
    picture.update(members, {"steps": 5, "loss": 1.0, "bytes_sent": 0, "bytes_received": 0} | own, now, run)
    return {row["id"]: row for row in picture.rows}


def test_a_member_that_was_never_asked_has_what_its_record_says():
    row = looked(SwarmPicture(ME), [member(1, steps=7, samples=28, loss=0.5)])[member(1).id.hex()]
    assert (row["steps"], row["samples"], row["loss"], row["old"], row["self"]) == (7, 28, 0.5, False, False)
    assert row["answered_s"] is None


def test_one_that_does_not_answer_keeps_its_last_row_marked_old():
    picture, other = SwarmPicture(ME), member(1)
    looked(picture, [other])
    assert picture.take_next_queries(8, 100.0) == [(other.id, "127.0.0.1:7001")]
    picture.on_answer(other.id, {"steps": 9, "samples": 36, "exchanges_done": 3}, 100.5)
    assert looked(picture, [other], 101.0)[other.id.hex()]["old"] is False
    picture.take_next_queries(8, 101.0)
    row = looked(picture, [other], 100.5 + OLD_S + 1)[other.id.hex()]
    assert (row["old"], row["steps"], row["exchanges_done"], row["answered_s"]) == (True, 9, 3, OLD_S + 1)


def test_all_figures_of_a_row_are_of_one_life():
    """A restarted node's record counts its earlier lives as well, but its answer does not."""
    picture, other = SwarmPicture(ME), member(1, steps=1000, samples=4000, loss=0.9)
    looked(picture, [other])
    picture.on_answer(other.id, {"steps": 3, "samples": 12, "loss": 0.5, "exchanges_done": 1}, 100.5)
    row = looked(picture, [other], 101.0)[other.id.hex()]
    assert (row["steps"], row["samples"], row["loss"], row["exchanges_done"]) == (3, 12, 0.5, 1)


def test_the_line_of_one_that_began_anew_begins_anew():
    picture, other = SwarmPicture(ME), member(1)
    for steps, loss in ((10, 1.0), (20, 0.5), (2, 0.4)):
        picture.on_answer(other.id, {"steps": steps, "samples": steps, "loss": loss}, 100.0 + steps)
        looked(picture, [other])
    assert picture.losses[other.id].points == [(2, 0.4)]


def test_a_member_that_was_not_asked_is_not_old():
    picture, other = SwarmPicture(ME), member(1)
    looked(picture, [other])
    picture.take_next_queries(8, 100.0)
    picture.on_answer(other.id, {"steps": 9}, 100.5)
    assert looked(picture, [other], 1000.0)[other.id.hex()]["old"] is False, "nobody watched meanwhile"


def test_a_dead_member_is_old_and_still_there():
    picture, other = SwarmPicture(ME), member(1, loss=0.25)
    looked(picture, [other])
    row = looked(picture, [(other, MemberState.DEAD)], 101.0)[other.id.hex()]
    assert (row["state"], row["old"], row["loss"]) == ("dead", True, 0.25)
    assert picture.take_next_queries(8, 101.0) == []


def test_the_members_asked_longest_ago_are_asked_first():
    picture = SwarmPicture(ME)
    looked(picture, [member(number) for number in range(1, 6)])
    first = {peer for peer, _ in picture.take_next_queries(3, 1.0)}
    second = {peer for peer, _ in picture.take_next_queries(3, 2.0)}
    assert len(first) == len(second) == 3
    assert first | second == {member(number).id for number in range(1, 6)}


def test_rates_follow_from_two_answers_and_are_unknown_where_a_count_began_anew():
    picture, other = SwarmPicture(ME), member(1)
    looked(picture, now=10.0)
    assert looked(picture, now=12.0, bytes_sent=4_000_000)[ME.hex()]["mb_s_sent"] == 2.0
    assert looked(picture, now=14.0, bytes_sent=3)[ME.hex()]["mb_s_sent"] is None
    picture.on_answer(other.id, {"samples": 100}, 14.0)
    picture.on_answer(other.id, {"samples": 140}, 16.0)
    assert looked(picture, [other], 16.0)[other.id.hex()]["samples_s"] == 20


def test_samples_a_second_are_those_of_the_last_ten_seconds():
    """The node takes a step of 100 samples every 4 s, in a swarm that trains 100 samples a second."""
    picture = SwarmPicture(ME)
    for second in range(60):
        looked(picture, now=100.0 + second, samples=100 * (second // 4), swarm_samples=100 * second)
    own, swarm = picture.own_curve.points[-1][4:]
    assert own == pytest.approx(25, rel=0.25)
    assert swarm == pytest.approx(100)
    picture.own_curve.stride = MAX_POINTS  # As after a day: the chart gets a point every few minutes.
    for second in range(60, 80):
        looked(picture, now=100.0 + second, samples=100 * (second // 4), swarm_samples=50 * second + 3_000)
    assert picture.state()["swarm_samples_s"] == pytest.approx(50), "newer than the chart's last point"
    picture.own_curve.stride = 1
    looked(picture, now=180.0, samples=0, swarm_samples=0)
    assert picture.own_curve.points[-1][4:] == (None, None), "another run begins anew"


@pytest.mark.parametrize("step_s", [0.1, 1.0, 4.0, 9.0])
def test_the_curve_of_samples_a_second_opens_without_a_spike(step_s):
    """Once, a large first step in the first second showed many times the pace that followed."""
    picture = SwarmPicture(ME)
    for second in range(60):
        done = 1000 * math.floor((second + 0.1) / step_s)
        looked(picture, now=100.0 + second, samples=done, swarm_samples=done)
    own = [point[4] for point in picture.own_curve.points]
    assert own[:10] == [None] * 10
    assert own[10] is not None
    known = [pace for pace in own if pace is not None]
    assert len(known) == 50
    assert max(known) < 2.1 * 1000 / step_s


@pytest.mark.parametrize("at", [2, 30])
def test_the_samples_of_a_run_that_is_taken_over_were_not_trained_in_that_second(at):
    """A node takes a run over when it loads a checkpoint or joins a swarm."""
    picture = SwarmPicture(ME)
    for second in range(60):
        taken_over = second >= at
        looked(
            picture, now=100.0 + second, samples=10 * second, swarm_samples=10 * second + 1_000_000 * taken_over,
            run=b"theirs" if taken_over else b"ours",
        )  # fmt: skip
    known = [point[5] for point in picture.own_curve.points if point[5] is not None]
    assert known
    assert max(known) == pytest.approx(10)


HOSTILE = {
    "steps": "<img src=x onerror=alert(1)>", "loss": math.nan, "samples": 10**400, "exchanges_done": True,
    "bytes_sent": math.inf, "version": "</script>" * 1000, "consensus_distance": [1],
    "mixed": [("x" * 9999, {}, None)] * 9999,
    "failures": "no rows", "swarm_samples": {"a": 1},
}  # fmt: skip


def test_whatever_a_member_says_a_row_has_short_texts_and_numbers_that_json_has():
    picture, other = SwarmPicture(ME), member(1, loss=math.nan)
    for now, sent in ((1.0, -1.7e308), (2.0, 1.7e308)):
        picture.on_answer(other.id, HOSTILE | {"bytes_received": sent}, now)
        row = looked(picture, [other], now)[other.id.hex()]
    assert (row["steps"], row["samples"]) == (0, 0)
    assert row["loss"] is row["exchanges_done"] is row["bytes_sent"] is None
    assert len(row["version"]) == 40
    assert len(json.dumps(picture.state(), allow_nan=False)) < 3_000
    json.dumps(picture.history(), allow_nan=False)


def test_ten_thousand_members_make_no_more_rows_and_lines_than_are_shown():
    picture = SwarmPicture(ME)
    for turn in range(3):  # New identities each time, as a Sybil attacker makes them.
        others = [member(1 + turn * 5_000 + number, loss=1.0) for number in range(5_000)]
        looked(picture, others, 100.0 + turn)
        picture.take_next_queries(10_000, 100.0 + turn)
        for other in others[:MAX_ROWS]:
            picture.on_answer(other.id, {"steps": 1}, 100.0 + turn)
    looked(picture, others, 200.0)
    assert len(picture.rows) == MAX_ROWS
    assert picture.hidden == 5_001 - MAX_ROWS
    assert len(picture.losses) <= MAX_CURVES
    assert max(map(len, (picture.answers, picture.queried_at))) <= MAX_ROWS
    looked(picture, [(other, MemberState.SUSPECT) for other in others[:50]] + others[50:150], 201.0)
    assert len(picture.losses) <= MAX_CURVES, "others are the first now"


@pytest.mark.parametrize("count", [10, MAX_POINTS - 1, 10 * MAX_POINTS + 3, 1000 * MAX_POINTS])
def test_a_line_keeps_its_whole_length_in_so_many_points(count):
    line = Curve()
    for number in range(count):
        line.add(number, 0.5)
    steps = [point[0] for point in line.points]
    assert len(steps) <= MAX_POINTS
    assert len(steps) >= min(count, MAX_POINTS // 2) - 1
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] >= count - 2 * line.stride
