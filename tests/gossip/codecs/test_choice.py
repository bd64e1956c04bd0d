"""The codec that `auto` takes: by the link's rate, and by the cost of codecs on the offering side."""

import math

import numpy as np
import pytest

from gossip import kernel
from gossip.arithmetic.subsets import ALL
from gossip.codecs import COMPILED, NUMPY, fastest_codec
from gossip.config import Config
from node import Node
from node.network.transfers.coding import measure_machine
from tests.gossip.exchange.sides import B, C, Side, accept
from tests.gossip.kernel.building import passes


@pytest.mark.parametrize(
    ("compiled", "rate_mb_s", "codec"),
    [
        (True, None, "int8"), (False, None, "int8"), (True, 0.0, "int8"),
        (True, 10.0, "int8"), (True, 2_000.0, "int8"), (True, 8_000.0, "bf16"), (True, 20_000.0, "fp32"),
        (False, 10.0, "int8"), (False, 800.0, "bf16"), (False, 2_000.0, "fp32"),
        (True, math.inf, "fp32"), (False, math.inf, "fp32"),
    ],
)  # fmt: skip
def test_the_codec_is_the_one_that_ends_soonest(compiled, rate_mb_s, codec):
    assert fastest_codec(rate_mb_s, COMPILED if compiled else NUMPY) == codec


@pytest.mark.parametrize(("compiled", "codec"), [(True, "int8"), (False, "fp32")])
def test_who_offers_goes_by_its_own_passes_and_the_other_takes_that(compiled, codec):
    machines = [COMPILED if one else NUMPY for one in (compiled, not compiled)]
    asker, asked = (Side(config=Config(codec="auto"), machine=machine) for machine in machines)
    for side in (asker, asked):
        side.exchanges.durations.rates[B] = 2_000.0
    [sent] = asker.offer_mix()
    assert sent.message.codec == codec
    [answer, transfer] = asked.answer(codec=codec)
    assert (answer.message.codec, transfer.codec) == (codec, codec)
    [transfer] = asker.exchanges.on_accept(B, accept(codec=codec), 0.0)
    assert transfer.codec == codec


def test_a_partner_without_a_past_is_offered_what_the_others_links_bear():
    exchanges = Side(config=Config(codec="auto")).exchanges
    assert exchanges.offered_codec(B, ALL) == "int8"
    exchanges.durations.add(C, 1e-6, 10_000_000)
    assert exchanges.offered_codec(B, ALL) == exchanges.offered_codec(C, ALL) == "fp32"


@pytest.mark.parametrize(("configured", "taken"), [("auto", "int8"), ("fp32", "int8"), ("int4", "int4")])
def test_of_two_codecs_the_leaner_is_agreed_on_and_auto_takes_what_is_offered(configured, taken):
    [answer, transfer] = Side(config=Config(codec=configured)).answer(codec="int8")
    assert (answer.message.codec, transfer.codec) == (taken, taken)
    asker = Side(config=Config(codec="int8"))
    asker.offer_mix()
    [transfer] = asker.exchanges.on_accept(B, accept(codec=taken), 0.0)
    assert transfer.codec == taken


@pytest.mark.parametrize("has", [True, False])
def test_a_peer_knows_what_codecs_cost_its_node(has, monkeypatch):
    monkeypatch.setattr(kernel, "passes", passes() if has else None)
    with Node({"x": np.zeros(4, np.float32)}, listen="127.0.0.1:0") as node:
        machine = node._training.network.runtime.peer.local.machine
    assert machine == measure_machine(kernel.implementation())
    assert machine.coding_s("fp32") == 0.0 <= machine.coding_s("int8") < 100.0
    assert machine.cores >= 1
