"""The expected progress of each member, as an onlooker computes it."""

from types import SimpleNamespace
from typing import Any

import pytest

from gossip.exchange.progress import MAX_EXCHANGE_INTERVALS
from tests.harness.configs import tuned
from tests.simulation.truth import Truth

EVERY, SAMPLES = 4, 16


class Member:
    def __init__(self, number: int) -> None:
        self.number, self.samples, self.gone = number, SAMPLES, False
        self.peer = SimpleNamespace(view=SimpleNamespace(run_id=b"run"))


def onlooker(members: int) -> tuple[Truth, list[Any]]:
    world = SimpleNamespace(network=SimpleNamespace(sides=None), config=tuned(mix_every_steps=EVERY))
    truth, hosts = Truth(world), [Member(number) for number in range(members)]
    for host in hosts:
        truth.place(host)
    return truth, hosts


def train(truth: Truth, host: Any, steps: int) -> None:
    for _ in range(steps):
        truth.train(host, SAMPLES)


def test_members_that_mix_often_enough_are_expected_at_the_truth():
    truth, (fast, slow) = onlooker(2)
    for _ in range(10):
        train(truth, fast, EVERY)
        train(truth, slow, 1)
        truth.mix((fast, slow))
    assert truth.expected(fast) == truth.expected(slow) == truth.of(fast) == 10 * (EVERY + 1) * SAMPLES


def test_one_mix_brings_two_intervals_at_most_and_keeps_the_sum():
    truth, (fast, slow) = onlooker(2)
    train(truth, fast, 100)
    truth.mix((fast, slow))
    assert truth.of(slow) == 100 * SAMPLES
    assert truth.expected(slow) == MAX_EXCHANGE_INTERVALS * EVERY * SAMPLES * 2
    assert truth.expected(fast) + truth.expected(slow) == 2 * truth.of(fast)


def test_a_member_that_is_gone_does_not_count():
    truth, (one, other) = onlooker(2)
    other.gone = True
    truth.gone(other)
    train(truth, one, 1)
    assert truth.expected(one) == truth.of(one) == SAMPLES


@pytest.mark.parametrize("steps", [0, 100])
def test_a_newcomer_is_as_unsure_as_the_others_are_apart(steps):
    truth, (fast, slow) = onlooker(2)
    train(truth, fast, steps)
    newcomer = Member(2)
    truth.place(newcomer)
    assert truth.expected(newcomer) == truth.expected(slow)
    assert truth.of(newcomer) == truth.of(fast)
    assert truth.unsure == 2 * steps * SAMPLES / 2
