"""Nodes that choose how often they mix: their measurements, their choice, and its reports."""

import time
from dataclasses import replace

import numpy as np

from gossip.codecs.choice import MAX_INTERVAL_STEPS
from node.observe.figures import line_of, reading, status_reading, table_of
from tests.harness.configs import tuned
from tests.node.conftest import QUICK
from tests.node.test_node import mixed

CONFIG = replace(QUICK, mix_every_steps="auto", codec="auto").for_training()


def pair(train, config, work, elements=1 << 18):
    first = train({"x": np.zeros(elements, np.float32)}, work=work, config=config)
    second = train({"x": np.ones(elements, np.float32)}, work=work, config=config, seeds=[first.node.address])
    return first, second


def intervals(nodes):
    return [trainee.side.network.peer.schedule.every for trainee in nodes]


def test_a_node_mixes_more_rarely_where_mixing_would_cost_more_than_its_share(train, until):
    nodes = pair(train, tuned(CONFIG, mixing_share=1e-4), lambda: time.sleep(0.002))
    assert all(2 <= each <= MAX_INTERVAL_STEPS for each in intervals(nodes))
    until(lambda: intervals(nodes) == [MAX_INTERVAL_STEPS] * 2, 30)


def test_it_is_told_how_often_and_in_which_codec(train, until):
    nodes = pair(train, CONFIG, lambda: time.sleep(0.02), elements=64)
    until(mixed(*nodes, times=4), 30)
    row = status_reading(nodes[0].side.source())
    assert 2 <= row["interval_steps"] <= MAX_INTERVAL_STEPS
    assert row["codec"] in ("bf16", "int8", "fp32")
    said = f"every {row['interval_steps']} steps in {row['codec']}"
    assert dict(table_of(reading(nodes[0].side.source()) | row))["mixes"] == said
    assert said in line_of(reading(nodes[0].side.source()) | row | {"mb_s_sent": 0.0, "mb_s_received": 0.0})
