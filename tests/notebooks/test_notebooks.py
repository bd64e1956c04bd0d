"""The notebooks: each runs from its first cell to its last, and holds the output of a whole run."""

import json
import re
from pathlib import Path

import pytest

from tests.notebooks.playing import NOTEBOOKS, played

BYTES = 400_000  # The largest notebook with its pictures, since the repository keeps every version.
OF_A_MACHINE = re.compile(r"/(home|root|tmp|work|Users)/|File \"")


def cells_of(path: Path) -> list[dict[str, object]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def shown_by(cell: dict[str, object]) -> list[dict[str, object]]:
    return cell["outputs"]


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["methods", "study", "swarm"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_saved_after_one_run_of_all_its_cells(path):
    cells = cells_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "make notebooks"
    kinds = {output["output_type"] for cell in cells for output in shown_by(cell)}
    assert "error" not in kinds
    pictures = [output for cell in cells for output in shown_by(cell) if "image/png" in output.get("data", {})]
    assert pictures, "a reader who runs nothing sees what comes out"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_shows_is_small_and_tells_of_no_machine(path):
    assert path.stat().st_size < BYTES
    for cell in cells_of(path):
        for output in shown_by(cell):
            shown = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
            assert not OF_A_MACHINE.search(json.dumps(shown) + json.dumps(output.get("text", ""))), output


@pytest.mark.built
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_what_it_claims_holds(path):
    """Each notebook asserts its own claims; a cell that raises fails this test."""
    notebook = played(path)
    assert all(cell.get("execution_count") for cell in notebook.cells if cell["cell_type"] == "code")
