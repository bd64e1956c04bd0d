"""Attacks by a real member against live nodes: the quick ones of benchmarks/siege, held to what it promises."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.messages import MESSAGES

SIEGE = Path(__file__).parents[2] / "benchmarks" / "siege"
QUICK = [
    "version", "richer", "accept-stall", "offer-stall", "third-party", "accusations", "garbage", "moniqua", "extremes",
    "colluders",
]  # fmt: skip


def test_the_attack_absurd_knows_every_kind_of_field(monkeypatch):
    monkeypatch.syspath_prepend(str(SIEGE))
    strangers = importlib.import_module("strangers")
    record = MemberRecord(PeerId(bytes(16)), bytes(32), 1, address=Address("127.0.0.1", 1))
    frames = list(strangers.absurdities(record))
    assert len(frames) > 5 * len(MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_honest_nodes_stand_a_siege(name):
    done = subprocess.run(
        [sys.executable, str(SIEGE), name, "--json"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    figures = json.loads(done.stdout)[name]
    assert figures["faults"] == [], figures
