"""A Python process with another hash seed, so that its sets of bytes and strings have another order."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEEDS = "1", "2"


def otherwise_hashed(program: str) -> str:
    """Return what a Python process with another ``PYTHONHASHSEED`` prints.

    A test compares this with what its own process computes. Where they differ, run it with ``PYTHONHASHSEED=0`` and
    other numbers until it fails again: a process without the variable draws its seed, which cannot be read back.
    """
    other = next(seed for seed in SEEDS if seed != os.environ.get("PYTHONHASHSEED"))
    # All else is the same: a variable of a BLAS library chooses its kernels, and so the last bits.
    variables = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
