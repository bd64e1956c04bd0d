"""Attacks by a real member against live nodes: the quick ones of benchmarks/siege, held to what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIEGE = Path(__file__).parents[2] / "benchmarks" / "siege"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["version", "richer", "accept-stall", "offer-stall", "third-party", "accusations", "garbage", "moniqua"]
)
def test_honest_nodes_stand_a_siege(name):
    done = subprocess.run(
        [sys.executable, str(SIEGE), name, "--json"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    figures = json.loads(done.stdout)[name]
    assert figures["faults"] == [], figures
