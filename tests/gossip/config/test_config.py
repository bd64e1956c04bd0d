"""A Config that cannot work is refused in a sentence that names what would."""

import dataclasses
import math
import re

import pytest

from gossip.config import PRESETS, Config
from gossip.config.reference import explained
from gossip.config.setting import settings_of
from gossip.errors import ConfigError
from gossip.wire.frames import MAX_BODY_BYTES
from tests.harness.configs import tuned

SETTINGS = settings_of(Config)
CHOICES = {name: setting.choices for name, (_, setting) in SETTINGS.items() if setting.choices}


def sentence(**changes):
    with pytest.raises(ConfigError) as caught:
        Config(**changes)
    return str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_works_and_takes_changes(preset):
    made = getattr(Config, preset)()
    assert Config.from_mapping({"preset": preset}) == made
    changed = getattr(Config, preset)(mix_every_steps=5, swarm="other")
    assert changed == dataclasses.replace(made, mix_every_steps=5, swarm="other")
    assert Config.from_mapping({"preset": preset, "mix_every_steps": 5, "swarm": "other"}) == changed


def test_the_lan_preset_is_the_defaults_and_the_others_change_how_long_a_node_waits():
    assert Config.lan() == Config()
    wan, lan, datacentre = Config.wan(), Config.lan(), Config.datacentre()
    assert datacentre.stall_s < lan.stall_s < wan.stall_s
    assert all(config.for_training().auto_interval for config in (wan, lan, datacentre))
    assert wan.chunk_elements < datacentre.chunk_elements


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().swarm = "other"


NUMBERS = [name for name, (field, _) in SETTINGS.items() if field.type.split(" | ")[0] in ("int", "float")]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_held_to_the_range_that_is_written(name):
    field, setting = SETTINGS[name]
    whole, nudge = "int" in field.type, 1 if "int" in field.type else 1e-9
    assert setting.positive or setting.least > -math.inf
    below = [0, -1] if setting.positive else [setting.least - nudge]
    beyond = [] if setting.most == math.inf else [setting.most if setting.below else setting.most + nudge]
    for value in [*below, *beyond, *([] if whole else [math.nan, math.inf, -math.inf])]:
        value = int(value) if whole and math.isfinite(value) else value
        text = sentence(**{name: value})
        assert text.startswith(f"{name} = ")
        assert setting.range in text
    assert setting.allows(nudge if setting.positive else setting.least)
    assert setting.allows(0) or not setting.zero
    assert setting.most == math.inf or setting.allows(setting.most - nudge if setting.below else setting.most)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mix_every_steps": 8.0}, ["mix_every_steps", "whole number"]),
        ({"mix_every_steps": "Auto"}, ["mix_every_steps", "'Auto'", "whole number", '"auto"']),
        ({"mix_every_steps": True}, ["mix_every_steps", "whole number"]),
        ({"stall_s": "30"}, ["stall_s", "a number"]),
        ({"stall_s": None}, ["stall_s", "a number"]),
        ({"swarm": 5}, ["swarm", "a text"]),
        ({"swarm": ""}, ["swarm", "64"]),
        ({"swarm": "x" * 65}, ["swarm", "64"]),
        ({"swarm": "two\nlines"}, ["swarm", "64"]),
        ({"part": "top 0.01"}, ["part", "'top 0.01'", "mask 0.005", "fragments"]),
        ({"codec": "int9"}, ["There is no codec 'int9' (did you mean 'int8'?): use fp32, ", "moniqua4 or auto."]),
        (
            {"filter_limit": -1},
            ["filter_limit", "leave it out for a radius that follows the usual distance for `clip`"],
        ),
        ({"stall_s": math.inf}, ["stall_s = inf", "it must be finite and positive."]),
        ({"mix_every_step": 4}, ["'mix_every_step' is not a setting (did you mean 'mix_every_steps'?)."]),
        ({"zzz": 4}, ["'zzz' is not a setting."]),
        ({"preset": "wan"}, ["preset is a key of files: in Python call Config.lan, Config.wan or Config.datacentre."]),
        ({"method": "noloco"}, ["method is a key of files: in Python call Config.published."]),
        ({"selection": "rings"}, ["selection", "'rings'", "did you mean 'ring'?", "torus"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_words_that_help(changes, words):
    text = sentence(**changes)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize("name", SETTINGS)
def test_no_sentence_about_a_setting_says_a_word_twice(name):
    setting = SETTINGS[name][1]
    texts = [setting.meaning, setting.advice, explained(name)]
    for value in (-1, math.nan, 10**9, 0.5, "zzz", None, True):
        try:
            Config(**{name: value})
        except ConfigError as error:
            texts.append(str(error))
    assert len(texts) > 3
    assert [text for text in texts if re.search(r"\b([a-z]+) \1\b", text)] == []


def test_an_interval_that_is_left_out_is_eight_steps_or_the_clock_alone():
    assert Config().interval_steps == 8
    assert Config(mix_every_s=30).interval_steps is None
    assert Config(mix_every_steps=8, mix_every_s=30).interval_steps == 8
    assert not Config().auto_interval


def test_a_filter_that_is_left_open_follows_from_the_mixing():
    names = {mixing: Config(mixing=mixing).filter_name for mixing in CHOICES["mixing"]}
    assert names == {"pair": "clip", "row-stochastic": "clip", "push-sum": "none", "group": "none"}


@pytest.mark.parametrize(("name", "known"), CHOICES.items())
def test_every_choice_that_is_named_in_an_error_is_one(name, known):
    text = sentence(**{name: "?"})
    assert all(choice in text for choice in known)


@pytest.mark.parametrize(
    ("changes", "averaged"),
    [({}, 2), ({"group_size": 7}, 2), ({"mixing": "group", "group_size": 7}, 7),
     ({"mixing": "group", "group_size": 0, "outer_momentum": 0.9, "outer_rate": 0.7}, 16)],
)  # fmt: skip
def test_the_outer_step_counts_with_as_many_as_a_mix_averages(changes, averaged):
    assert Config(**changes).averaged == averaged


@pytest.mark.parametrize(
    ("alpha", "beta", "group_size"), [(0.5, 1.5, 0), (0.9, 0.7, 0), (0.0, 2.0, 0), (0.9, 0.7, 2), (0.9, 0.7, 3)]
)
def test_an_unstable_outer_step_is_refused_with_numbers_that_work(alpha, beta, group_size):
    group = {"mixing": "group", "group_size": group_size} if group_size else {}
    text = sentence(outer_momentum=alpha, outer_rate=beta, **group)
    rate = float(re.search(r"outer_rate below ([\d.]*\d)", text)[1])
    assert Config(outer_momentum=alpha, outer_rate=rate, **group).outer_rate == rate
    if momentum := re.search(r"outer_momentum of at most ([\d.]*\d)", text):
        assert Config(outer_momentum=float(momentum[1]), outer_rate=beta, **group).outer_rate == beta
    assert ("larger groups" in text) == (group_size > 2)


@pytest.mark.parametrize(
    ("changes", "overlaps"),
    [({}, True), ({"part": "fragments 4"}, False), ({"max_version_gap": 1.0}, False), ({"mixing": "group"}, False)],
)
def test_an_outer_step_of_parts_or_groups_leaves_room_for_one_exchange(changes, overlaps):
    plain = Config(incoming_exchanges=3, **changes)
    outer = Config(incoming_exchanges=3, outer_momentum=0.5, outer_rate=0.7, **changes)
    assert (plain.plain, plain.incoming_limit, plain.overlaps) == (True, 3, False)
    assert (outer.plain, outer.incoming_limit, outer.overlaps) == (False, 3 if overlaps else 1, overlaps)
    assert not Config(outer_rate=0.5).plain


def test_a_replacement_by_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match="'never_was' is not a setting"):
        dataclasses.replace(Config(), never_was=1)


def test_there_are_at_most_25_settings():
    assert len(SETTINGS) <= 25


def test_the_longest_chunk_fits_the_longest_body():
    assert 4 * tuned(chunk_elements=2**20).chunk_elements == MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("config", "reply_s", "hello_s", "bench_s", "chunk"),
    [
        (Config.lan(), 5.0, 5.0, 10.0, 131_072),
        (Config.wan(), 10.0, 10.0, 10.0, 32_768),
        (Config.datacentre(), 5.0, 5.0, 10.0, 262_144),
        (Config(boundary_patience_s=60.0), 63.0, 5.0, 10.0, 131_072),
        (Config(boundary_patience_s=0.1, stall_s=0.1), 0.25, 5.0, 0.5, 131_072),
    ],
)
def test_times_follow_from_the_pauses_of_links_and_of_loops(config, reply_s, hello_s, bench_s, chunk):
    followed = config.reply_timeout_s, config.hello_timeout_s, config.bench_s, config.chunk_elements
    assert followed == pytest.approx((reply_s, hello_s, bench_s, chunk))


# -- files -----------------------------------------------------------------------------------------------------------
def read(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return Config.from_toml(path)


def test_a_file_may_hold_its_keys_at_the_top_or_under_gossip(tmp_path):
    expected = Config.wan(mix_every_steps=16, stall_s=4)
    assert read(tmp_path, 'preset = "wan"\nmix_every_steps = 16\nstall_s = 4') == expected
    assert read(tmp_path, 'name = "x"\n[gossip]\npreset = "wan"\nmix_every_steps = 16\nstall_s = 4') == expected
    assert read(tmp_path, "") == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mix_evry_steps = 8", ["mix_evry_steps", "did you mean 'mix_every_steps'?"]),
        ("presett = 'wan'", ["'presett' is not a setting (did you mean 'preset'?)."]),
        ("internal = { bench_s = 1 }", ["'internal' is not a setting."]),
        ('preset = "moon"', ["moon", "lan, wan, datacentre"]),
        ("preset = [1]", ["preset", "lan, wan, datacentre"]),
        ('method = "noloco"\nmixing = "push-sum"', ["push-sum", "momentum"]),
        ("gossip = 5", ["[gossip]"]),
        ("mix_every_steps = 'often'", ["mix_every_steps", "whole number"]),
        ("mix_every_steps = = 8", ["not TOML"]),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in ["config.toml", *words]), str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        Config.from_toml(tmp_path / "absent.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml is not TOML"):
        Config.from_toml(tmp_path / "bytes.toml")


# -- what is left open -------------------------------------------------------------------------------------------------
def test_a_training_loop_takes_an_outer_step_and_a_correction_where_nothing_else_is_said():
    assert (Config().plain, Config().kappa, Config().codec_name) == (True, 0.0, "fp32")
    assert Config().for_training().measures_momentum
    assert not Config().for_training().plain
    decided = Config(outer_momentum="auto", correction=0.2, mix_every_steps="auto")
    assert Config().for_training() == decided
    assert Config(correction=0.0).for_training().kappa == 0.0
    by_clock = Config(mix_every_s=30.0).for_training()
    assert (by_clock.outer_momentum, by_clock.kappa) == ("auto", 0.0), "a correction counts steps"


@pytest.mark.parametrize(
    ("given", "interval", "codec"),
    [
        ({}, "auto", "auto"),
        ({"codec": "fp32"}, "auto", "fp32"),
        ({"codec": "int4"}, "auto", "int4"),
        ({"filter": "none"}, "auto", "auto"),
        ({"mix_every_steps": 8}, 8, "fp32"),
        ({"mix_every_steps": "auto", "codec": "fp32"}, "auto", "fp32"),
        ({"mix_every_s": 30.0}, None, "fp32"),
        ({"max_version_gap": 1.0}, None, "fp32"),
        ({"preset": "wan"}, "auto", "auto"),
        ({"preset": "datacentre"}, "auto", "auto"),
    ],
)
def test_a_training_loop_chooses_interval_and_codec_where_the_interval_is_left_out(given, interval, codec):
    config = Config.from_mapping(given).for_training()
    assert (config.mix_every_steps, config.codec_name) == (interval, codec)
    assert config.for_training() == config, "nothing is open any more"


@pytest.mark.parametrize(
    "given",
    [
        {"outer_momentum": 0.0}, {"outer_rate": 1.0}, {"outer_momentum": 0.3, "outer_rate": 0.5}, {"outer_rate": 0.7},
        {"mixing": "push-sum"}, {"mixing": "group"}, {"partners": 0, "selection": "ring"},
        {"part": "mask 0.1"}, {"part": "fragments 4"},
    ],
)  # fmt: skip
def test_what_is_said_or_has_no_pair_of_whole_vectors_stays_as_it_is(given):
    config = Config(**given)
    assert config.for_training() is config


def test_one_of_the_two_leaves_the_other_at_what_the_plain_mean_has():
    assert Config(outer_momentum=0.5).outer == (0.5, 1.0)
    assert Config(outer_rate=0.7).outer == (0.0, 0.7)
