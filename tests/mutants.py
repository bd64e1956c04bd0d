"""Measure which share of drawn mutations the tests notice: python -m tests.mutants [--number 30] [--seed 1].

cosmic-ray has the operators (a comparison turned, a number changed, a condition negated and others). It is used as a
library, because its own sessions run all mutations of a module with one command of tests. Modules are drawn by their
lines, and of each first a kind of operator and then a mutation is drawn. A mutation that changes annotations alone is
drawn again. Operators that put a shift or a power for a sum raise an error wherever they run, and are left out. All
tests run in a copy of the committed tree: first those of the module's own folder, then those of its package and the
agreement of both drivers. A mutation is killed if one of them fails or does not end.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.structure.figures import PACKAGES, ROOT

FAST = "not slow and not netns and not frameworks and not engines and not built"
LEFT_OUT = "node/adapters/"  # The tests of frameworks need an environment of their own.
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv"}
LIMIT_S = 900.0  # A run of all tests takes six minutes on two cores.


class Unannotated(ast.NodeTransformer):
    """Remove what has no effect at run time: annotations, imports for type checkers, and slots of dataclasses."""

    def visit_If(self, node: ast.If) -> ast.AST:
        is_for_types = any(isinstance(part, ast.Name) and part.id == "TYPE_CHECKING" for part in ast.walk(node.test))
        return ast.Pass() if is_for_types else self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return ast.keyword("slots", ast.Constant(None)) if node.arg == "slots" else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def effect_of(code: str) -> str:
    return ast.dump(Unannotated().visit(ast.parse(code)))


def is_used(name: str) -> bool:
    """Return True for an operator without arguments whose mutations are plausible mistakes."""
    kind, *operands = name.partition("/")[2].split("_")
    is_odd = kind == "ReplaceBinaryOperator" and not ARITHMETIC.issuperset(operands)
    return not (get_operator(name).arguments() or kind == "NoOp" or is_odd)


def mutations_of(code: str) -> list[tuple[str, int]]:
    """Return all mutations of a module as the operator's name and the position's number."""
    found, tree = [], get_ast(code)
    for name in filter(is_used, operator_names()):
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(tree))
        found += [(name, occurrence) for occurrence in range(count)]
    return found


def draw(package: str, number: int, rng: random.Random) -> list[tuple[Path, str, str]]:
    """Draw mutations of a package, as the module, the operator's name and the mutated code."""
    modules = sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py") if LEFT_OUT not in str(path))
    codes = {module: (ROOT / module).read_text(encoding="utf-8") for module in modules}
    drawn: list[tuple[Path, str, str]] = []
    while len(drawn) < number:
        (module,) = rng.choices(modules, [code.count("\n") for code in codes.values()])
        mutations = mutations_of(codes[module])
        if not mutations:
            continue
        kind = rng.choice(sorted({name.partition("_")[0] for name, _ in mutations}))
        name, occurrence = rng.choice([each for each in mutations if each[0].startswith(kind)])
        mutated = mutate_code(codes[module], get_operator(name)(), occurrence)
        if effect_of(mutated) != effect_of(codes[module]):
            drawn.append((module, name, mutated))
    return drawn


def folders_of(module: Path) -> list[list[str]]:
    """Return the folders of tests in the order of the runs: the module's own, then its package's and the agreement."""
    package = module.parts[0]
    own = Path("tests", *module.parts[:2])
    wide = [f"tests/{package}", "tests/agreement", *(["tests/simulation", "tests/device"] if package != "sim" else [])]
    return [[str(own)], wide] if len(module.parts) > 2 and (ROOT / own).is_dir() else [wide]


def killers(copy: Path, module: Path) -> str:
    """Return the folder of which a test fails with the mutated module, or "" if all pass."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for folders in folders_of(module):
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-m", FAST, "-p", "no:cacheprovider", *folders,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            if process.wait(LIMIT_S) != 0:
                return folders[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return f"{folders[0]} (no end)"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=30, help="mutations of each package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--package", action="append", choices=PACKAGES)
    parser.add_argument("--list", action="store_true", help="show the mutations that would be tried")
    given = parser.parse_args()
    killed: Counter[str] = Counter()
    packages = given.package or PACKAGES
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "tree")
        subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(copy)], check=True)
        for built in (ROOT / "gossip" / "kernel").glob("*.so"):
            shutil.copy(built, copy / "gossip" / "kernel")
        for package in packages:
            for module, name, mutated in draw(package, given.number, random.Random(f"{given.seed} {package}")):
                original = (copy / module).read_text(encoding="utf-8")
                changes = difflib.unified_diff(original.splitlines(), mutated.splitlines(), lineterm="", n=0)
                lines = [line for line in changes if line[:1] in "+-@" and line[:3] not in ("+++", "---")]
                print(f"{module} {name}", *lines, sep="\n    ", flush=True)
                if given.list:
                    continue
                began = time.monotonic()
                (copy / module).write_text(mutated, encoding="utf-8")
                killer = killers(copy, module)
                (copy / module).write_text(original, encoding="utf-8")
                killed[package] += bool(killer)
                print(
                    f"    {'killed by ' + killer if killer else 'SURVIVED'}, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    for package in () if given.list else packages:
        print(f"{package}: {killed[package]} of {given.number} killed (seed {given.seed})")


if __name__ == "__main__":
    main()
