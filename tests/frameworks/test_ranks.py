"""The processes of a framework's DDP are one node: two ranks of torchrun over gloo, and another node."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from gossip.config import Config
from tests.frameworks.plays import PATIENCE_S

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
CHILD = Path(__file__).with_name("ranks_child.py")


class Wrapped(nn.Module):
    """A module whose parameters have the same names as the children's."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Linear(4, 3))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Wrapped("layer")


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_two_ranks_hold_the_same_bits_at_each_step_and_are_one_node(framework, train, tmp_path):
    pytest.importorskip(framework, reason="make test-frameworks")
    model = Nested() if framework == "lightning" else Wrapped("layer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    other = train(model, optimizer, lambda: time.sleep(0.002), config=Config(mix_every_steps=2))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(CHILD)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    environment = {**inherited, "PYTHONPATH": str(CHILD.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, framework, str(tmp_path), other.node.address], env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["same"] == second["same"], "bit for bit"
    assert first["same"]["exchanges"] >= 3
    assert len(first["same"]["held"]) == 60, "an epoch is as long as without a swarm"
    assert len(set(first["same"]["held"])) == 60
    assert first["same"]["agreed"], "both settled together"
    assert (first["steps"], first["counted"]) == (60, 960), "of both ranks"
    assert first["saved_samples"] >= 960
    drawn = first["drawn"], second["drawn"]
    assert len(drawn[0]) == len(drawn[1]) == 480
    assert not {*drawn[0][:40]} & {*drawn[1][:40]}, "each its part of the node's share"
