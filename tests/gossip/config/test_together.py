"""Two choices that exclude each other are refused when a Config is made, with the reason and with what would do."""

import ast
import inspect
import itertools

import pytest

from gossip.arithmetic.subsets import Subset
from gossip.config import Config
from gossip.config import rules as together
from gossip.config.setting import settings_of
from gossip.errors import ConfigError
from gossip.exchange import reservation
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Local
from gossip.selection.registry import selector
from gossip.selection.rule import Options
from tests.gossip.exchange.sides import A, Side

PUSH = {"mixing": "push-sum"}
ROWS = {"mixing": "row-stochastic"}
GROUP = {"mixing": "group"}
PAIR = {"mixing": "pair"}
RING = {"selection": "ring", "partners": 0}
GRAPH = {"selection": "graph", "graph": "edges.txt"}
AUTO = {"mix_every_steps": "auto"}
STEPS = {"mix_every_steps": 8}
CLOCK = {"mix_every_s": 30.0}
GAP = {"max_version_gap": 1.0}
MEASURED = {"outer_momentum": "auto"}
OUTER = {"outer_momentum": 0.5, "outer_rate": 0.7}
CORRECTION = {"correction": 0.2}
MASK = {"part": "mask 0.1"}
INT4 = {"codec": "int4"}
INT8 = {"codec": "int8"}
MONIQUA = {"codec": "moniqua4"}
CLIP = {"filter": "clip"}
TRIMMED = {"filter": "trimmed"}

# Each row: settings that are refused, words of the sentence, and the alternatives that it names, which must work.
REFUSED = [
    (MEASURED | RING, ["auto", "pairs"], [MEASURED, RING]),
    (MEASURED | {"outer_rate": 0.7}, ["auto", "outer_rate"], [MEASURED, {"outer_rate": 0.7}]),
    (AUTO | PUSH, ["auto", "pairs"], [PUSH, AUTO | PAIR]),
    (AUTO | MASK, ["auto", "part"], [AUTO, MASK]),
    (AUTO | GAP, ["auto", "max_version_gap"], [AUTO, GAP]),
    (PUSH | CORRECTION, ["correction", "pairs"], [PUSH, CORRECTION | PAIR]),
    (CORRECTION | MASK, ["correction", "part = 'all'"], [CORRECTION]),
    (CORRECTION | CLOCK, ["correction", "mix_every_steps, for example to 8"], [CORRECTION | STEPS | CLOCK]),
    (PUSH | OUTER, ["momentum", "mean of a pair"], [PUSH, OUTER | PAIR]),
    (PUSH | MASK, ["push-sum", "mask 0.1", "mass"], [PUSH | {"part": "all"}, MASK]),
    (ROWS | MONIQUA, ["row-stochastic", "moniqua4"], [ROWS | INT8, ROWS | INT4, MONIQUA | PAIR]),
    (PUSH | RING, ["partners = 0", "mixing = 'pair'", "for example 1"], [RING, PUSH | RING | {"partners": 1}]),
    (
        GROUP | {"selection": "ring"},
        ["group", "'ring'", "all members"],
        [GROUP | {"selection": "grid"}, GROUP | {"selection": "uniform"}],
    ),
    (GROUP | {"partners": 2}, ["partners = 2", "group_size"], [GROUP | {"group_size": 3}]),
    (GROUP | MASK, ["mask 0.1", "whole vector"], [GROUP, MASK]),
    (GROUP | {"codec": "auto"}, ["auto", "one link"], [GROUP | {"codec": "bf16"}, GROUP | INT8]),
    (GROUP | MONIQUA, ["moniqua4", "two partners"], [GROUP | INT8, GROUP | INT4, MONIQUA]),
    (GAP | CLOCK, ["max_version_gap", "mix_every_steps"], [GAP | STEPS | CLOCK, CLOCK]),
    ({"selection": "graph"}, ["graph", "edges.txt"], [GRAPH]),
    ({"graph": "edges.txt"}, ["edges.txt", "'uniform'"], [GRAPH]),
    (
        GROUP | {"selection": "grid", "group_size": 0},
        ["group_size = 0", "no grid"],
        [GROUP | {"group_size": 0}, GROUP | {"selection": "grid", "group_size": 4}],
    ),
    ({"partners": 0}, ["partners = 0", "'uniform'"], [RING, RING | {"selection": "torus"}]),
    (RING | OUTER, ["partners = 0", "momentum"], [RING, RING | OUTER | {"partners": 1}]),
    ({"partners": 3}, ["partners = 3", "one partner at a time"], [{"partners": 1}, RING, ROWS | {"partners": 3}]),
    (MONIQUA | MASK, ["moniqua4", "mask 0.1"], [INT4 | MASK, MONIQUA | {"part": "fragments 4"}, MONIQUA]),
    ({"filter_limit": 1.0, "filter": "none"}, ["filter_limit", "'none'"], [{"filter_limit": 1.0} | CLIP]),
    (GROUP | TRIMMED | {"filter_limit": 0.5}, ["filter_limit", "1 to 8"], [GROUP | TRIMMED | {"filter_limit": 2}]),
    (TRIMMED, ["trimmed", "group"], [GROUP | TRIMMED, CLIP]),
    (GROUP | CLIP, ["'clip'", "pair"], [GROUP | TRIMMED, CLIP | PAIR]),
    (PUSH | CLIP, ["'clip'", "leave their mass behind"], [PUSH | {"filter": "balance"}, ROWS | CLIP]),
]


@pytest.mark.parametrize(("changes", "words", "remedies"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_excludes_each_other_is_refused_and_what_the_sentence_names_works(changes, words, remedies):
    with pytest.raises(ConfigError) as caught:
        Config(**changes)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert text.endswith(".")
    assert "\n" not in text
    for remedy in remedies:
        Config(**remedy)


def test_every_refusal_there_is_has_its_example():
    tree = ast.parse(inspect.getsource(together))
    assert sum(isinstance(node, ast.Yield) for node in ast.walk(tree)) == len(REFUSED)


CHOICES = {name: setting.choices for name, (_, setting) in settings_of(Config).items() if setting.choices}
AXES = {
    "selection": CHOICES["selection"], "mixing": CHOICES["mixing"], "filter": CHOICES["filter"],
    "codec": ("fp32", "int4", "moniqua4"), "part": ("all", "mask 0.01", "fragments 4"), "partners": (0, 1, 3),
    "outer_rate": (1.0, 0.7),
}  # fmt: skip


def test_of_any_combination_a_node_can_be_made_or_a_sentence_names_what_is_in_the_way():
    """Seven axes, every point: no object made from an accepted Config refuses it later."""
    made = refused = 0
    for values in itertools.product(*AXES.values()):
        changes = dict(zip(AXES, values, strict=True))
        if changes["selection"] == "graph":
            changes["graph"] = "edges.txt"
        try:
            config = Config(**changes)
        except ConfigError as error:
            refused += 1
            said = str(error)
            assert said.endswith(".")
            assert any(name in said or repr(value) in said for name, value in changes.items()), said
            continue
        made += 1
        if config.selection != "graph":
            selector(config.selection, Options(at_once=config.partners == 0, group_size=config.group_size))
        exchanges = Exchanges(A, Local("f", 10_000, 0), config, lambda: 5, Side(), reservation)
        meant = Subset.parse(config.part)
        assert meant is None or exchanges.part == meant.with_seed(5)
        assert (exchanges.fragments is not None) == config.part.startswith("fragments")
    assert made > 300
    assert refused > 3_000
