"""Who failed sits out: how long, whom that binds, and what ends it."""

from __future__ import annotations

from gossip.selection.back_off import BENCHED, PARDON_S, SILENCE, BackOff
from tests.gossip.exchange.sides import A, B, C, D


def test_a_bench_doubles_to_sixteen_times_and_one_success_ends_it():
    bench, now, waits = BackOff(30.0), 0.0, []
    for _ in range(7):
        bench.failed(A, now)
        until = bench.benched[A].until
        assert bench.sits_out(A, until - 0.01)
        assert not bench.sits_out(A, until)
        waits.append(until - now)
        now = until
    assert waits == [30, 60, 120, 240, 480, 480, 480]
    bench.succeeded(A)
    bench.failed(A, now)
    assert bench.benched[A].until == now + 30


def test_silence_costs_a_quarter_and_ends_with_a_sign_of_life():
    bench = BackOff(30.0)
    bench.failed(A, 0.0, silent=True)
    assert bench.sits_out(A, SILENCE * 30 - 0.01)
    assert not bench.sits_out(A, SILENCE * 30)
    assert not bench.shuns(A, 1.0), "whoever was silent is heard"
    bench.answers(A)
    assert not bench.sits_out(A, 1.0)


def test_a_stream_that_stopped_is_not_undone_by_a_new_link_and_binds_both_ways():
    bench = BackOff(30.0)
    bench.failed(A, 0.0)
    bench.answers(A)
    assert bench.sits_out(A, 29.9)
    assert bench.shuns(A, 29.9)
    assert not bench.shuns(A, 30.0)


def test_silence_does_not_shorten_what_somebody_sits_out_for_worse():
    bench = BackOff(30.0)
    bench.failed(A, 0.0)
    bench.failed(A, 1.0, silent=True)
    assert bench.shuns(A, 29.9)
    bench.failed(A, 40.0, silent=True)
    assert not bench.shuns(A, 41.0), "that was before"


def test_the_bench_is_bounded_and_forgets_who_failed_longest_ago():
    bench = BackOff(30.0)
    peers = [number.to_bytes(16, "big") for number in range(BENCHED + 5)]
    for number, peer in enumerate(peers):
        bench.failed(peer, float(number))
        bench.failed(peers[0], float(number))
    assert len(bench.benched) == BENCHED
    assert peers[0] in bench.benched
    assert peers[1] not in bench.benched


def test_those_that_failed_longest_ago_are_pardoned_first_and_nobody_at_once():
    bench = BackOff(30.0)
    for peer, when in ((A, 0.0), (B, 1.0), (C, 2.0), (A, 3.0), (D, 4.0)):
        bench.failed(peer, when)
    assert bench.pardonable(3.0 + PARDON_S) == [B, C, A]
