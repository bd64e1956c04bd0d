"""Attacks by a real member on live nodes: the quick attacks of benchmarks/siege stay within their promised bounds."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.messages import MESSAGES

SIEGE = Path(__file__).parents[2] / "benchmarks" / "siege"
QUICK = [
    "version", "richer", "accept-stall", "offer-stall", "third-party", "accusations", "garbage", "moniqua", "extremes",
    "colluders", "nan-pieces", "nan-chunks", "stripes", "sleeper",
]  # fmt: skip
# Promises that some attacks miss in so short a time, as docs/results/sieges.md says.
MISSES = {"nan-chunks": "named by nobody", "sleeper": "progress "}


@pytest.fixture
def siege(monkeypatch):
    """Import a module of the siege."""
    for folder in (SIEGE.parent, SIEGE):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


def test_the_attack_absurd_knows_every_kind_of_field(siege):
    strangers = siege("strangers")
    record = MemberRecord(PeerId(bytes(16)), bytes(32), 1, address=Address("127.0.0.1", 1))
    frames = list(strangers.absurdities(record))
    assert len(frames) > 5 * len(MESSAGES)


@pytest.mark.parametrize(
    ("progress", "usual", "fault"),
    [
        (1.49, 1.25, None), (1.51, 1.25, "progress 1.51, where the members in contact make 1.25"),
        (14.23, 2.0, "progress 14.23, where the members in contact make 2.00"),
        (float("nan"), 1.25, "progress nan, where the members in contact make 1.25"),
        (1.0, float("nan"), "progress 1.00, where the members in contact make nan"),
    ],
)  # fmt: skip
def test_no_attack_is_kept_under_which_sample_counts_grow_too_fast(siege, progress, usual, fault):
    verdict, attack = siege("verdict"), siege("attack")
    figures = {"mixing": 1.0, "accuracy": 0.0, "memory_mb": 1.0, "well_s": 0.0}
    one = verdict.Verdict(attack.Attack("liars", "", None, named=""), progress=progress, usual=usual, **figures)
    one.judge()
    assert one.faults == ([] if fault is None else [fault])
    assert one.row.endswith("| kept |") == (fault is None)


def test_members_in_contact_are_those_of_the_node_that_had_most_while_the_siege_lasted(siege):
    rows = [[(1.0, 4), (2.0, 5), (3.0, 6), (9.0, 90)], [(2.0, 4), (3.0, 4)], []]
    nodes = [SimpleNamespace(looks=[{"t": at, "alive": alive} for at, alive in one]) for one in rows]
    assert siege("verdict").contacts(nodes, 2.0, 3.0) == 5.5


def test_attacks_on_groups_last_long_enough_to_be_measured(siege):
    siege("groups")
    attacks = [one for one in siege("attack").ATTACKS.values() if ("mixing", "group") in one.config]
    assert {one.least_s for one in attacks} == {20.0}
    assert len(attacks) >= 8


def test_the_mixing_under_siege_has_a_standard_error_by_its_seconds(siege):
    """The node takes ten steps a second, and mixes 2 and 4 times in them by turns, under siege always 2 times."""
    looks = [
        {"t": second + tenth / 10, "steps": 10 * second + tenth,
         "mixes": [(second + tenth / 10, "b")] * (tenth in ((1, 2, 3, 4) if second < 20 and second % 2 else (1, 2)))}
        for second in range(40) for tenth in range(10)
    ]  # fmt: skip
    nodes = [SimpleNamespace(id="a", looks=looks), SimpleNamespace(id="b", looks=[])]
    share, error = siege("verdict").mixing_share(nodes, (0.0, 19.95), (20.0, 39.95))
    assert share == pytest.approx(2 / 3, abs=0.01)
    assert error == pytest.approx(2 / 3 * (1.0 / 3) / 19**0.5, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_honest_nodes_stand_a_siege(name):
    done = subprocess.run(
        [sys.executable, str(SIEGE), name, "--json"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    figures = json.loads(done.stdout)[name]
    missed = MISSES.get(name)
    assert [fault for fault in figures["faults"] if missed is None or not fault.startswith(missed)] == [], figures
