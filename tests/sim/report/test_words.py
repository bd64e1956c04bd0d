"""A scenario in sentences, and figures in units that keep them short."""

from __future__ import annotations

import math

import pytest

from gossip.config import Config
from sim.report import describe as words
from sim.report.units import bytes_axis, bytes_text, count_text, duration_text, share_text, time_axis
from sim.scenario.scenario import Scenario

PERFECT = {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": "unlimited"}


def test_a_scenario_reads_as_sentences():
    scenario = Scenario.from_mapping({
        "peers": 1000, "rounds": 100, "task": {"partition": {"kind": "dirichlet", "alpha": 0.1}},
        "compute": {"stragglers": {"share": 0.1, "slowdown": 4}},
        "network": {
            "latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": {"up": 20, "down": "unlimited"}
        },
        "membership": {"mode": "ideal"}, "churn": {"up": 600},
    })  # fmt: skip
    assert words.in_words(scenario) == (
        "1,000 peers train an MLP on digits, divided unevenly by class (Dirichlet, alpha 0.1), in batches of 8 with "
        "SGD (learning rate 0.1). Each averages with a random partner as often as each can afford with an outer step "
        "whose momentum it measures, in the codec that suits each link. A step takes 100 ms; 10 % of the peers are 4 "
        "times slower. Latencies are those measured on the internet; each peer has 20 Mbit/s up and no limit down. "
        "There is no TCP: a message takes the latency, and a stream its bytes over the rate from the first one. A "
        "peer is up for 10 min, then gone for good; a perfect sampler knows which peers are up. "
        "The run lasts until each peer has mixed 100 times on average. It was played exchange by exchange (the fast "
        "level), which leaves out the membership protocol, links and their beginning, and what single messages do "
        "outside of exchanges; fidelity = 'whole' plays them."
    )


@pytest.mark.parametrize(
    ("gossip", "said"),
    [
        ({}, "Each averages with a random partner as often as each can afford"),
        ({"selection": "ring"}, "Each averages with a neighbour on a ring as often as each can afford"),
        ({"selection": "torus", "partners": 0}, "Each averages with all its neighbours on a torus at once every"),
        ({"selection": "graph", "graph": "a/links.txt"}, "Each averages with a neighbour on the graph in links.txt"),
        ({"mixing": "group", "group_size": 5}, "Each averages in random groups of up to 5 every 8 steps"),
        ({"mixing": "group", "group_size": 0}, "Each averages with all peers, in groups of up to 16 every"),
        ({"mixing": "group", "selection": "grid"}, "Each averages in groups of up to 4 on a grid every"),
        ({"mixing": "push-sum"}, "Each pushes its model to a random partner every"),
        ({"mixing": "row-stochastic", "partners": 3}, "Each pushes its model to 3 random partners every"),
        ({"mixing": "push-sum", "selection": "exponential"}, "to a neighbour on the exponential graph"),
        ({"part": "mask 0.005"}, "Each averages a random 0.5 % of its elements with a random partner every"),
        ({"part": "fragments 4"}, "Each averages one of 4 fragments in turn with a random partner every"),
    ],
)
def test_a_report_says_with_whom_it_really_was(gossip, said):
    assert said in words.in_words(Scenario(rounds=1, gossip=Config(**gossip)))


def test_of_two_peers_neither_has_a_random_partner():
    said = words.in_words(Scenario(peers=2, rounds=1))
    assert "Each averages with the other as often as each can afford" in said
    assert "random partner" not in said


@pytest.mark.parametrize(
    ("tables", "said", "unsaid"),
    [
        ({}, ["TCP's, with cubic: streams begin slowly, and again after a pause.", "queues that"], ["lost", "TLS"]),
        ({"network": {"loss": 0.1}}, ["come late and narrow a sender's window", "gets 8 connections"], []),
        ({"network": {"loss": 0.1}, "gossip": {"connections": 1}}, ["lost packets come late"], ["connections"]),
        ({"network": {"congestion": "bbr", "tls": True}}, ["with bbr and TLS", "nearly stops for 0.2 s"], ["lost"]),
        ({"network": PERFECT}, ["There is no TCP"], ["queues that"]),
        ({"network": {"congestion": "none", "loss": 0.1}}, ["10 % of messages and streams are lost.", "no TCP"], []),
        ({"membership": {"mode": "ideal"}}, ["There is no TCP"], ["queues that"]),
        ({"membership": {"mode": "ideal"}, "network": {"loss": 0.1}}, ["Links are TCP's, with cubic"], []),
        ({"fleet": [{"number": 3, "name": "bob", "loss": 0.1, "latency_ms": 7}]},
         ["bob (3): 7 ms further, 10 % of packets lost.", "lost packets come late"], []),
        ({"fleet": [{"number": 3, "to": 5, "step_s": 0.5, "rate_mbit_s": 8}]},
         ["peers (3 to 5): 8 Mbit/s up, 8 down, steps of 0.5 s."], ["lost"]),
    ],
)  # fmt: skip
def test_a_report_says_what_of_links_it_models(tables, said, unsaid):
    text = words.in_words(Scenario.from_mapping({"rounds": 1, "peers": 9} | tables))
    assert all(part in text for part in said), text
    assert not any(part in text for part in unsaid), text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.045, "45 ms"), (12.34, "12.3 s"), (60, "1 min"), (125, "2 min 5 s"), (3599.9, "1 h"),
     (5400, "1 h 30 min"), (86_400, "1 day"), (183_600, "2 days 3 h"), (math.nan, "–"), (math.inf, "–")],  # noqa: RUF001
)  # fmt: skip
def test_durations_have_at_most_two_parts(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_999, "1 MB"), (8e9, "8 GB")],
)
def test_bytes_are_decimal_with_three_digits(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (12_345, "12,345"), (1_234_567, "1.23 million"), (0.5, "0.5")])
def test_counts_are_written_out_up_to_a_million(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0.0 %"), (0.934, "93.4 %"), (1, "100.0 %"), (0.99996, "99.996 %"), (0.00004, "0.004 %")]
)
def test_a_share_is_never_rounded_to_all_or_nothing(share, text):
    assert share_text(share) == text


def test_axes_have_units_that_keep_their_figures_short():
    assert [time_axis(s)[1] for s in (0.2, 30, 600, 40_000, 400_000)] == ["ms", "s", "min", "h", "days"]
    assert [bytes_axis(b) for b in (500, 2e6, 8e9)] == [(1.0, "B"), (1e6, "MB"), (1e9, "GB")]


def test_a_rate_that_falls_is_said_to():
    falling = {"name": "adamw", "lr": 0.003, "schedule": "cosine", "schedule_steps": 3000}
    scenario = Scenario.from_mapping({"rounds": 10, "task": {"optimizer": falling}})
    assert "with AdamW (learning rate 0.003, a cosine over 3,000 steps)." in words.in_words(scenario)
