"""Machines that are namespaces: each has a network address, a name, processes and a few folders of its own."""

import contextlib
import ctypes
import os
import re
import shlex
from pathlib import Path

from tests.engines.launched import ROOT, Log, children, descendants, kill
from tests.reliability.namespaces import lab

PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
ADDRESS = "10.79.0.{}"
HOME = "/mnt"  # Each machine has its own folder mounted at this path.
# Behind NAT, as virtual machines have it, all of them may have the same address, which no other machine reaches.
NAT = "10.0.2.15"
CLONE_NEWNET = 0x40000000
BOOT = f"""
set -e
hostname "$1"
mount --bind "$2" {HOME}
mount --bind {HOME}/etc-hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
touch {HOME}/booted
while :; do sleep 1; done
"""


@contextlib.contextmanager
def inside(machine):
    """Make the sockets that this thread opens those of a machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{machine.space}") as other:
        assert libc.setns(other.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(own.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def documented(heading, number=0):
    """Return a command of a section of the page, by its place there."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)[number]


class Host:
    """A machine with the examples and the secret; ``run`` starts a command of the page there.

    Its own name resolves to 127.0.1.1, as on Debian. It sees its folder as ``HOME``, and only its own processes.
    """

    def __init__(self, space, number, folder, secret, launch):
        self.number, self.folder, self.space = number, folder, space
        self.address = ADDRESS.format(number + 1)
        self.log = Log(folder / "log.jsonl")
        self._launch, self._commands = launch, 0
        folder.mkdir()
        (folder / "tmp").mkdir()
        for name in ("examples", "deploy"):
            (folder / name).symlink_to(ROOT / name)
        path = folder / "swarm.secret"
        path.touch(mode=0o600)
        path.write_text(secret)
        (folder / "etc-hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 machine-{number}\n")
        self._machine = launch(
            f"machine-{number}", folder, "ip", "netns", "exec", space, "unshare", "--mount", "--uts", "--pid", "--fork",
            "--kill-child", "--mount-proc", "sh", "-c", BOOT, "sh", f"machine-{number}", folder,
        )  # fmt: skip
        self._machine.until((folder / "booted").exists)
        (self._first,) = children(self._machine.pid)

    def add_nat(self):
        """Add a second network, with the default route, in which the machines do not reach each other."""
        device = ("link add nat0 type bridge", "link set nat0 up")
        for command in (*device, f"address add {NAT}/24 dev nat0", "route add default dev nat0"):
            lab.run("ip", "-n", self.space, *command.split())

    def run(self, command, *more, variables=None, **changes):
        """Run a command of the page; ``changes`` replace words of it, and ``more`` are arguments of the script."""
        words = {"HOST0": ADDRESS.format(1), "/var/gossip": "states", **changes}
        for old, new in words.items():
            assert old in command or old in ("HOST0", "/var/gossip"), f"{old!r} is not in {command!r}"
            command = command.replace(old, str(new))
        self._commands += 1
        variables = {"GOSSIP_LOG": str(self.log.path), "HOME": HOME, "TMPDIR": f"{HOME}/tmp"} | (variables or {})
        return self._launch(
            f"host-{self.number}-{self._commands}", self.folder,
            "nsenter", "-t", self._first, "--net", "--mount", "--uts", "--pid",
            "sh", "-c", f"cd {HOME} && {' '.join([command, *map(shlex.quote, map(str, more))])}",
            **variables,
        )  # fmt: skip

    def processes(self, name):
        """Return the processes of this machine that have ``name`` in their command line."""
        found = []
        for pid in descendants(self._first):
            with contextlib.suppress(OSError):  # The process has ended.
                if name in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                    found.append(pid)
        return found

    def off(self):
        """Cut its power: all of its processes end at once, and no peer is notified."""
        lab.run("ip", "-n", self.space, "link", "set", "eth0", "down")
        kill(self._first)
        self._machine.process.wait(30)


def together(machines, jobs):
    """Wait until all of them train as one swarm, at addresses that the others reach."""
    for machine, job in zip(machines, jobs, strict=True):
        job.until(lambda log=machine.log: log.mixed(members=len(machines)))
        assert machine.log.addresses[-1].startswith(f"{machine.address}:")


def found(machines, folder):
    """Return the log of the node that has its folder on one of the machines, and which machine it is, or None."""
    for machine in machines:
        log = Log(machine.folder / folder / "log.jsonl")
        if log.addresses:
            return log, machine
    return None
