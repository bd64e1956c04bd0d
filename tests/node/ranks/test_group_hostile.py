"""Hostile ranks in a group of real processes: what they send ends the group with a sentence, and nothing else."""

import json
import signal

import pytest
import torch
from torch import nn

from tests.node.ranks.group_hostile import ABORTED_BY_0, ABORTED_BY_1, BY_RANK_0, BY_RANK_1, FULL_STEPS, PATIENCE_S
from tests.node.ranks.group_play import Pair, goes_on

MOST_MB = 1024  # The most memory that decoding a message may take.

pytestmark = pytest.mark.slow

UNREADABLE = "What came from another rank of this node's group is no message of this version ("
SILENT = f"of this node's group did nothing for {PATIENCE_S:g} s"
OTHERS = {
    # Nothing more comes then.
    "many numbers": "Rank 0 of this node's group ", "many texts": "Rank 0 of this node's group ",
    "an unknown record": "Rank 0 of this node's group runs another version of this package: install the same on all.",
    "an error of many lines": "?[2J?]0;owned???Traceback: no",
    "silence": f"Rank 0 {SILENT}",
}  # fmt: skip
BY_OTHERS = {
    "the largest number of samples": UNREADABLE, "a negative number of samples": UNREADABLE,
    "a gap of years": UNREADABLE,
    "broadcasts": f"Rank 1 of this node's group has failed (Silence: {PATIENCE_S:g})",
    "another call": "The ranks of this node's group are in different calls, this one in step",
    # The first rank to notice leaves, perhaps before the other does.
    "another call of its own": "of this node's group",
    "an error of many lines": "Rank 1 of this node's group has failed (LocalError: ?[2J?]0;owned???Traceback: no",
    "a reason of many lines": "?[2J?]0;owned???Traceback: no", "a reason that is no text": "\ufffd\ufffd\ufffd",
    "a reason of megabytes": "zzz", "silence": f"Rank 1 {SILENT}",
}  # fmt: skip
SLOWLY = {"a reason of megabytes": "Rank 1 of this node's group has ended"}  # A busy store takes over 5 s for it.
ALL_S = 600.0  # All attacks one after another take a minute on an idle machine.


def played(folder, attacker, seeds=()):
    """Run every attack of a hostile rank, one after another, on the nodes of one honest process."""
    with Pair(folder / "pair", "group_hostile.py", [attacker], seeds) as pair:
        assert pair.codes(ALL_S) == [0, 0], pair.errors()
    return pair


@pytest.fixture(scope="module")
def from_above(tmp_path_factory):
    """Run the attacks of a hostile rank 0."""
    return played(tmp_path_factory.mktemp("above"), "0")


@pytest.fixture(scope="module")
def bystander():
    """Run another node of the swarm in this process."""
    from tests.node.conftest import QUICK, Trainee, end

    trainee = Trainee(nn.Linear(6, 3), config=QUICK)
    trainee.start()
    assert trainee.running.wait(30)
    yield trainee
    end([trainee])


@pytest.fixture(scope="module")
def from_below(tmp_path_factory, bystander):
    """Run the attacks of a hostile rank 1, on nodes whose rank 0 is a member of the bystander's swarm."""
    return played(tmp_path_factory.mktemp("below"), "1", [bystander.node.address])


def ended(pair, name):
    """Return the sentence with which a rank has ended, within its bounds."""
    end = json.loads((pair.folder / "ended").read_text())[name]
    assert end["kind"] == "LocalError", end
    assert is_clean(end["text"])
    assert end["grown_mb"] < MOST_MB
    assert end["seconds"] < 2 * PATIENCE_S + 2.0
    return end["text"]


def is_clean(text):
    """Return True if a terminal can show the text on a few lines."""
    return text.isprintable() and len(text) < 2500


@pytest.mark.parametrize("name", BY_RANK_0)
def test_the_other_rank_ends_with_a_sentence_and_bounded_memory_whatever_rank_0_sends(from_above, name):
    text = ended(from_above, name)
    assert text.startswith(OTHERS.get(name, UNREADABLE)) or OTHERS.get(name, "?") in text
    assert not (from_above.folder / "ran").exists(), "something was unpickled"


def test_rank_0_is_told_why_the_other_has_gone(from_above):
    reasons = json.loads((from_above.folder / "reasons").read_text())
    told = {name for name, reason in reasons.items() if reason.startswith("Rank 1 of this node's group has failed (")}
    own = {"many numbers", "many texts", "silence"}  # These end by the timeout of either rank.
    own |= {name for name in BY_RANK_0 if name.startswith("a sum")}  # All ranks notice these at once.
    assert set(BY_RANK_0) - own <= told
    assert all(map(is_clean, reasons.values()))


@pytest.mark.parametrize("name", BY_RANK_1)
def test_rank_0_ends_with_a_sentence_and_bounded_memory_whatever_another_rank_does(from_below, name):
    text = ended(from_below, name)
    assert BY_OTHERS[name] in text or SLOWLY.get(name, BY_OTHERS[name]) in text


@pytest.mark.parametrize("pair", ["from_above", "from_below"])
def test_the_same_processes_train_on_with_a_new_node_after_all_that(pair, request):
    for rank in range(2):
        last = request.getfixturevalue(pair).read("last", rank)
        assert (last["kind"], last["text"], last["steps"]) == ("", "", FULL_STEPS)


def test_the_swarms_other_node_goes_on_and_mixed_with_each_of_these(from_below, bystander):
    assert bystander.do(lambda node: node.metrics().exchanges_done) > 3
    assert bystander.do(lambda node: bool(torch.isfinite(node._training.live.state.live_tensors.model.weight).all()))
    assert goes_on(bystander)


@pytest.mark.parametrize(("attacker", "name"), [(0, one) for one in ABORTED_BY_0] + [(1, one) for one in ABORTED_BY_1])
def test_where_gloo_itself_aborts_a_rank_the_swarm_goes_on(tmp_path, bystander, attacker, name):
    """A message longer than the awaited one ends the process inside gloo, where a node's code cannot prevent it."""
    seeds = [bystander.node.address] if attacker else []
    with Pair(tmp_path / "pair", "group_hostile.py", [str(attacker)], seeds, ONLY=name) as pair:
        codes = pair.codes()
    assert -signal.SIGABRT in codes
    assert "Received data size doesn't match expected size" in "".join(pair.errors())
    assert goes_on(bystander)
