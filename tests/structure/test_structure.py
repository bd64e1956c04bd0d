"""The code has the structure of ARCHITECTURE.md: no import cycles, no full folders, no names with two meanings."""

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
    of_one_caller = {"Presence": 9, "Swarm": 8}
    assert figures.constructors(7) == of_one_caller


def test_no_class_has_anothers_name():
    assert figures.double() == []


@pytest.mark.parametrize("package", figures.PACKAGES)
def test_all_is_counted(package):
    assert len(figures.sources(figures.ROOT / package)) > 40


CEILINGS = {  # Lines of Python and C. The aim stands behind each; a change that goes over it removes as much elsewhere.
    ("gossip", "node"): 49_872,  # 38,000; raised by 182 for ends that were wrong without a word.
    ("sim",): 13_759,  # 12,500; raised by 58 for the same.
    ("tests",): 69_312,  # 57,000; raised by 544 for these, and for torchtitan and Ray Train.
    ("benchmarks",): 11_804,  # 10,500
}
MOST_WORDS = 115_000  # Of all Markdown.
LONGEST_FILE, LONGEST_FUNCTION = 540, 70  # Lines; the aims are 450 and 60.


@pytest.mark.parametrize("folders", CEILINGS, ids=" ".join)
def test_no_part_of_the_tree_grows(folders):
    paths = [path for folder in folders for kind in ("*.py", "*.c") for path in (figures.ROOT / folder).rglob(kind)]
    assert figures.lines(paths) <= CEILINGS[folders]


def test_documents_do_not_grow():
    words = [word for path in figures.documents() for word in path.read_text(encoding="utf-8").split()]
    assert sum(any(letter.isascii() and letter.isalnum() for letter in word) for word in words) <= MOST_WORDS


def test_files_and_functions_are_read_in_one_sitting():
    assert max(figures.lines([path]) for path in figures.production()) <= LONGEST_FILE
    assert max(figures.facts(path).longest for path in figures.production()) <= LONGEST_FUNCTION
