"""Each node's estimate of the samples that all nodes trained: rows of docs/results/progress.md meet their bounds.

The scenarios of benchmarks/progress.py simulate the whole protocol. Scenarios that miss their bound have no test; the
page names them.
"""

import pytest

from tests.harness.marks import slow
from tests.reliability.test_reliability import load

progress = load("progress")

MOST = 0.05  # The largest error of any member, as a share of the samples that all trained.
APART = 0.02  # The largest difference between members after a cut.
LIED = 0.2  # The largest share that lying members add in a minute.


def read(name, after):
    """Return a scenario's row at a time in seconds, or its first, second, ... row."""
    rows = getattr(progress, name)(1)
    return next(row for number, row in enumerate(rows, 1) if after in (row["s"], f"row {number}"))


@pytest.mark.parametrize(
    ("name", "after"),
    [
        slow("undialable", 300), ("joins", 300), slow("joins", 445), slow("lives", 300), slow("lives", 3600),
        ("restarts", 480), slow("paces", 600), slow("paces", 1200), ("pair", 60),
    ],
)  # fmt: skip
def test_no_member_is_more_than_five_percent_off(name, after):
    row = read(name, after)
    assert row["members"] > 1
    assert max(-row["least"], row["most"]) < MOST


@pytest.mark.slow
@pytest.mark.parametrize(("name", "after"), [("cut", 3720), ("runs", "row 3")])
def test_after_a_cut_or_runs_apart_members_show_one_number_near_the_mean_of_the_parts(name, after):
    """The rows are a minute after an hour's cut, and five minutes after the last of 80 runs has met the others."""
    row = read(name, after)
    assert row["apart"] < APART
    assert max(-row["least"], row["most"]) < MOST


@pytest.mark.parametrize(
    ("name", "after"), [("liar", 660), slow("liars", 660), ("at_once", 60), slow("flood", 660)]
)  # fmt: skip
def test_liars_add_at_most_a_fifth_in_their_first_minute(name, after):
    row = read(name, after)
    assert row["most"] < LIED
    assert row["least"] > -MOST
