"""docs/porting.md: the programs in examples/porting run, and the page names only calls that exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gossip.config import Config
from node import Node
from tests.harness.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
PROGRAMS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "porting").glob("*.py")}
PIECES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
AFTER = ["after_ddp", "after_horovod", "after_hivemind", "after_torchft", "after_ray"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Yield a folder with the programs, set up as for a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    sys.modules.pop("task", None)


def run(name: str) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(PROGRAMS[name], f"examples/porting/{name}.py", "exec"), namespace)
    return namespace


def test_each_system_has_a_program_before_and_after():
    before = {"ddp": "torch", "horovod_elastic": "horovod", "hivemind_run": "hivemind", "torchft_ddp": "torchft"}
    before["ray_train"] = "ray"
    assert set(PROGRAMS) == {"task", *AFTER, *before}
    for name, package in before.items():
        imported = {
            part.split(".")[0] for part in re.findall(r"^(?:import|from) ([\w.]+)", PROGRAMS[name], re.MULTILINE)
        }
        assert package in imported
        ast.parse(PROGRAMS[name])
    for name in PROGRAMS.keys() - {"task"}:
        assert f"](../examples/porting/{name}.py)" in PAGE, name


@pytest.mark.parametrize("name", AFTER)
def test_what_is_ported_trains_and_where_it_resumes_trains_nothing_again(name, folder, capsys):
    found = run(name)
    assert found["accuracy"] > 0.93
    assert "0.9" in capsys.readouterr().out
    if name in ("after_horovod", "after_torchft"):
        again = run(name)
        assert again["node"].finished
        assert again["node"].metrics().steps == 0
        assert again["accuracy"] == found["accuracy"]


def test_what_ddp_is_ported_from_runs(folder, monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    assert run("ddp")["accuracy"] > 0.93
    assert re.fullmatch(r"accuracy 0\.9\d+\n", capsys.readouterr().out)
    assert (folder / "digits.pt").exists()


def test_what_is_written_instead_runs(folder):
    task: dict[str, object] = {}
    exec(PROGRAMS["task"], task)
    exec("import torch\nfrom torch.nn import functional as F", task)
    model = task["net"]()
    task |= {"model": model, "optimizer": task["torch"].optim.SGD(model.parameters(), lr=0.1)}
    with Node(model, task["optimizer"]) as node:
        task["node"] = node
        for piece in reversed(PIECES):  # The second trains, and the first measures.
            exec(compile(piece, "docs/porting.md", "exec"), task)
        steps = len(task["y_train"]) // 16 // 4
        assert node.metrics().steps == steps
        assert 63 * steps <= node.swarm_samples <= 64 * steps, "a rest is spread over the last batches"
    assert len(PIECES) == 2
    assert task["accuracy"] == task["right"](model) / len(task["y_test"])


def test_what_the_page_names_is_there():
    for name in set(re.findall(r"\bnode\.(\w+)\b(?!\.py)", PAGE)) - {"md"}:
        assert hasattr(Node, name), name
    for call in re.findall(r"`(Config[.(][^`]*\))`", PAGE):
        assert isinstance(eval(call, {"Config": Config}), Config)
    for link in re.findall(r"\]\(([\w/.-]+\.md)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.slow
def test_two_processes_of_ddp_and_of_what_it_is_ported_to_end_alike(folder):
    python = [sys.executable, "-m"]
    ddp = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ddp.py"]
    ported = [*python, "gossip", "local", "-n", "2", "after_ddp.py"]
    found = []
    for command in (ddp, ported):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        # torch itself aborts now and then as it ends, with "terminate called without an active exception".
        assert done.returncode == 0 or (command is ddp and "accuracy" in done.stdout), done.stderr
        found.append([float(number) for number in re.findall(r"accuracy (0\.\d+)", done.stdout)])
    (before,), after = found
    assert len(after) == 2
    assert all(abs(before - each) < 0.04 for each in after)
    assert len(list(folder.glob("digits-*.safetensors"))) == 2
