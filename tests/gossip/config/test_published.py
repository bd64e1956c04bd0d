"""Every published method is a configuration that works, by its name, and says what it is not."""

import dataclasses
import re

import pytest

from gossip.config import Config
from gossip.config.methods import METHODS, method
from gossip.errors import ConfigError

# The least that each paper's method requires; its further settings are free.
PUBLISHED = {
    "d-psgd": {"mixing": "pair", "partners": 0, "mix_every_steps": 1, "max_version_gap": 0.0},
    "ad-psgd": {"mixing": "pair", "selection": "uniform", "mix_every_steps": 1, "max_version_gap": None},
    "sgp": {"mixing": "push-sum", "selection": "exponential", "mix_every_steps": 1, "max_version_gap": 0.0},
    "osgp": {"mixing": "push-sum", "selection": "exponential", "mix_every_steps": 1, "max_version_gap": 1.0},
    "gosgd": {"mixing": "push-sum", "selection": "uniform", "partners": 1},
    "epidemic": {"mixing": "row-stochastic", "selection": "uniform", "partners": 7},
    "moshpit": {"mixing": "group", "selection": "grid"},
    "diloco": {"mixing": "group", "group_size": 0, "outer_momentum": 0.9},
    "noloco": {"mixing": "pair", "selection": "uniform", "mix_every_steps": 50, "outer_momentum": 0.5},
    "streaming-diloco": {"part": "fragments 4", "codec": "int4"},
    "sparta": {"part": "mask 0.005", "mix_every_steps": 1},
    "qg-dsgdm": {"mixing": "pair", "mix_every_steps": 1},
    "proxskip": {"mixing": "pair", "selection": "uniform", "correction": 0.2, "outer_momentum": 0.0, "outer_rate": 1.0},
    "moniqua": {"codec": "moniqua4"},
    "clippedgossip": {"filter": "clip", "partners": 0},
    "balance": {"filter": "balance", "filter_limit": None},
    "local-sgd": {"mix_every_steps": 1_000_000_000},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_what_its_paper_requires_and_a_file_may_name_it(tmp_path, name):
    found = METHODS[name]
    config = Config.published(name)
    assert {key: getattr(config, key) for key in found.changes} == found.changes
    assert {key: getattr(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert found.name == name == name.lower()
    assert re.search(r"\b(19|20)\d\d\b", found.paper), "author and year"
    assert found.title
    path = tmp_path / "config.toml"
    path.write_text(f'[gossip]\nmethod = "{name}"\nstall_s = 7', encoding="utf-8")
    assert Config.from_toml(path) == Config.published(name, stall_s=7)


def test_two_methods_with_one_configuration_need_something_different_beside_it():
    seen = {}
    for name, found in METHODS.items():
        config = dataclasses.astuple(Config.published(name))
        assert config not in seen or METHODS[seen[config]].needs != found.needs, (name, seen[config])
        seen[config] = name


def test_further_changes_go_before_the_papers():
    config = Config.published("noloco", mix_every_steps=8, codec="bf16")
    assert (config.mix_every_steps, config.codec, config.outer_momentum) == (8, "bf16", 0.5)


def test_a_method_may_begin_from_a_preset_and_a_file_overrides_both():
    table = {"preset": "wan", "method": "noloco", "codec": "int8"}
    assert Config.from_mapping(table) == Config.wan(
        **METHODS["noloco"].changes | {"codec": "int8", "filter": "none", "correction": 0.0, "mix_state": "off"}
    )
    assert Config.published("d-psgd").outer == (0.0, 1.0), "no paper's figures are of a momentum that it does not have"
    assert Config.published("d-psgd").for_training() == Config.published("d-psgd")
    assert table == {"preset": "wan", "method": "noloco", "codec": "int8"}, "the caller's table is as it was"


def test_a_name_that_is_nearly_one_is_refused_with_the_one_meant():
    with pytest.raises(ConfigError, match=r"did you mean 'noloco'\?"):
        method("nolocco")


@pytest.mark.parametrize("name", ["", "zzz", "NoLoCo", 5, ["sgp"], True])
def test_a_name_that_is_none_is_refused_with_all_there_are(name):
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"method": name})
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in METHODS)
