"""A scenario in sentences, and figures in units that keep them short."""

import math

import pytest

from sim.report import describe as words
from sim.report.units import bytes_axis, bytes_text, count_text, duration_text, share_text, time_axis
from sim.scenario.scenario import Scenario

PERFECT = {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": "unlimited"}


def test_a_scenario_reads_as_sentences():
    scenario = Scenario.from_mapping({
        "peers": 1000, "rounds": 100, "attackers": {"share": 0.01, "kind": "scaled", "scale": 10},
        "membership": {"mode": "ideal"},
    })  # fmt: skip
    assert words.in_words(scenario) == (
        "1,000 peers train mlp on digits until each has mixed 100 times on average. 10 of the peers attack (scaled, "
        "scale 10); figures are of the honest ones. There is no TCP: a message takes the latency, and a stream its "
        "bytes over the rate from the first one. It was played message by message (the whole level), because the fast "
        "level cannot represent attackers."
    )


@pytest.mark.parametrize(
    ("tables", "said", "unsaid"),
    [
        ({}, ["TCP's, with cubic: streams begin slowly, and again after a pause.", "queues that"], ["lost", "TLS"]),
        ({"network": {"loss": 0.1}}, ["come late and narrow a sender's window", "gets 8 connections"], []),
        ({"network": {"loss": 0.1}, "gossip": {"connections": 1}}, ["lost packets come late"], ["connections"]),
        ({"network": {"congestion": "bbr", "tls": True}}, ["with bbr and TLS", "nearly stops for 0.2 s"], ["lost"]),
        ({"network": PERFECT}, ["There is no TCP"], ["queues that"]),
        ({"network": {"congestion": "none", "loss": 0.1}}, ["no TCP"], []),
        ({"membership": {"mode": "ideal"}}, ["There is no TCP"], ["queues that"]),
        ({"membership": {"mode": "ideal"}, "network": {"loss": 0.1}}, ["Links are TCP's, with cubic"], []),
        ({"fleet": [{"number": 3, "loss": 0.1}]}, ["lost packets come late"], []),
        ({"fleet": [{"number": 3, "step_s": 0.5}]}, ["TCP's"], ["lost"]),
    ],
)  # fmt: skip
def test_a_report_says_what_of_links_it_models(tables, said, unsaid):
    text = words.in_words(Scenario.from_mapping({"rounds": 1, "peers": 9} | tables))
    assert all(part in text for part in said), text
    assert not any(part in text for part in unsaid), text


@pytest.mark.parametrize(
    ("written", "texts"),
    [
        (duration_text, {0: "0 s", 0.045: "45 ms", 12.34: "12.3 s", 60: "1 min", 125: "2 min 5 s", 3599.9: "1 h",
                         5400: "1 h 30 min", 86_400: "1 day", 183_600: "2 days 3 h", math.inf: "–"}),  # noqa: RUF001
        (bytes_text, {0: "0 B", 999: "999 B", 1000: "1 kB", 1_234_567: "1.23 MB", 999_999: "1 MB", 8e9: "8 GB"}),
        (count_text, {0: "0", 12_345: "12,345", 1_234_567: "1.23 million", 0.5: "0.5"}),
        # A share is never rounded to all or nothing.
        (share_text, {0: "0.0 %", 0.934: "93.4 %", 1: "100.0 %", 0.99996: "99.996 %", 0.00004: "0.004 %"}),
    ],
)  # fmt: skip
def test_figures_are_short(written, texts):
    assert {value: written(value) for value in texts} == texts
    assert duration_text(math.nan) == duration_text(math.inf)


def test_axes_have_units_that_keep_their_figures_short():
    assert [time_axis(s)[1] for s in (0.2, 30, 600, 40_000, 400_000)] == ["ms", "s", "min", "h", "days"]
    assert [bytes_axis(b) for b in (500, 2e6, 8e9)] == [(1.0, "B"), (1e6, "MB"), (1e9, "GB")]
