"""docs/recipes.md: every block runs, each after the lines that all of them begin with."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = PAGE.split("\n## ")
(BEGIN,) = re.findall(r"```python\n(.*?)```", SECTIONS[0], re.DOTALL)
RECIPES = [
    (section.partition("\n")[0], *re.findall(r"```python\n(.*?)```", section, re.DOTALL)) for section in SECTIONS[1:]
]
HEAVY = {
    "torch.compile": (pytest.mark.slow, pytest.mark.filterwarnings("default")),  # a C++ compiler's time; torch's own
    "Checkpoints of torch and transformers": (pytest.mark.filterwarnings("default"),),  # torch's own
    "Ignite": (pytest.mark.frameworks, pytest.mark.filterwarnings("default")),
}


@pytest.mark.parametrize(
    ("title", "block"), [pytest.param(*recipe, id=recipe[0], marks=HEAVY.get(recipe[0], ())) for recipe in RECIPES]
)
def test_a_recipe_runs(title, block, monkeypatch, tmp_path):
    if title == "Ignite":
        pytest.importorskip("ignite", reason="make test-frameworks")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for code in (BEGIN, block):
        exec(compile(code, f"docs/recipes.md, {title}", "exec"), namespace)
    node = namespace["node"]
    assert node.metrics().steps > 0
