"""Each row of benchmarks/micro.py has its baseline in benchmarks/micro.json."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_each_row_has_its_baseline():
    command = [sys.executable, str(BENCHMARKS / "micro.py"), "--rounds", "1", "--json", "--only", ", "]
    command += ["--seconds", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    measured = json.loads(done.stdout)
    baseline = json.loads((BENCHMARKS / "micro.json").read_text())
    assert measured["with"].keys() == baseline["with"].keys()
    assert measured["us"].keys() == {name for name in baseline["us"] if ", " in name} | {"python", "memory"}
    assert all(us > 0 for us in measured["us"].values())
    assert all(us > 0 for us in baseline["us"].values())
