"""Figures of the code's structure: import cycles, folders, names with two meanings, reaches, lines.

python -m tests.structure.figures
"""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import grimp

from tests.gossip.test_view import DRIVERS, reaches, tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "gossip", "node", "sim"
HARNESS = ROOT / "tests" / "harness"


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def production() -> list[Path]:
    return [path for package in PACKAGES for path in sources(ROOT / package)]


def documents() -> list[Path]:
    """Return the Markdown files of the project, without those of environments and builds."""
    folders = [ROOT / name for name in ("docs", "deploy", "examples", *PACKAGES, "tests", "benchmarks")]
    return [*ROOT.glob("*.md"), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


class Facts(NamedTuple):
    """The facts that the figures need of one module. The syntax trees of all modules would fill 100 MB."""

    imported: frozenset[str]  # Names imported at the module's own level.
    classes: tuple[str, ...]
    arguments: dict[str, int]  # The number of arguments of each class's constructor, without ``self``.
    longest: int  # Lines of the longest function.


@functools.cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    arguments = {}
    for node in classes:
        for made in node.body:
            if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                given = made.args
                arguments[node.name] = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    longest = max((node.end_lineno - node.lineno + 1 for node in functions), default=0)
    return Facts(frozenset(names_in(tree.body)), tuple(node.name for node in classes), arguments, longest)


def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports at its own level, including imports for type checkers.

    A type that two modules need from each other belongs into a protocol in the lower one. Imports inside functions do
    not count, since they run after the module is loaded.
    """
    graph = import_graph()
    return {
        module: graph.find_modules_directly_imported_by(module) & imported_at_its_level(module)
        for module in graph.modules
    }


@functools.cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False)


def circles(wanted: dict[str, set[str]]) -> Iterator[str]:
    """Yield the import cycles one by one; each is broken at its first edge before the search continues."""
    while True:
        try:
            tuple(TopologicalSorter(wanted).static_order())
        except CycleError as error:
            circle = error.args[1]
            yield " -> ".join(circle)
            wanted[circle[1]].discard(circle[0])
        else:
            return


def imported_at_its_level(module: str) -> frozenset[str]:
    """Return all names that the module imports at its own level, also under conditions, and the names imported from
    them, which may be modules."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return facts(path).imported


def names_in(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If):
            names |= names_in(node.body) | names_in(node.orelse)
    return names


def fullest() -> tuple[str, int]:
    """Return the folder with the most modules, and their number without ``__init__``."""
    counts = Counter(path.parent for path in production() if path.name != "__init__.py")
    folder, count = counts.most_common(1)[0]
    return str(folder.relative_to(ROOT)), count


def constructors(most: int) -> dict[str, int]:
    """Return the classes whose constructors take more than ``most`` arguments, with their numbers."""
    return {name: count for path in production() for name, count in facts(path).arguments.items() if count > most}


def double() -> list[str]:
    """Return the class names that occur more than once."""
    names = Counter(name for path in production() for name in facts(path).classes)
    return sorted(name for name, times in names.items() if times > 1)


def main() -> None:
    found, twice, (folder, most) = list(circles(imports())), double(), fullest()
    longest = max(production(), key=lambda path: lines([path]))
    per = ", ".join(f"{package} {lines(sources(ROOT / package)):,}" for package in PACKAGES)
    reached = sum(len(reaches(tree_of(path))) for path in DRIVERS)
    print(f"import circles                {len(found)}" + "".join(f"\n    {circle}" for circle in found))
    print(f"class names with two meanings {len(twice)} {' '.join(twice)}")
    print(f"modules in the fullest folder {most} ({folder})")
    print(f"reaches through Peer          {reached}")
    print(f"production lines              {lines(production()):,} ({per})")
    print(f"longest module                {lines([longest])} ({longest.relative_to(ROOT)})")
    print(f"test harness lines            {lines(sources(HARNESS)):,} in {len(sources(HARNESS))} files")


if __name__ == "__main__":
    main()
