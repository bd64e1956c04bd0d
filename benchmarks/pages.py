"""The tables of the pages in docs/results, and the finished runs of which they are made."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
END = "<!-- end -->"
PROCESSES = 2  # each run takes one core
Job = TypeVar("Job")


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the head first."""
    head, *body = rows
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *body))


def put(page: Path, name: str, rows: Sequence[Sequence[str]]) -> None:
    """Write a table between ``<!-- table: name -->`` and the next ``<!-- end -->``; the prose around it stays.

    Args:
        page: The file, which must have the mark.
        name: The table's.
        rows: The head first; all of one length.

    Raises:
        ValueError: The page has no such mark, or a row is of another length.
    """
    text = page.read_text(encoding="utf-8")
    mark = f"<!-- table: {name} -->\n"
    before, has_mark, rest = text.partition(mark)
    _, has_end, after = rest.partition(END)
    if not has_mark or not has_end:
        raise ValueError(f"{page} has no table {name!r}: it needs the lines {mark.strip()} and {END}.")
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"A row of the table {name!r} has not {len(rows[0])} cells, as its head has.")
    page.write_text(f"{before}{mark}\n{table(rows)}\n{END}{after}", encoding="utf-8")


class Runs:
    """The figures of finished runs by their settings, in a file of ``runs/``: an interrupted benchmark goes on there.

    The file does not notice changed code. ``fresh`` ignores what it holds.
    """

    def __init__(self, name: str, fresh: bool = False) -> None:
        self.path = ROOT / "runs" / f"{name}.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() and not fresh else []
        found = (json.loads(line) for line in lines)
        self.figures: dict[str, dict[str, Any]] = {
            line["settings"]: line["figures"] for line in found if "settings" in line
        }

    def get(self, settings: Any) -> dict[str, Any] | None:
        """Return the figures of the run with these settings, any value of JSON; None if it is not finished."""
        return self.figures.get(json.dumps(settings, sort_keys=True))

    def add(self, settings: Any, figures: Mapping[str, Any]) -> None:
        key = json.dumps(settings, sort_keys=True)
        self.figures[key] = dict(figures)
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"settings": key, "figures": figures}) + "\n")

    def play(
        self, jobs: Iterable[Job], work: Callable[[Job], Mapping[str, Any]], settings_of: Callable[[Job], Any]
    ) -> None:
        """Play the jobs that are not finished, two at a time, and keep the figures of each as it ends.

        ``played`` is the day. A job that fails is reported, and does not end the others.
        """
        left = [job for job in jobs if self.get(settings_of(job)) is None]
        print(f"{len(left)} runs to play", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(work, job): job for job in left}
            for number, future in enumerate(as_completed(futures), 1):
                job = futures[future]
                try:
                    figures = {**future.result(), "played": datetime.date.today().isoformat()}
                except Exception as error:
                    print(f"{job}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    continue
                self.add(settings_of(job), figures)
                said = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
                print(f"{number}/{len(left)} {job}: {said}", file=sys.stderr, flush=True)
