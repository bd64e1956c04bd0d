"""docs/loop.md and docs/node.md: their examples run, and they list every argument and figure."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from node import Member, Node
from node.options import reference_page

LOOP, NODE = (
    (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8") for page in ("loop.md", "node.md")
)
PAGE = LOOP + NODE
OPTIONS = (Path(__file__).parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
CALLS = re.findall(r"^##+ .*$", PAGE, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12 warns at a fork.
def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 6
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/node.md, example {number + 1}", "exec"), namespace)
    assert re.fullmatch(r"resumed at 2,0\d\d samples\n", capsys.readouterr().out)
    assert (tmp_path / "run.json").exists()
    assert (tmp_path / "state" / "finished").exists()


def test_every_argument_of_the_constructor_is_in_the_table():
    table = re.findall(r"^\| `(\w+)` \|", NODE.partition("### What travels")[0] + OPTIONS, re.MULTILINE)
    assert table == [name for name in inspect.signature(Node.__init__).parameters if name != "self"]
    assert all(f"\n        {name}: " in Node.__doc__ for name in table)


def test_the_page_of_options_is_what_the_rows_say():
    assert reference_page() == OPTIONS, "make reference"


def test_a_name_that_is_no_option_is_refused_as_python_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'listens'"):
        Node(None, listens="127.0.0.1:0")


@pytest.mark.parametrize("call", re.findall(r"node\.\w+(?:\((?:[^()]|\([^)]*\))*\))?", "\n".join(CALLS)))
def test_what_the_page_names_is_there_with_those_arguments(call):
    name, mark, given = call.removeprefix("node.").partition("(")
    found = inspect.getattr_static(Node, name)
    if not mark:
        assert isinstance(found, property)
        return
    parameters = [one for one in inspect.signature(found).parameters.values() if one.name != "self"]
    written = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    assert ", ".join(written) == given[:-1]


def test_the_page_names_what_readme_and_examples_use():
    named = set(re.findall(r"node\.(\w+)", "\n".join(CALLS)))
    for path in [Path("README.md"), *Path("examples").glob("*.py")]:
        text = (Path(__file__).parents[3] / path).read_text(encoding="utf-8")
        used = set(re.findall(r"\bnode\.(\w+)\b(?!\.)", text)) - {"md"}
        assert used <= named, path


@pytest.mark.parametrize("field", dataclasses.fields(Member))
def test_every_figure_of_a_member_is_named(field):
    assert f"`{field.name}`" in PAGE
