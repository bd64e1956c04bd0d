"""What `auto` takes: by the link's rate, and by what codecs cost whoever offers."""

from __future__ import annotations

import numpy as np
import pytest

from gossip import kernel
from gossip.codecs import fastest
from gossip.config import Config
from gossip.wire.messages import Accept
from node import Node
from tests.gossip.exchange.sides import B, Side, offer
from tests.gossip.kernel.building import passes


@pytest.mark.parametrize(
    ("compiled", "rate_mb_s", "codec"),
    [
        (True, None, "bf16"), (False, None, "bf16"), (True, 0.0, "bf16"),
        (True, 10.0, "int8"), (True, 2_000.0, "int8"), (True, 8_000.0, "bf16"), (True, 20_000.0, "fp32"),
        (False, 10.0, "int8"), (False, 800.0, "bf16"), (False, 2_000.0, "fp32"),
    ],
)  # fmt: skip
def test_the_codec_is_the_one_that_ends_soonest(compiled, rate_mb_s, codec):
    assert fastest(rate_mb_s, compiled) == codec


@pytest.mark.parametrize(("compiled", "codec"), [(True, "int8"), (False, "fp32")])
def test_who_offers_goes_by_its_own_passes_and_the_other_takes_that(compiled, codec):
    sides = [Side(config=Config(codec="auto"), compiled=one) for one in (compiled, not compiled)]
    asker, asked = (side.exchanges for side in sides)
    for exchanges in (asker, asked):
        exchanges.durations.rates[B] = 2_000.0
    asker.begin(0.0)
    [send] = [effect for effect in asker.snapshotted(1, 0.0) if hasattr(effect, "message")]
    assert send.message.codec == codec
    asked.on_offer(B, offer(codec=send.message.codec), 0.0)
    [accept, transfer] = asked.snapshotted(7, 0.0)
    assert (accept.message.codec, transfer.codec) == (codec, codec)
    [transfer] = asker.on_accept(B, Accept(1, 0.0, 0.5, codec), 0.0)
    assert transfer.codec == codec


@pytest.mark.parametrize("has", [True, False])
def test_a_peer_knows_what_codecs_cost_its_node(has, monkeypatch):
    monkeypatch.setattr(kernel, "passes", passes() if has else None)
    with Node({"x": np.zeros(4, np.float32)}, listen="127.0.0.1:0") as node:
        assert node._training.runtime.peer.local.compiled is has
