"""Build the C passes from this source tree, whether or not an installation built them."""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from gossip import kernel

Found = TypeVar("Found")
ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "build" / "passes"
TIMEOUT_S = 300.0


def build(folder: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the extension as an installation does."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder]
    plain = {name: value for name, value in os.environ.items() if name != "GOSSIP_KERNEL"}
    return subprocess.run(
        command, cwd=ROOT, env=plain | environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


@functools.cache
def passes() -> ModuleType:
    """Return the compiled passes, or skip the test if there is no compiler; fail if the build should work."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    if compiler is None or not headers.exists():
        pytest.skip("there is no C compiler here, or Python's headers are missing")
    spec = importlib.util.spec_from_file_location("built_here._passes", built(Path(compiler)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both_ways(compute: Callable[[], Found]) -> list[Found]:
    """Return what ``compute`` returns with numpy, and what it returns with the compiled passes."""
    found = []
    for wanted in (None, passes()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "passes", wanted)
            found.append(compute())
    return found


def built(compiler: Path) -> Path:
    """Return the library that this compiler makes of this source. All processes and runs share one build of 3 s."""
    about = compiler.stat()
    parts = [(ROOT / "setup.py").read_bytes(), (ROOT / "gossip" / "kernel" / "passes.c").read_bytes()]
    parts += [repr([sys.version, compiler, about.st_size, about.st_mtime_ns, os.environ.get("CFLAGS")]).encode()]
    wanted = KEPT / f"{hashlib.sha256(b''.join(parts)).hexdigest()}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The other workers' tests wait for the one that compiles.
        if not wanted.exists():
            for old in KEPT.glob("*.so"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=KEPT) as folder:
                done = build(folder)
                found = list(Path(folder).rglob("_passes*.so"))
                assert len(found) == 1, done.stdout + done.stderr
                found[0].rename(wanted)
    return wanted
