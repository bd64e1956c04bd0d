"""Tests of `make accelerator`: aims, parts that hang, and all of it on a simulated device."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import accelerator, accelerator_aims, accelerator_device, accelerator_run
from benchmarks.accelerator_device import Shape
from benchmarks.accelerator_device import accelerator as device_of
from benchmarks.accelerator_run import Part
from tests.harness.warm import is_running
from tests.node.conftest import until

ROOT = Path(__file__).resolve().parents[2]
AIMS = 11
MIB = 1 << 20


def boundary(operation, rate, parameters=1000, dtype="float32"):
    return {
        "figure": "boundary", "operation": operation, "parameters": parameters, "dtype": dtype, "call_s": 1e-3,
        "stall_s": 2e-3, "rate_gb_s": rate, "bytes_a_parameter": 0.25,
    }  # fmt: skip


def row(lost=0.005, memory=100 * MIB, waits=0, every=64, parameters=1000, settings=()):
    return {
        "figure": "nodes", "parameters": parameters, "every": every, "settings": dict(settings), "lost": lost,
        "memory_bytes": memory, "waits": waits,
    }  # fmt: skip


def swarm(name, score, together=99.0):
    nodes = [{"alone_steps_s": 100.0, "together_steps_s": pace} for pace in (together, 99.0)]
    return {"figure": "equal", "swarm": name, "score": score, "nodes": nodes}


def all_figures():
    """Figures that meet every aim."""
    return [
        {"figure": "machine", "device": "a GPU", "date": "2026-11-25"},
        {"figure": "limits", "down_gb_s": 50.0, "up_gb_s": 40.0},
        boundary("snapshot", 40.0), boundary("addition", 32.0), boundary("addition", 3.0, parameters=10),
        boundary("snapshot", 41.0, dtype="bfloat16"),
        row(), row(lost=0.2, every=8), row(settings={"correction": 0.0}),
        row(lost=0.9, memory=999 * MIB, parameters=10),
        swarm("digits, CPU", 97.0), swarm("digits, GPU", 96.5), swarm("digits, one GPU and two CPUs", 96.6),
        swarm("GPT, CPU", 2.0), swarm("GPT, GPU", 2.01),
    ]  # fmt: skip


def met(figures):
    return [aim.met for aim in accelerator_aims.aims(figures)]


def test_the_figures_of_the_largest_model_decide():
    assert met(all_figures()) == [True] * AIMS


@pytest.mark.parametrize(
    ("number", "worse"),
    [
        (0, boundary("snapshot", 39.0)), (1, boundary("addition", 31.0)),
        (2, boundary("snapshot", 39.0, dtype="bfloat16")), (3, row(waits=1, every=8)), (4, row(lost=0.011)),
        (5, row(memory=257 * MIB, every=8)), (6, row(memory=257 * MIB, settings={"correction": 0.0})),
        (7, swarm("digits, GPU", 96.4)), (8, swarm("GPT, GPU", 2.03)),
        (9, swarm("digits, one GPU and two CPUs", 96.4)),
        (10, swarm("digits, one GPU and two CPUs", 97.0, together=89.0)),
    ],
)  # fmt: skip
def test_each_aim_can_be_missed(number, worse):
    same = {"figure", "operation", "parameters", "dtype", "every", "settings", "swarm"} & worse.keys()
    figures = [worse if all(one.get(name) == worse[name] for name in same) else one for one in all_figures()]
    assert worse in figures
    found = met(figures)
    assert found[number] is False
    assert found.count(True) == AIMS - 1


def test_an_aim_without_its_figures_is_neither_met_nor_missed():
    assert met([]) == [None] * AIMS
    assert "not measured" in accelerator_aims.shown(accelerator_aims.aims([]))


def test_the_exit_code_tells_a_failed_part_and_a_missed_aim():
    missed = accelerator_aims.aims([row(lost=0.5)])
    done, failed = {"nodes": {"ok": True}}, {"nodes": {"ok": False}}
    assert accelerator_run.code(done, accelerator_aims.aims(all_figures()), simulated=False) == 0
    assert accelerator_run.code(done, missed, simulated=False) == 2
    assert accelerator_run.code(done, missed, simulated=True) == 0, "aims mean nothing there"
    assert accelerator_run.code(failed, missed, simulated=False) == 1


@pytest.mark.parametrize("real", [True, False])
def test_figures_of_a_real_device_alone_are_written_to_the_results(real, tmp_path, monkeypatch, capsys):
    outcome = {"all": {"ok": True, "seconds": 1.0, "reason": "", "figures": all_figures()}}
    monkeypatch.setattr(accelerator_run, "run_all", lambda parts, simulated: outcome)
    monkeypatch.setattr(accelerator_run, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: real)
    monkeypatch.setattr(sys, "argv", ["accelerator_run"])
    assert accelerator_run.main() == 0
    printed = capsys.readouterr().out
    assert ("There is no GPU here" in printed) == (accelerator_run.SIMULATED in printed) == (not real)
    aims = [one.row() for one in accelerator_aims.aims(all_figures())]
    expected = {"accelerator.json": {"simulated": False, "parts": outcome, "aims": aims}} if real else {}
    assert {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()} == expected


def test_waits_for_a_real_device_are_counted_where_node_or_gossip_wait(monkeypatch):
    modes, plain = [], warnings.showwarning
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(accelerator_device, "OURS", (__file__,))
    with accelerator_device.waits(None) as found:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        torch.cuda.synchronize()
        assert modes == ["warn"]
    assert modes == ["warn", "default"]
    assert warnings.showwarning is plain
    assert len(found) == 2
    assert all(line.startswith(f"{__file__}:") for line in found)
    monkeypatch.setattr(accelerator_device, "OURS", ("/elsewhere/",))
    with accelerator_device.waits(None) as found:
        torch.cuda.synchronize()
    assert found == []


def test_a_part_that_hangs_is_ended_with_its_children_and_keeps_its_figures(tmp_path):
    program = f"""
import pathlib, subprocess, sys, time
print('{{"figure": "limits", "up_gb_s": 1.0}}', flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
print("waiting", flush=True)
time.sleep(600)
"""
    found = accelerator_run.run(Part("hangs", 600, ["-c", program]), 5.0)
    assert not found["ok"]
    assert found["reason"] == "not done after 5 s\n    waiting"
    assert found["figures"] == [{"figure": "limits", "up_gb_s": 1.0}]
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child))


def test_a_part_that_fails_is_reported_and_the_next_one_runs(capsys):
    parts = [Part("fails", 60, ["-c", "raise SystemExit('the reason')"]), Part("runs", 60, ["-c", "pass"])]
    found = accelerator_run.run_all(parts, simulated=False)
    assert [found[name]["ok"] for name in ("fails", "runs")] == [False, True]
    assert found["fails"]["reason"] == "exit code 1\n    the reason"
    assert "FAILED, exit code 1" in capsys.readouterr().out


@pytest.mark.parametrize("simulated", [False, True])
def test_all_parts_fit_into_eight_minutes(simulated):
    parts = accelerator_run.parts(simulated)
    assert sum(part.limit_s for part in parts) <= accelerator_run.TOTAL_S < 480 - accelerator_run.END_S


def test_the_parts_that_measure_copies_run_on_a_simulated_device(capsys):
    with device_of(True):
        accelerator.copies({"tiny": Shape(1, 2, 8, 4, 1)}, 64, 1)
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["figure"] for one in figures] == ["limits", *["boundary"] * 4]
    expected = boundary("snapshot", 1.0).keys() | {"model"}
    cases = (("snapshot", "float32", 4.0), ("addition", "float32", 4.0), ("snapshot", "bfloat16", 2.0))
    for one, (operation, dtype, size) in zip(figures[1:4], cases, strict=True):
        assert one.keys() == expected
        assert (one["operation"], one["dtype"]) == (operation, dtype)
        assert one["bytes_a_parameter"] == pytest.approx(size, abs=0.1), "a small model is copied on the device first"
    assert met(figures)[0] is not None


@pytest.mark.slow
def test_everything_runs_to_its_end_on_a_simulated_device(tmp_path):
    results = sorted((ROOT / "docs" / "results").iterdir())
    command = [sys.executable, "-m", "benchmarks.accelerator_run", "--simulated", "--json", tmp_path / "found.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert accelerator_run.SIMULATED in done.stdout
    assert sorted((ROOT / "docs" / "results").iterdir()) == results
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["simulated"]
    assert all(part["ok"] for part in found["parts"].values())
    assert [aim["met"] is None for aim in found["aims"]] == [False] * AIMS
    figures = [figure for part in found["parts"].values() for figure in part["figures"]]
    ranks, swarms, nodes = ([one for one in figures if one["figure"] == kind] for kind in ("ranks", "equal", "nodes"))
    judged = [(one["ranks"], one["sharded"], one["right"]) for one in ranks]
    assert judged == [(1, False, True), (2, False, True), (1, True, True)]
    assert sorted(len(swarm["nodes"]) for swarm in swarms) == [2, 2, 3, 3, 3]
    assert all(node["steps"] > 0 for swarm in swarms for node in swarm["nodes"])
    assert len(nodes) == 4
    assert all(one["mixes"] > 0 and one["waits"] == 0 for one in nodes)
