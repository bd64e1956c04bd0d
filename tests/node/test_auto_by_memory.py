"""Nodes of one host whose codec is `auto`: fp32 for as long as vectors are read where they lie, then by the rate."""

from __future__ import annotations

import contextlib
import socket
import sys

import numpy as np
import pytest

from gossip.config import Config
from gossip.exchange.durations import Durations
from node.model.host_memory import HostMemory

SIZE = 1 << 18
CONFIG = Config(codec="auto", mix_every_steps=2, join_timeout_s=3.0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory of a host is shared on Linux")


@pytest.fixture
def codecs(train, until, monkeypatch):
    """Two nodes whose links are slow, as they find; in which codecs the next so many exchanges begin."""
    monkeypatch.setattr(Durations, "rate", lambda durations, partner: 10.0)
    one = train({"x": np.zeros(SIZE, np.float32)}, config=CONFIG)
    two = train({"x": np.zeros(SIZE, np.float32)}, config=CONFIG, seeds=[one.node.address])
    begun = []
    one.node.on("exchange.begun", lambda event: begun.append(event.codec))

    def following(count=5):
        before = len(begun)
        until(lambda: len(begun) >= before + count, 30)
        return set(begun[before:])

    def links():
        return [link for side in (one, two) for link in side.side.runtime.links.all()]

    return following, links


def shared(links):
    return len(links) >= 2 and all(link.channel is not None and link.channel.open for link in links)


def test_by_memory_it_is_fp32_until_the_channel_ends(codecs, until):
    following, links = codecs
    until(lambda: shared(links()), 30)
    following(8)  # the first snapshots lie elsewhere, and what was agreed on before is in another
    assert following() == {"fp32"}
    for link in links():
        with contextlib.suppress(OSError):  # its node has found that the other end is
            link.channel.socket.shutdown(socket.SHUT_RDWR)  # as if the other process had closed it
    following()  # which is found when it is used, or looked at
    assert following() == {"int8"}
    assert not any(link.channel.open for link in links())


def test_where_a_channel_is_and_vectors_lie_elsewhere_it_is_the_rates(codecs, until, monkeypatch):
    monkeypatch.setattr(HostMemory, "of", classmethod(lambda cls, values: None))
    following, links = codecs
    until(lambda: shared(links()), 30)
    following(8)
    assert following() == {"int8"}
