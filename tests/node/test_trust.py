"""Mixing that no filter defends is reported at the start."""

import pytest

from gossip import Config
from tests.node.trainees import linear


@pytest.mark.parametrize(
    ("mixing", "decided"),
    [("pair", None), ("row-stochastic", None), ("group", "its part of each mean"),
     ("push-sum", "the weights of all by that of its vectors")],
)  # fmt: skip
def test_a_way_of_mixing_that_trusts_every_member_is_told_once(mixing, decided, train):
    trainee = train(linear(), config=Config(mixing=mixing))
    sentence = f'With mixing = "{mixing}" one member that lies decides {decided}: use it where all members are yours, '
    told = [str(event) for event in trainee.node.history() if event.kind == "trust"]
    assert told == ([] if decided is None else [f"{sentence}and pairs elsewhere."])
