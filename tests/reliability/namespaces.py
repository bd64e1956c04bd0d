"""Network namespaces that stand for machines: each with an IPv4 and an IPv6 address, on one switch."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from tests.reliability.test_reliability import lab


@contextlib.contextmanager
def switched(count):
    """Make ``count`` namespaces and yield their names; number n has the addresses 10.79.0.(n + 1) and fd79::(n + 1).

    There is no default route and no name server, as in a closed network.
    """
    if missing := lab.namespaces_missing():
        pytest.skip(missing)
    mark = f"gm{os.getpid() % 100_000}"
    switch, spaces = f"{mark}s", [f"{mark}{number}" for number in range(count)]
    try:
        lab.run("ip", "netns", "add", switch)
        lab.run("ip", "-n", switch, "link", "add", "sw0", "type", "bridge")
        lab.run("ip", "-n", switch, "link", "set", "sw0", "up")
        for number, space in enumerate(spaces):
            peer = ("peer", "name", f"p{number}", "netns", switch)
            lab.run("ip", "netns", "add", space)
            lab.run("ip", "-n", space, "link", "set", "lo", "up")
            lab.run("ip", "-n", space, "link", "add", "eth0", "type", "veth", *peer)
            lab.run("ip", "-n", switch, "link", "set", f"p{number}", "master", "sw0", "up")
            lab.run("ip", "-n", space, "address", "add", f"10.79.0.{1 + number}/24", "dev", "eth0")
            lab.run("ip", "-n", space, "address", "add", f"fd79::{1 + number}/64", "dev", "eth0", "nodad")
            lab.run("ip", "-n", space, "link", "set", "eth0", "up")
        yield spaces
    finally:
        for space in (*spaces, switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
