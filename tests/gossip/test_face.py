"""Drivers ask a Peer by its face, and reach for none of its parts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gossip.face import Face
from gossip.peer import Peer

ROOT = Path(__file__).parents[2]
OPEN = {"id", "config"}  # what a driver gave
PARTS = set(Face.__annotations__) - OPEN
DRIVERS = sorted(path for package in ("node", "sim") for path in (ROOT / package).rglob("*.py"))


def is_peer(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "peer") or (
        isinstance(node, ast.Name) and node.id == "peer"
    )


def reaches(source: str) -> list[str]:
    return [
        f"line {node.lineno}: peer.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in PARTS and is_peer(node.value)
    ]


@pytest.mark.parametrize("path", DRIVERS, ids=[str(path.relative_to(ROOT)) for path in DRIVERS])
def test_a_driver_reaches_for_no_part_of_a_peer(path):
    assert reaches(path.read_text(encoding="utf-8")) == []


def test_a_reach_would_be_found():
    assert sorted(reaches("host.peer.exchanges.table\nlocal = peer.local")) == [
        "line 1: peer.exchanges",
        "line 2: peer.local",
    ]
    assert {"membership", "exchanges", "local", "joining", "donating"} <= PARTS


def test_every_part_is_a_peers():
    assert issubclass(Peer, Face)
    made = set(Peer.__init__.__code__.co_names)
    assert made >= PARTS - {"id"}
