"""The figures of a simulation: the page that lists all of them, and the ones that programs read of a summary."""

from pathlib import Path

from node.observe.figures import reference_page
from sim.report.figures import page
from tests.sim.fake_results import fake_result

PAGE = Path(__file__).parents[3] / "docs" / "figures.md"


def test_the_page_is_what_the_rows_say():
    assert PAGE.read_text(encoding="utf-8") == reference_page() + page(), "make reference writes it anew"


def test_a_result_is_shown_without_accuracies_where_nothing_has_one():
    heads = [
        "accuracy, mean of peers", "least to greatest", "average model", "loss, mean of peers", "consensus distance",
        "alive at the end", "exchanges", "failed", "sent", "played", "virtual time", "real time",
    ]  # fmt: skip
    assert list(fake_result().figures()) == heads
    assert list(fake_result(task={"dataset": "averaging"}).figures()) == heads[3:]
