"""A thousand connections at once from one host take bounded resources, and members notice nothing."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from gossip.ids import parse_address
from node.links.handshake_pool import MAX_PER_UNKNOWN_HOST, MAX_VISITORS

FLOODER = Path(__file__).with_name("flooder.py")
COUNT = 1_000
OF_MEMBERS, OF_STRANGERS = "127.0.0.1", "127.0.0.2"


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def more_descriptors():
    """Raise the limit of descriptors in the child, which holds a thousand sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(4 * COUNT, 1024), most), most))


@contextlib.contextmanager
def flood(address, kind, source):
    """Keep ``COUNT`` connections of this kind from ``source`` to ``address`` open."""
    host, port = parse_address(address)
    child = subprocess.Popen(
        [sys.executable, FLOODER, host, str(port), source, str(COUNT), kind],
        stdout=subprocess.PIPE, preexec_fn=more_descriptors,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == b"open\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("silent", OF_STRANGERS), ("slowloris", OF_STRANGERS), ("half-closed", OF_STRANGERS),
        ("vanished", OF_STRANGERS), ("silent", OF_MEMBERS), ("slowloris", OF_MEMBERS),
    ],
)  # fmt: skip
def test_a_thousand_connections_of_one_host_take_little_and_keep_nobody_out(kind, source, train, until, secret):
    first = train(nn.Linear(4, 2), secret=secret)
    second = train(nn.Linear(4, 2), secret=secret, seeds=[first.node.address])
    until(lambda: second.node.metrics().exchanges_done > 3)
    links = set(first.side.network.runtime.links.all())
    held, resident = descriptors(), resident_bytes()
    with flood(first.node.address, kind, source) as child:
        handshake_pool, most, fullest = first.side.network.runtime.connector.handshake_pool, 0, 0
        mixed = second.node.metrics().exchanges_done
        began = time.monotonic()
        while time.monotonic() - began < 6.0:
            most = max(most, descriptors())
            fullest = max(fullest, len(handshake_pool))
            time.sleep(0.05)
        assert MAX_PER_UNKNOWN_HOST - 1 <= fullest <= MAX_VISITORS or kind in ("half-closed", "vanished")
        assert most <= held + MAX_VISITORS + 16
        assert resident_bytes() - resident < 64 << 20
        assert set(first.side.network.runtime.links.all()) >= links, "honest links live on"
        assert second.node.metrics().exchanges_done > mixed + 10
        began = time.monotonic()
        newcomer = train(nn.Linear(4, 2), secret=secret, seeds=[first.node.address])
        until(lambda: newcomer.node.id in {member.id for member in first.node.members})
        assert time.monotonic() - began < 5.0
        assert child.poll() is None
    assert {member.state for member in first.node.members} == {"alive"}
    until(lambda: len(handshake_pool) == 0, 30.0)
    until(lambda: descriptors() <= held + 16, 30.0)
