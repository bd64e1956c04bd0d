"""Random schedules: all claims hold in a thousand of them, and they find planted bugs."""

import pytest

from tests.harness.hashing import otherwise_hashed
from tests.harness.marks import rest_is_slow
from tests.simulation.bounds import BOUNDS, tables
from tests.simulation.explore import ENOUGH, find, outcome
from tests.simulation.large import Large
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import Schedule, play
from tests.simulation.transitions import watched

SEEDS = 1000
BLOCKS = 20
QUICK, QUICK_MUTANTS = 2, 4  # blocks, and planted bugs, that make test plays; make test-slow plays the others
JUDGED = {3400: "an answer behind a delay spike", 85937: "an inviter that lives again without its memory"}
FOUND = {
    368: "members that went to and fro between two runs once a second",
    21842: "a node that served no run that it left alone",
    30351: "a loop that stood still and began mix after mix",
    68594: "the same, with three others",
    2003411: "members that swapped two runs for ever, in phase",
}
JUDGED_LARGE = {
    1005: "numbers that must go round a ring whose fast members are neighbours",
    1008: "a newcomer whose only contact crashed after the last fault",
}
LARGE = {0: "hours", 1: "runs", 6: "hours", 14: "hours", 2: "hours"}  # kinds by seed, a second or two each
SAME = (4, 9, 23)  # seeds of schedules that are played in two processes


@pytest.mark.parametrize("block", rest_is_slow(range(BLOCKS), QUICK))
def test_what_is_promised_holds_in_random_schedules(block):
    share = SEEDS // BLOCKS
    outcomes = [outcome(seed) for seed in range(block * share, (block + 1) * share)]
    failed = [f"{one.detail}\n    python -m tests.simulation {one.seed}" for one in outcomes if one.claim]
    assert not failed, "\n".join(failed)
    assert sum(one.exchanges for one in outcomes) > 4 * share, "or they show nothing"


@pytest.mark.parametrize("seed", JUDGED)
def test_the_judge_asks_for_nothing_that_cannot_be(seed):
    assert not outcome(seed, overlaps=False).claim, JUDGED[seed]


@pytest.mark.slow
@pytest.mark.parametrize("seed", JUDGED_LARGE)
def test_the_judge_of_large_schedules_asks_for_nothing_that_cannot_be(seed):
    assert not outcome(seed, large=True).claim, JUDGED_LARGE[seed]


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once_does_not_come_back(seed):
    assert not outcome(seed, overlaps=seed > 10**6).claim, FOUND[seed]  # earlier ones without


@pytest.mark.parametrize("seed", rest_is_slow(LARGE, QUICK))
def test_what_is_promised_holds_in_large_schedules(seed):
    with watched():
        world = Large(seed, kind=LARGE[seed]).play()
    assert world.events > 1_000


@pytest.mark.parametrize("name", rest_is_slow(MUTANTS, QUICK_MUTANTS))
def test_a_planted_bug_is_found(name):
    assert find(name) is not None, f"not within {ENOUGH} seeds"


def test_a_schedule_is_the_same_in_every_process():
    program = f"from tests.simulation.schedule import play\nprint([play(seed).digest for seed in {SAME}])"
    assert otherwise_hashed(program) == str([play(seed).digest for seed in SAME])


def test_every_bound_is_of_a_table_that_is_there():
    found: set[str] = set()
    for seed in range(30):
        for host in Schedule(seed).play().honest:
            found.update(path for path, _ in tables(host.peer))
        if set(BOUNDS) <= found:
            break
    assert set(BOUNDS) <= found
