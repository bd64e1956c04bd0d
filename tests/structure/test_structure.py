"""The code has the structure of ARCHITECTURE.md: no import cycles, no full folders, no names with two meanings."""

from __future__ import annotations

import ast

import pytest

from tests.structure import figures

MOST = 12  # Modules of a folder that a reader takes in at a glance.


def test_no_imports_go_in_a_circle():
    assert list(figures.circles(figures.imports())) == []


def test_an_import_for_type_checkers_counts():
    code = "if TYPE_CHECKING:\n    from node.observe.page.page import Page\nimport math"
    wanted = figures.names_in(ast.parse(code).body)
    assert wanted == {"math", "node.observe.page.page", "node.observe.page.page.Page"}
    assert "node.observe.page.page" in figures.imports()["node.network.service"]


def test_a_circle_would_be_found():
    wanted = figures.imports()
    wanted["gossip.ids"] = {*wanted["gossip.ids"], "gossip.peer"}
    (circle,) = [circle for circle in figures.circles(wanted) if "gossip.peer" in circle][:1]
    assert "gossip.ids" in circle
    assert len(wanted) > 150
    assert sum(map(len, wanted.values())) > 500, "modules import others"


def test_no_folder_is_full():
    folder, count = figures.fullest()
    assert count <= MOST, f"{folder} has {count} modules"


def test_a_constructor_takes_what_a_reader_keeps_in_mind():
    public = {"Node": 18}
    of_one_caller = {"Host": 12, "Presence": 9, "Swarm": 8}
    assert figures.constructors(7) == public | of_one_caller


def test_no_class_has_anothers_name():
    assert figures.double() == []


@pytest.mark.parametrize("package", figures.PACKAGES)
def test_all_is_counted(package):
    assert len(figures.sources(figures.ROOT / package)) > 40
