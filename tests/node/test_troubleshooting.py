"""docs/troubleshooting.md quotes the sentences that a user sees."""

import ast
import re
from pathlib import Path

from node.observe.notices import LEVELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SAID = PAGE.partition("## Nothing is said")[0]
FIRST_CELLS = re.findall(r"^\| (?!it says|---)(.*?) \|", SAID, re.MULTILINE)
SENTENCES = [quoted for cell in FIRST_CELLS for quoted in re.findall(r"`([^`]+)`", cell)]


def rendered(node: ast.AST) -> str:
    """Return a text of the source, with … for each value in it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(rendered, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return rendered(left) + rendered(right)
    return "…"


def texts() -> str:
    """Return all texts of the packages, one a line."""
    found = []
    for path in (path for package in ("gossip", "node", "sim") for path in ROOT.glob(f"{package}/**/*.py")):
        found += [rendered(one) for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return "\n".join(re.sub("…+", "…", text) for text in found if len(text) > 3)


def test_each_sentence_of_the_page_is_one_of_the_program():
    assert len(SENTENCES) >= 50
    ours = texts()
    assert [sentence for sentence in SENTENCES if sentence.strip("… ") not in ours] == []


def test_every_warning_is_on_the_page_by_its_kind():
    kinds = {kind for kind, level in LEVELS.items() if level >= 30}
    missing = {kind for kind in kinds if not re.search(rf"\b{kind}: ", " ".join(FIRST_CELLS))}
    assert not missing


def test_every_refusal_of_the_handshake_is_on_the_page():
    source = ast.parse((ROOT / "node" / "links" / "handshake.py").read_text(encoding="utf-8"))
    for call in ast.walk(source):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "RefusedError" and len(call.args) > 1:
            sentence = rendered(call.args[1])
            # Skip a node that dials itself, and errors that quote the other side.
            known = any(quoted.strip("… ") in sentence for quoted in SENTENCES if len(quoted.strip("… ")) > 15)
            assert known or not sentence.strip("… ") or "this node itself" in sentence or "refused:" in sentence, (
                sentence
            )
