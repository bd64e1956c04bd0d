"""The `gossip` command in a process of its own, and files for it."""

import os
import subprocess
from pathlib import Path

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
