"""The pages: their examples run, their pictures are up to date, and the index lists all of them."""

import doctest
import importlib
import importlib.util
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch
import typer.main

from gossip.__main__ import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "pycon")], ids=name)
def test_the_sessions_of_a_page_run_one_after_the_other(page):
    session = "\n".join(blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, name(page), str(page), 0)
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(said)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_what_a_page_shows_as_python_is_python(page):
    for number, block in enumerate(blocks(page, "python"), start=1):
        compile(textwrap.dedent(block), f"{name(page)}, example {number}", "exec")


def test_the_script_that_one_starts_with_runs_and_learns(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    for variable in list(os.environ):
        if variable.startswith("GOSSIP_"):
            monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    script, _prediction = blocks(DOCS / "start.md", "python")
    exec(compile(script, "docs/start.md", "exec"), {})
    accuracy, samples = re.fullmatch(
        r"([\d.]+)% after ([\d,]+) samples of the whole swarm\n", capsys.readouterr().out
    ).groups()
    assert float(accuracy) > 95
    assert int(samples.replace(",", "")) == 17 * 1797, "of one process"
    assert len(list(tmp_path.glob("digits-*.safetensors"))) == 1


def test_the_pictures_are_those_that_the_script_draws():
    spec = importlib.util.spec_from_file_location("concepts", DOCS / "pictures" / "concepts.py")
    concepts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(concepts)
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    for title, draw in concepts.PICTURES.items():
        assert (DOCS / "pictures" / f"{title}.svg").read_text(encoding="utf-8") == draw(), "make reference"
        assert f"](pictures/{title}.svg)" in page


def test_every_page_has_its_place_in_an_index():
    listed = set()
    for index in [DOCS / "index.md", *DOCS.glob("*/README.md")]:
        for body in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(encoding="utf-8"), re.DOTALL):
            for entry in body.split("\n"):
                if entry and not entry.startswith(":"):
                    found = list(index.parent.glob(f"{entry}.md")) + list(index.parent.glob(f"{entry}.ipynb"))
                    assert found, f"{name(index)} names {entry}"
                    listed |= {path.resolve() for path in found}
    assert {page for page in PAGES if page not in listed} == {DOCS / "index.md"}


def test_the_page_of_the_command_has_every_command_and_every_option_of_it():
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    commands = typer.main.get_command(app).commands
    assert len(commands) > 10
    for command, found in commands.items():
        assert f"| `gossip {command}" in page, command
        told = sections.get(f"gossip {command}", page)  # Small commands share a section, or have only a row.
        if command == "run":
            told += (DOCS / "options.md").read_text(encoding="utf-8")
        options = [name for one in found.params if one.param_type_name == "option" for name in one.opts]
        missing = [name for name in options if name != "--help" and name not in told]
        assert not missing, f"gossip {command}"


def test_the_python_that_a_reader_sees_of_the_api_is_there():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"auto(?:class|function):: ([\w.]+)", text)
    assert {"gossip.Node", "gossip.Config", "gossip.Scenario", "gossip.simulate"} <= set(named)
    for path in named:
        if ".adapters." not in path:  # Adapters need their frameworks.
            module, _, attribute = path.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), path
