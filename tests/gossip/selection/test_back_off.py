"""Back-off: how long it lasts, which members it binds, and what ends it."""

from gossip.selection.back_off import MAX_FAILED, RETRY_AFTER_S, SILENT_FACTOR, BackOff
from tests.gossip.exchange.sides import A, B, C, D


def test_a_back_off_doubles_to_sixteen_times_and_one_success_ends_it():
    back_off, now, waits = BackOff(30.0), 0.0, []
    for _ in range(7):
        back_off.note_failure(A, now)
        until = back_off.failed[A].until
        assert back_off.is_in_back_off(A, until - 0.01)
        assert not back_off.is_in_back_off(A, until)
        waits.append(until - now)
        now = until
    assert waits == [30, 60, 120, 240, 480, 480, 480]
    back_off.note_success(A)
    back_off.note_failure(A, now)
    assert back_off.failed[A].until == now + 30


def test_silence_costs_a_quarter_and_ends_with_a_sign_of_life():
    back_off = BackOff(30.0)
    back_off.note_failure(A, 0.0, silent=True)
    assert back_off.is_in_back_off(A, SILENT_FACTOR * 30 - 0.01)
    assert not back_off.is_in_back_off(A, SILENT_FACTOR * 30)
    assert not back_off.is_shunned(A, 1.0), "whoever was silent is heard"
    back_off.note_sign_of_life(A)
    assert not back_off.is_in_back_off(A, 1.0)


def test_a_stream_that_stopped_is_not_undone_by_a_new_link_and_binds_both_ways():
    back_off = BackOff(30.0)
    back_off.note_failure(A, 0.0)
    back_off.note_sign_of_life(A)
    assert back_off.is_in_back_off(A, 29.9)
    assert back_off.is_shunned(A, 29.9)
    assert not back_off.is_shunned(A, 30.0)


def test_silence_does_not_shorten_a_shunning():
    back_off = BackOff(30.0)
    back_off.note_failure(A, 0.0)
    back_off.note_failure(A, 1.0, silent=True)
    assert back_off.is_shunned(A, 29.9)
    back_off.note_failure(A, 40.0, silent=True)
    assert not back_off.is_shunned(A, 41.0), "that was before"


def test_the_table_is_bounded_and_forgets_who_failed_longest_ago():
    back_off = BackOff(30.0)
    peers = [number.to_bytes(16, "big") for number in range(MAX_FAILED + 5)]
    for number, peer in enumerate(peers):
        back_off.note_failure(peer, float(number))
        back_off.note_failure(peers[0], float(number))
    assert len(back_off.failed) == MAX_FAILED
    assert peers[0] in back_off.failed
    assert peers[1] not in back_off.failed


def test_those_that_failed_longest_ago_are_asked_again_first_and_nobody_at_once():
    back_off = BackOff(30.0)
    for peer, when in ((A, 0.0), (B, 1.0), (C, 2.0), (A, 3.0), (D, 4.0)):
        back_off.note_failure(peer, when)
    assert back_off.last_resorts(3.0 + RETRY_AFTER_S) == [B, C, A]
