"""The passes in C, built from what is here, whether or not they were when this was installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300.0


def build(folder: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As an installation does."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder]
    plain = {name: value for name, value in os.environ.items() if name != "GOSSIP_KERNEL"}
    return subprocess.run(
        command, cwd=ROOT, env=plain | environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


@functools.cache
def passes() -> ModuleType:
    """Skips the test where nothing can be compiled; fails it where that should work."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None or not headers.exists():
        pytest.skip("there is no C compiler here, or Python's headers are missing")
    with tempfile.TemporaryDirectory() as folder:
        done = build(folder)
        found = list(Path(folder).rglob("_passes*.so"))
        assert len(found) == 1, done.stdout + done.stderr
        spec = importlib.util.spec_from_file_location("built_here._passes", found[0])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
