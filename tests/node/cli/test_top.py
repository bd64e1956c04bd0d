"""`gossip top`: a swarm in the terminal."""

import io

import pytest
from rich.console import Console

from gossip.errors import LocalError
from node.cli.top import picture_of, run_top
from tests.node.trainees import linear

ANSWER = {
    "id": "ab" * 16, "address": "127.0.0.1:1", "swarm": "default",
    "metrics": {
        "steps": 10, "samples": 40, "loss": 0.5, "members_alive": 2, "swarm_samples": 80, "consensus_distance": None,
        "bytes_sent": 1_000_000, "bytes_received": 0, "exchanges_done": 3, "failures": (("broken", "", 2),),
    },
    "members": [
        {"id": "cd" * 16, "address": None, "state": "dead", "steps": 7, "samples": 28, "loss": None, "ready": True},
        {"id": "ef" * 16, "address": "[bold]h:1", "state": "alive", "steps": 7, "samples": 28, "loss": 1},
    ],
}  # fmt: skip


def printed(*args):
    out = io.StringIO()
    Console(file=out, width=120, markup=True).print(picture_of(*args))
    return out.getvalue()


def test_a_picture_has_the_swarm_with_its_living_first_and_rates_once_there_are_two_answers():
    text = printed(ANSWER, None, 0.0)
    assert "node abababab  swarm 'default'  2 alive  80 samples  distance -  -/- MB/s  3 exchanges" in text
    assert text.index("abababab") < text.index("efefefef") < text.index("cdcdcdcd")
    assert "failed: broken 2" in text
    assert "[bold]h:1" in text, "what others are called is text"
    later = ANSWER | {"metrics": ANSWER["metrics"] | {"samples": 80, "bytes_sent": 5_000_000}}
    text = printed(later, ANSWER, 2.0)
    assert "2/0 MB/s" in text
    assert " 20 " in text


def test_one_of_another_version_has_what_it_says():
    assert "abababab" in printed(ANSWER | {"metrics": {"failures": ()}}, ANSWER, 1.0)


def test_where_there_is_no_terminal_it_is_printed_once(train, capsys):
    node = train(linear()).node
    assert run_top(node.address, secret_file=None, timeout_s=5.0, every_s=2.0) == 0
    assert capsys.readouterr().out.count(f"node {node.id[:8]}") == 1


def test_nobody_there_is_said_in_a_sentence():
    with pytest.raises(LocalError, match=r"No node answers at 127\.0\.0\.1:9"):
        run_top("127.0.0.1:9", secret_file=None, timeout_s=1.0, every_s=2.0)
