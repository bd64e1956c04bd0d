"""The script of docs/start.md as a reader runs it: four processes train to a target, and print their results."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.docs.test_pages import DOCS, blocks

NODES = 4
TARGET = 30_000
OVERSHOOT, ERROR = 0.10, 0.02  # Shares of the target, and of the samples that all trained.
PREDICTED = r"predicted (\[.*\]) of (\[.*\])\n"
PRINTED = re.compile(r"node (\d): ([\d.]+)% after ([\d,]+) samples of the whole swarm")


@pytest.mark.slow
def test_four_processes_stop_near_their_target_and_show_what_they_trained(tmp_path):
    pytest.importorskip("sklearn")
    script, prediction = blocks(DOCS / "start.md", "python")
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "gossip", "local", "-n", str(NODES), "--log-dir", "logs", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / "logs" / f"node-{number}.jsonl").read_text() for number in range(NODES)]
    ends = [json.loads(log.splitlines()[-1]) for log in logs]
    assert [end["event"] for end in ends] == ["final"] * NODES
    assert min(end["samples"] for end in ends) > 0, "all took part"
    trained = sum(end["samples"] for end in ends)
    assert abs(trained / TARGET - 1) < OVERSHOOT
    shown = PRINTED.findall(done.stdout)
    assert sorted(number for number, *_ in shown) == list("0123")
    for _, accuracy, samples in shown:
        assert float(accuracy) > 90
        assert abs(int(samples.replace(",", "")) / trained - 1) < ERROR
    assert "The model is in digits-" in done.stderr
    used = subprocess.run([sys.executable, "-c", prediction], cwd=tmp_path, capture_output=True, text=True, check=True)
    predicted, true = (json.loads(row) for row in re.fullmatch(PREDICTED, used.stdout).groups())
    assert true == list(range(8))
    assert sum(map(int.__eq__, predicted, true)) >= 6, "the model is right for nine digits of ten"
    assert f"gossip local -n {NODES} train.py" in (DOCS / "start.md").read_text(encoding="utf-8")
