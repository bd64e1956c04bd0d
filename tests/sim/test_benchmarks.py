"""Simulated benchmarks that no other test runs, at a small size: each ends with a table of numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {
    "bias.py": ["--peers", "8", "--liars", "1", "--hours", "0.05"],
    "attackers.py": ["--seconds", "4", "--seeds", "1", "--filter", "clip", "--attack", "half", "--share", "0.1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("program", SMALL)
def test_a_benchmark_writes_its_table(program):
    command = [sys.executable, str(BENCHMARKS / program), *SMALL[program]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| .*\d+\.\d.* \|$", done.stdout, re.MULTILINE), done.stdout
