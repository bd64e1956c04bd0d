"""The examples: each is one self-contained file, and does what it says on real data."""

import ast
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gossip
from node.cli.local import free_port
from tests.harness import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
OF_FRAMEWORKS = sorted(EXAMPLES.glob("frameworks/*.py"))  # make test-frameworks runs these.
OF_ENGINES = sorted(EXAMPLES.glob("engines/*.py"))  # make test-engines runs these.
FASHION = Path(os.environ.get("GOSSIP_FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))

needs_fashion = pytest.mark.skipif(
    not (FASHION / "train-images-idx3-ubyte.gz").exists(), reason="Fashion-MNIST is not here: make data says how"
)


def play(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`gossip run` as a user types it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    return warm.run("-m", "gossip", "run", "--quiet", *words, env={**inherited, **variables}, timeout=120)


def play_one(script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an example with one thread."""
    return play("--threads", "1", EXAMPLES / script, *args, **variables)


def result_of(script: str, *args: str, **variables: str) -> dict[str, float]:
    done = play_one(script, *args, **variables)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout)
    return result


def results_of_two(script: str, *args: str) -> list[dict[str, float]]:
    """Run an example as two nodes, each with one thread, and return what each prints."""
    address = f"127.0.0.1:{free_port()}"
    words = ("--threads", "1", EXAMPLES / script, *args)
    wait = {"GOSSIP_WAIT_FOR": "2", "GOSSIP_WAIT_S": "60"}
    with ThreadPoolExecutor() as pool:
        nodes = list(pool.map(lambda place: play(place, address, *words, **wait), ("--listen", "--seed")))
    assert [node.returncode for node in nodes] == [0, 0], [node.stderr for node in nodes]
    return [json.loads(node.stdout) for node in nodes]


@pytest.mark.parametrize("path", [*SCRIPTS, *OF_FRAMEWORKS, *OF_ENGINES], ids=lambda path: path.stem)
def test_an_example_imports_public_names_of_gossip_and_adapters_alone(path):
    ours = {folder.name for folder in EXAMPLES.parent.iterdir() if (folder / "__init__.py").exists()}
    assert {"gossip", "node", "sim"} <= ours
    imported = set()
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.Import):
            imported |= {name.name for name in found.names}
        elif isinstance(found, ast.ImportFrom):
            imported |= {f"{found.module}.{name.name}" for name in found.names}
    used = {name for name in imported if name.split(".")[0] in ours}
    assert used
    assert {name for name in used if not name.startswith("node.adapters.")} <= {
        f"gossip.{name}" for name in gossip.__all__
    }


def test_whatever_launches_is_on_its_page():
    root = EXAMPLES.parent
    page = (root / "docs" / "launching.md").read_text()
    files = [
        path
        for path in (root / "deploy").rglob("*")
        if path.is_file()
        and not {"grafana", "prometheus", "templates"}.intersection(path.parts)
        and path.name not in ("Chart.yaml", "values.schema.json")
    ]
    for path in [*OF_ENGINES, *files]:
        assert f"](../{path.relative_to(root)})" in page
    for name in re.findall(r"`(test_\w+\.py)`", page):
        assert (root / "tests" / "engines" / name).exists()


@pytest.mark.parametrize("path", [*SCRIPTS, *OF_FRAMEWORKS], ids=lambda path: path.stem)
def test_an_example_marks_the_lines_that_a_swarm_adds_which_are_five_at_most(path):
    marks = [int(number) for number in re.findall("# gossip ([0-9])", path.read_text())]
    assert marks == list(range(1, len(marks) + 1))
    to_resume = path.stem == "accelerate_digits"  # what its checkpoints hold is told before the node starts
    assert len(marks) == 5 if path in SCRIPTS else len(marks) <= 5 + to_resume


def test_the_digits_are_learned():
    assert result_of("digits.py", "--samples", "20000", "--settle", "0")["accuracy"] > 0.9


def test_a_stream_of_text_files_is_learned(tmp_path):
    for number in range(16):
        (tmp_path / f"{number}.txt").write_text("To be, or not to be, that is the question. " * 40)
    files = [str(path) for path in sorted(tmp_path.glob("*.txt"))]
    assert result_of("text_files.py", "--samples", "20000", *files)["bits_per_byte"] < 1.0


@needs_fashion
@pytest.mark.slow
def test_clothes_are_learned_from_shared_data():
    assert result_of("fashion_mnist.py", "--samples", "6000", "--settle", "0")["accuracy"] > 0.6


@needs_fashion
@pytest.mark.slow
def test_who_trains_on_private_data_alone_knows_the_few_classes_that_it_has_seen():
    alone = result_of("fashion_mnist.py", "--samples", "2000", "--settle", "0", "--alpha", "0.1", "--part", "3")
    assert 0.1 < alone["accuracy"] < 0.6


SMALL = ("--layers", "1", "--width", "32", "--context", "64", "--test-windows", "32", "--settle", "0")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_two_nodes_learn_the_next_byte(optimizer):
    results = results_of_two("gpt.py", "--optimizer", optimizer, "--samples", "1600", *SMALL)
    assert len({result["node"] for result in results}) == 2
    assert all(result["steps"] > 10 and result["loss"] < 3.5 for result in results)  # knowing nothing is ln 256 = 5.5


def test_a_node_with_private_text_does_not_learn_what_others_read(tmp_path):
    for number, word in enumerate(("abcd", "efgh", "ijkl")):
        (tmp_path / f"{number}.txt").write_text(word * 2_000)
    text = ("--text", str(tmp_path / "*.txt"), "--samples", "1200", *SMALL)
    shared = result_of("gpt.py", *text)
    private = result_of("gpt.py", *text, "--private", "--part", "1", "--parts", "3")
    assert shared["loss"] < 1.0
    assert private["loss"] > 2.0


@pytest.mark.parametrize(
    ("script", "args", "code", "said"),
    [
        ("fashion_mnist.py", (), 1, "Fashion-MNIST is not here: on Debian, apt-get install"),
        ("fashion_mnist.py", ("--alpha", "nan"), 2, "--alpha must be above 0"),
        ("gpt.py", ("--private", "--parts", "2", "--part", "2"), 2, "--part must be 0 to 1"),
        ("gpt.py", ("--text", "short.txt"), 2, "0 of 1 files have more than 2,560 bytes"),
    ],
)
def test_an_example_that_cannot_run_says_why_in_a_sentence(script, args, code, said, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("to be")
    monkeypatch.chdir(tmp_path)
    done = play_one(script, *args, GOSSIP_FASHION_MNIST=str(tmp_path))
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
