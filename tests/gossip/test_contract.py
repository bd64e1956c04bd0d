"""CONTRACT.md names every effect and report, and its driver works."""

import doctest
import re
from pathlib import Path
from typing import get_args

import pytest

import gossip
from gossip.effects import Effect
from gossip.peer import Peer
from node.network.runtime import REPORTS

PAGE = Path(gossip.__file__).with_name("CONTRACT.md")
TEXT = PAGE.read_text(encoding="utf-8")
NOT_REPORTS = {"continue_from", "add_founders", "new_session", "receive"}  # before the start, and messages


def rows(title: str) -> list[list[str]]:
    """Return the rows of the table under this heading, without its head."""
    section = TEXT.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def test_the_smallest_driver_works():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 15
    assert failed == 0


def test_every_effect_has_a_row():
    assert {row[0].strip("`") for row in rows("Effects")} == {kind.__name__ for kind in get_args(Effect)}


def test_every_report_is_named_and_is_a_peers():
    loop = set(re.findall(r"peer\.(\w+)\(", TEXT.split("## Effects", 1)[0])) - {"REPORT"}
    told = loop | {name for title in ("Effects", "Other reports") for row in rows(title) for name in names(row[-1])}
    reports = {name for name in told if name not in ("compare", "expect")}
    assert {*REPORTS, "on_proof_of_life", "note_boundary", "receive", "continue_from"} == reports
    assert all(callable(getattr(Peer, name)) for name in reports)


@pytest.mark.parametrize("name", sorted(set(vars(Peer)) - NOT_REPORTS))
def test_a_method_that_returns_effects_is_a_report(name):
    method = vars(Peer)[name]
    if callable(method) and "list[Effect]" in str(method.__annotations__.get("return")) and name not in INNER:
        assert name in TEXT


INNER = {"end_snapshot", "follow_up"}  # only other reports call these
