"""Who failed sits out: how long, whom that binds, and what ends it."""

from __future__ import annotations

from gossip.selection.back_off import MAX_BENCHED, PARDON_S, SILENT_SHARE, BackOff
from tests.gossip.exchange.sides import A, B, C, D


def test_a_bench_doubles_to_sixteen_times_and_one_success_ends_it():
    bench, now, waits = BackOff(30.0), 0.0, []
    for _ in range(7):
        bench.note_failure(A, now)
        until = bench.benched[A].until
        assert bench.is_benched(A, until - 0.01)
        assert not bench.is_benched(A, until)
        waits.append(until - now)
        now = until
    assert waits == [30, 60, 120, 240, 480, 480, 480]
    bench.note_success(A)
    bench.note_failure(A, now)
    assert bench.benched[A].until == now + 30


def test_silence_costs_a_quarter_and_ends_with_a_sign_of_life():
    bench = BackOff(30.0)
    bench.note_failure(A, 0.0, silent=True)
    assert bench.is_benched(A, SILENT_SHARE * 30 - 0.01)
    assert not bench.is_benched(A, SILENT_SHARE * 30)
    assert not bench.is_shunned(A, 1.0), "whoever was silent is heard"
    bench.note_sign_of_life(A)
    assert not bench.is_benched(A, 1.0)


def test_a_stream_that_stopped_is_not_undone_by_a_new_link_and_binds_both_ways():
    bench = BackOff(30.0)
    bench.note_failure(A, 0.0)
    bench.note_sign_of_life(A)
    assert bench.is_benched(A, 29.9)
    assert bench.is_shunned(A, 29.9)
    assert not bench.is_shunned(A, 30.0)


def test_silence_does_not_shorten_what_somebody_sits_out_for_worse():
    bench = BackOff(30.0)
    bench.note_failure(A, 0.0)
    bench.note_failure(A, 1.0, silent=True)
    assert bench.is_shunned(A, 29.9)
    bench.note_failure(A, 40.0, silent=True)
    assert not bench.is_shunned(A, 41.0), "that was before"


def test_the_bench_is_bounded_and_forgets_who_failed_longest_ago():
    bench = BackOff(30.0)
    peers = [number.to_bytes(16, "big") for number in range(MAX_BENCHED + 5)]
    for number, peer in enumerate(peers):
        bench.note_failure(peer, float(number))
        bench.note_failure(peers[0], float(number))
    assert len(bench.benched) == MAX_BENCHED
    assert peers[0] in bench.benched
    assert peers[1] not in bench.benched


def test_those_that_failed_longest_ago_are_pardoned_first_and_nobody_at_once():
    bench = BackOff(30.0)
    for peer, when in ((A, 0.0), (B, 1.0), (C, 2.0), (A, 3.0), (D, 4.0)):
        bench.note_failure(peer, when)
    assert bench.pardonable(3.0 + PARDON_S) == [B, C, A]
