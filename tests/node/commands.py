"""The `gossip` command as a test calls it: in a process of its own, or refused in this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gossip import __main__ as command
from gossip.ids import PeerId
from node.identity.keys import new_secret
from tests.harness import warm
from tests.node.pretended import script_of

SEED_ID = PeerId(bytes(range(16)))
NODE = "import torch, node; node.Node({'w': torch.zeros(4)})"


def secret_of(folder: Path, name: str = "secret") -> Path:
    """Write a swarm's secret into a file that only its owner can read."""
    path = script_of(folder, new_secret(), name)
    path.chmod(0o600)
    return path


def gossip(*args: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    return warm.run("-m", "gossip", *args, cwd=cwd, env={**inherited, **variables})


def refused(monkeypatch, capsys, *args: str | Path) -> tuple[int, str]:
    """Return the exit code and stderr of a command that is refused before it acts."""
    monkeypatch.setattr(sys, "argv", ["gossip", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err
