"""Notebooks played by nbclient: by the test, which saves nothing, and by make notebooks, which saves their output.

python -m tests.notebooks.playing
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
CELL_S = 1_800  # The timeout of a cell, long enough for a busy machine.


def played(path: Path) -> Any:
    """Run all cells of a notebook in its own folder, and return the notebook. Raises the exception of a cell."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=resources).execute()
    return notebook


def main() -> None:
    import nbformat

    for path in NOTEBOOKS:
        notebook = played(path)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # The times of execution differ in every run.
        nbformat.write(notebook, path)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
