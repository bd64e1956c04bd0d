"""systemd's unit: its command line starts a node."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from node.identity.keys import new_secret
from tests.engines.launched import ROOT, until
from tests.harness import warm
from tests.harness.ports import free_port
from tests.node.pretended import script_of

UNIT = (ROOT / "deploy" / "systemd" / "gossip@.service").read_text(encoding="utf-8")
PATIENCE_S = 120.0
SCRIPT = """
import time
import torch
from gossip import Node

with Node(torch.nn.Linear(4, 2)) as node:
    while True:
        node.step()
        time.sleep(0.05)
"""


def settings(name):
    """Return all values of a key of the unit."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@pytest.fixture
def service(tmp_path):
    """Start the unit's process as systemd would, with its folders under tmp_path."""
    script = script_of(tmp_path, SCRIPT)
    credential = tmp_path / "credentials" / "swarm.secret"
    credential.parent.mkdir()
    credential.write_text(new_secret())
    credential.chmod(0o400)
    port = free_port("0.0.0.0")
    here = {
        "%i": "digits", "%S": str(tmp_path / "state"), "%d": str(credential.parent), ":7700": f":{port}",
        "/opt/gossip/.venv/bin": str(tmp_path / "bin"),
    }  # fmt: skip

    def placed(text):
        for old, new in here.items():
            text = text.replace(old, new)
        return text

    variables = dict(pair.split("=", 1) for line in settings("Environment") for pair in placed(line).split())
    variables["SCRIPT"] = f"{script} --folder ."  # The unit reads this variable from its EnvironmentFile.
    (command,) = settings("ExecStart")
    words = placed(command).replace("$SCRIPT", variables["SCRIPT"]).split()
    (folder,) = map(placed, settings("WorkingDirectory"))
    assert folder == f"{here['%S']}/{placed(settings('StateDirectory')[0])}", "systemd makes it for the service's user"
    Path(folder).mkdir(parents=True)
    said = (tmp_path / "said").open("w+")
    variables |= {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    assert words[0] == str(tmp_path / "bin" / "gossip"), "which is python -m gossip"
    process = warm.Python("-m", "gossip", *words[1:], cwd=folder, env=variables, stdout=said, stderr=said)
    process.log, process.said, process.port = Path(folder) / "log.jsonl", said.name, port
    yield process
    process.kill()
    process.wait()
    said.close()


def test_the_units_command_line_starts_a_node_and_a_stop_is_a_success(service):
    def trains():
        assert service.poll() is None, Path(service.said).read_text()
        return service.log.exists() and '"progress"' in service.log.read_text()

    until(trains)
    first = json.loads(service.log.read_text().splitlines()[0])
    assert first["event"] == "listening"
    assert first["address"].endswith(f":{service.port}")
    assert not first["address"].startswith("127.")
    (number,) = settings("KillSignal")
    service.send_signal(signal.Signals[number])
    assert str(service.wait(PATIENCE_S)) in settings("SuccessExitStatus")
