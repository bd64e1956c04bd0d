"""`gossip up` over real ssh: three hosts, each with an sshd of its own."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.launched import ROOT, environment, until
from tests.reliability.home_nodes import SCRIPT
from tests.reliability.namespaces import homes

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def ssh_to(made, folder):
    """Run an sshd on each machine; yield the command that reaches them."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "AuthorizedKeysFile": folder / "user.pub",
        "PermitRootLogin": "yes",
        "StrictModes": "no",
        "PidFile": "none",
    }
    flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
    command = [SSHD, "-D", "-e", "-f", "/dev/null", "-h", folder / "host", *flags]
    with (folder / "sshd").open("a") as log, contextlib.ExitStack() as ends:
        for space in made.machines.values():
            server = subprocess.Popen(["ip", "netns", "exec", space, *command], stderr=log)
            ends.callback(server.wait)
            ends.callback(server.terminate)
        known = f"-o UserKnownHostsFile={folder / 'known'} -o StrictHostKeyChecking=accept-new"
        yield f"ssh -F /dev/null -o BatchMode=yes -i {folder / 'user'} {known}"


@pytest.mark.netns
@pytest.mark.skipif(SSHD is None, reason="needs sshd: on Debian, apt-get install openssh-server")
def test_three_hosts_mix_and_end_with_the_command(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace('os.environ["GOSSIP_LOG"]', "f'log{os.getpid()}'"))
    with homes(3, []) as made, ssh_to(made, tmp_path) as ssh:
        python = f"'env PYTHONPATH={ROOT} {sys.executable}'"
        (tmp_path / "hosts.txt").write_text("".join(f"root@{host} python={python}\n" for host in made.machines))
        first = next(iter(made.machines.values()))
        words = [sys.executable, "-m", "gossip", "up", "--ssh", ssh, "--log-dir", "logs", "hosts.txt", "train.py"]
        command = ["ip", "netns", "exec", first, *map(str, words)]
        with subprocess.Popen(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT))) as up:
            until(lambda: len(list(tmp_path.glob("log*.mixes"))) == 3)
            until(lambda: all(len(log.read_text().splitlines()) >= 20 for log in tmp_path.glob("log*.mixes")))
            up.terminate()
        logs = [log.read_text() for log in (tmp_path / "logs").glob("root@*.log")]
        assert len(logs) == 3
        assert all("exchanges" in log for log in logs), "each node ends in order, with its closing table"
