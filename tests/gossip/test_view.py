"""Drivers read a Peer's view and some facts of its parts, and change none of them."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

from gossip.peer import Peer
from tests.gossip.test_contract import names, rows

ROOT = Path(__file__).parents[2]
DRIVERS = sorted(path for package in ("node", "sim") for path in (ROOT / package).rglob("*.py"))
PARTS = set(Peer.__annotations__) - {"id", "config", "view"}
# The facts of a part that a driver reads, besides everything in ``view``.
READ = {row[0].strip("`"): names(row[1]) for row in rows("What a driver reads")}


def is_peer(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "peer") or (
        isinstance(node, ast.Name) and node.id == "peer"
    )


def part_of(node: ast.AST) -> str | None:
    """Return the name of the part of a peer that this expression reads, or None."""
    found = isinstance(node, ast.Attribute) and is_peer(node.value) and node.attr in {*PARTS, "view"}
    return node.attr if found else None


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed code of a driver, or an empty module if the word "peer" does not occur in it."""
    code = path.read_text(encoding="utf-8")
    return ast.parse(code if "peer" in code else "")


def reaches(tree: ast.Module) -> list[str]:
    """Return every use of a part of a peer in ``tree`` that no driver may make."""
    allowed: set[ast.AST] = set()
    found: list[str] = []
    for node in ast.walk(tree):
        part = part_of(node.value) if isinstance(node, ast.Attribute) else None
        if part is None:
            continue
        if isinstance(node.ctx, ast.Load) and (part == "view" or node.attr in READ.get(part, ())):
            allowed.add(node.value)
        else:
            found.append(f"line {node.lineno}: peer.{part}.{node.attr}")
            allowed.add(node.value)
    for node in ast.walk(tree):
        part = part_of(node)
        if part is not None and node not in allowed:
            found.append(f"line {node.lineno}: peer.{part}")
    return found


@functools.cache
def attributes() -> dict[str, set[str]]:
    """Return the attributes that drivers read of each part."""
    found = defaultdict(set)
    for path in DRIVERS:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and (part := part_of(node.value)) is not None:
                found[part].add(node.attr)
    return found


@pytest.mark.parametrize("path", DRIVERS, ids=[str(path.relative_to(ROOT)) for path in DRIVERS])
def test_a_driver_only_reads_facts_of_a_peer_that_are_listed(path):
    assert reaches(tree_of(path)) == []


def test_a_write_and_an_unlisted_read_would_be_found():
    wrong = ast.parse("host.peer.partners.choose()\nlocal = peer.local\npeer.local.version = 1.0")
    assert sorted(reaches(wrong)) == [
        "line 1: peer.partners.choose",
        "line 2: peer.local",
        "line 3: peer.local.version",
    ]
    assert reaches(ast.parse("peer.view.ready and peer.membership.me.id")) == []


@pytest.mark.parametrize("part", READ)
def test_every_listed_fact_is_read_by_a_driver(part):
    assert READ[part] == READ[part] & attributes()[part]


def test_a_peer_has_no_ancestors():
    assert Peer.__mro__ == (Peer, object)
