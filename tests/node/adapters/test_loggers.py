"""A node's figures in common loggers, for each of which a stand-in has the same methods."""

import sys
import types

import pytest
import torch
from torch import nn

from node.adapters.loggers import Exporter, observe, tensorboard, wandb


class Writer:
    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))

    def log(self, values):
        self.rows.append(values)


@pytest.fixture
def pair(train, until):
    torch.manual_seed(0)
    first = train(nn.Linear(4, 2), work=lambda: 0.5)
    second = train(nn.Linear(4, 2), work=lambda: 0.5, seeds=[first.node.address])
    # A node signs its figures, the loss among them, a quarter of a second after it last did.
    until(lambda: first.node.metrics().exchanges_done > 2 and first.node.metrics().loss is not None)
    return first, second


def test_an_exporter_logs_every_figure_that_is_a_number_at_its_pace_and_once_at_the_end(pair, until):
    writer = Writer()
    rows = writer.rows
    exporter = Exporter(pair[0].node, tensorboard(writer), every_s=3600.0)
    pair[0].do(lambda node: exporter())
    assert rows == []
    until(lambda: exporter.last_exchange is not None)
    exporter.every_s = 0.0
    pair[0].do(lambda node: exporter())
    names = {name: value for name, value, _ in rows}
    assert names["gossip/loss"] == 0.5
    assert {"gossip/exchanges_done", "gossip/last_exchange_seconds", "gossip/last_exchange_distance"} <= set(names)
    assert all(type(value) is float for value in names.values())
    assert "gossip/partner" not in names
    assert {step for _, _, step in rows} == {rows[0][2]}
    before = len(rows)
    exporter.close()
    assert len(rows) > before
    assert len(pair[0].node._training.listeners.listeners) == 0


def test_wandb_is_given_the_step_among_the_values(pair):
    run = Writer()
    exporter = Exporter(pair[0].node, wandb(run))
    exporter.close()
    (values,) = run.rows
    assert values["gossip/step"] > 0
    assert values["gossip/loss"] == 0.5


def test_opentelemetry_reads_gauges_when_it_collects(pair, monkeypatch):
    module = types.ModuleType("opentelemetry.metrics")
    module.Observation = lambda value, attributes: (value, attributes)
    monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", module)
    gauges = {}
    meter = types.SimpleNamespace(create_observable_gauge=lambda name, callbacks: gauges.update({name: callbacks[0]}))
    node = pair[0].node
    observe(node, meter)
    assert list(gauges["gossip.loss"](None)) == [(0.5, {"node": node.id})]
    assert "gossip.partner" not in gauges
    assert "gossip.version" not in gauges
