"""Groups of two processes: helpers that start, inspect, await and end them."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.ports import free_port
from tests.node.conftest import until

FOLDER = Path(__file__).parent


class Pair:
    """Two ranks of a group, each ``python SCRIPT [ARGUMENT...] RANK PORT FOLDER [SEED...]``. Its block ends both."""

    def __init__(self, folder, script, arguments=(), seeds=(), **environment):
        folder.mkdir(exist_ok=True)
        self.folder, self.port = folder, free_port()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parents[2]), os.environ.get("PYTHONPATH")]))
        self.ranks = []
        for rank in range(2):
            command = [sys.executable, str(FOLDER / script), *arguments, str(rank), str(self.port), str(folder), *seeds]
            with (folder / f"errors-{rank}").open("w") as errors:  # A full pipe would block the rank.
                self.ranks.append(subprocess.Popen(command, env=inherited | environment, stderr=errors))

    def read(self, name, rank=0):
        return json.loads((self.folder / f"{name}-{rank}").read_text())

    def steps(self, rank):
        return self.read("seen", rank)["steps"] if (self.folder / f"seen-{rank}").exists() else 0

    def go_on(self, steps=100):
        """Wait until both ranks have trained ``steps`` more steps."""
        wanted, end = [self.steps(rank) + steps for rank in range(2)], time.monotonic() + 60.0
        while not all(self.steps(rank) > wanted[rank] for rank in range(2)):
            assert [rank.poll() for rank in self.ranks] == [None, None], self.errors()
            assert time.monotonic() < end, self.errors()
            time.sleep(0.05)

    def errors(self):
        return [(self.folder / f"errors-{rank}").read_text()[-2000:] for rank in range(2)]

    def sentence(self, rank):
        """Return the last line of the rank's stderr, without torch's prefix "[rank1]: "."""
        lines = (self.folder / f"errors-{rank}").read_text(errors="replace").strip().splitlines() or [""]
        return re.sub(r"^\[rank\d+\]: ", "", lines[-1])

    def end(self):
        """Tell both ranks to stop, and return their exit codes."""
        (self.folder / "stop").touch()
        return self.codes()

    def codes(self, seconds=60.0):
        end = time.monotonic() + seconds
        return [rank.wait(max(0.1, end - time.monotonic())) for rank in self.ranks]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def goes_on(trainee):
    """Wait for the next step of a node of this process, and return True if it has not failed."""
    before = trainee.side.run.steps
    until(lambda: trainee.error is not None or trainee.side.run.steps > before)
    return trainee.error is None


def listening(pid):
    """Return the addresses at which a process of this machine listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        found = re.match(r"socket:\[(\d+)\]", os.readlink(descriptor)) if descriptor.is_symlink() else None
        inodes |= {found[1]} if found else set()
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].rsplit(":", 1)
                known = len(host) == 8 and int(host, 16)
                places.append((socket.inet_ntoa(struct.pack("<I", known)) if known else "127.0.0.1", int(port, 16)))
    return places


def peak_mb(pid):
    """Return the peak memory of a process in MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024
