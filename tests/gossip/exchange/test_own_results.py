"""A peer that chooses its interval mixes no more often than its exchanges can finish, even if many fail."""

from __future__ import annotations

import pytest

from gossip.codecs import COMPILED, ExchangeCost, mix_interval
from gossip.codecs.choice import NOMINAL_STEPS
from gossip.exchange.durations import LAST_RESULTS, MANY_FAILURES, OwnResults
from sim import Scenario, simulate

QUICK = ExchangeCost(1000, "int8", 1004, 0.01)


def test_two_failures_among_the_last_exchanges_count_and_older_ones_do_not():
    results = OwnResults()
    assert not results.are_failing
    for _ in range(MANY_FAILURES - 1):
        results.add(failed=True)
    assert not results.are_failing
    results.add(failed=True)
    assert results.are_failing
    for _ in range(LAST_RESULTS - 1):
        results.add(failed=False)
    assert not results.are_failing


def test_where_exchanges_fail_the_interval_is_at_least_what_it_is_at_first():
    assert mix_interval(0.1, QUICK, COMPILED, 0.02) == 2
    assert mix_interval(0.1, QUICK, COMPILED, 0.02, is_failing=True) == NOMINAL_STEPS
    assert mix_interval(0.0, QUICK, COMPILED, 0.02, is_failing=True) == NOMINAL_STEPS
    slow = ExchangeCost(1000, "int8", 1004, 1.2)
    assert mix_interval(0.1, slow, COMPILED, 0.02, is_failing=True) == mix_interval(0.1, slow, COMPILED, 0.02) == 12


@pytest.mark.parametrize(("loss", "interval"), [(0.0, 2), (0.135, NOMINAL_STEPS)])
def test_peers_whose_messages_are_lost_keep_their_first_interval(loss, interval):
    scenario = Scenario.from_mapping({
        "peers": 12, "duration_s": 25.0, "membership": {"mode": "ideal"},
        "task": {"dataset": "digits", "model": "linear"},
        "compute": {"step_s": {"kind": "uniform", "low_s": 0.095, "high_s": 0.105}},
        "network": {"latency": {"kind": "constant", "value_ms": 5}, "loss": loss, "congestion": "none"},
        "gossip": {"stall_s": 0.8},
    })  # fmt: skip
    assert simulate(scenario, progress=False).summary["interval_steps"] == interval
