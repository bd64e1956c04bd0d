"""Counts with their nouns, as people read them: one member and 5,718 samples."""

import pytest

from gossip.ids import quantity
from gossip.state_transfer.runs import Run, merging_notice
from node.cli.top import count_text
from node.observe.figures import line_of
from tests.harness.world import peer_id
from tests.node.observe.test_progress import figures
from tests.sim.fake_results import fake_result


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (5718, "5,718 samples")]
)
def test_a_count_has_the_form_and_the_separators_that_people_expect(number, said):
    assert quantity(number, "sample") == said
    assert count_text(number, "sample") == said


def test_what_another_node_does_not_say_has_a_dash():
    assert count_text(None, "sample") == "- samples"


ROW = figures(
    samples=5718, swarm_samples=5718, loss=None, members_alive=1, exchanges_done=1, exchanges_failed=0,
    mb_s_sent=0.0, mb_s_received=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "samples 5,718 of 5,718"),
        ({}, "  1 member  1 exchange  "),
        ({"interval_steps": 2, "codec": "auto"}, "1 exchange, every 2 steps in each link's codec  "),
        ({"interval_steps": 1, "codec": "int8"}, "1 exchange, every step in int8  "),
        ({"interval_steps": None, "codec": "int8"}, "1 exchange  "),
    ],
)
def test_the_live_line_counts_one_and_many(changes, said):
    assert said in line_of(ROW | changes)


def test_a_result_in_a_sentence_counts_one_exchange():
    result = fake_result()
    result.summary["exchanges_done"] = 1
    assert "; 1 exchange, " in str(result)
    result.summary["exchanges_done"] = 5718
    assert "; 5,718 exchanges, " in str(result)


def test_a_run_that_is_met_is_counted_in_one_form_and_the_other():
    said = merging_notice(peer_id(1), Run(5718, b"1" * 16, 1), Run(1, b"2" * 16, 2)).sentence
    assert "with 5,718 samples behind it and 1 member (as" in said
