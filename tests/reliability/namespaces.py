"""Network namespaces that stand for machines: on one switch, or at homes behind routers."""

import contextlib
import os
import shutil
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


class Homes:
    """A network with public machines, and homes behind routers that drop new connections from outside.

    Public machine number n has the address 10.79.0.(10 + n). Home number h has a router with the outside address
    10.79.0.(100 + h), and machines with addresses 192.168.h.(10 + n). ``machines`` has the name of each namespace, by
    its address.
    """

    def __init__(self, mark):
        self.mark, self.spaces, self.machines = mark, [], {}
        self.net = self.space("net")
        self.bridge(self.net, "br0")

    def space(self, name):
        """Make a namespace and return its full name."""
        space = f"{self.mark}{name}"
        lab.run("ip", "netns", "add", space)
        self.spaces.append(space)
        lab.run("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def bridge(self, space, name):
        lab.run("ip", "-n", space, "link", "add", name, "type", "bridge")
        lab.run("ip", "-n", space, "link", "set", name, "up")

    def plug(self, space, device, switch, bridge, address):
        """Connect a device of a namespace, with its address, to a bridge in another."""
        port = f"p{len(self.spaces)}{device[0]}"
        lab.run(
            "ip", "-n", space, "link", "add", device, "type", "veth", "peer", "name", port, "netns", switch
        )  # fmt: skip
        lab.run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
        lab.run("ip", "-n", space, "address", "add", address, "dev", device)
        lab.run("ip", "-n", space, "link", "set", device, "up")

    def public(self, number):
        """Add a public machine and return its address."""
        space, address = self.space(f"p{number}"), f"10.79.0.{10 + number}"
        self.plug(space, "eth0", self.net, "br0", f"{address}/24")
        self.machines[address] = space
        return address

    def home(self, number, count, nat):
        """Add a home with ``count`` machines and return their addresses. ``nat`` is the rule of nft for its router."""
        router = self.space(f"r{number}")
        self.plug(router, "wan", self.net, "br0", f"10.79.0.{100 + number}/24")
        self.bridge(router, "lan")
        lab.run("ip", "-n", router, "address", "add", f"192.168.{number}.1/24", "dev", "lan")
        lab.run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        subprocess.run(
            ["ip", "netns", "exec", router, "nft", "-f", "-"], input=ROUTER % nat, text=True, check=True
        )  # fmt: skip
        return [self.inside(number, router, place) for place in range(count)]

    def inside(self, number, router, place):
        space, address = self.space(f"h{number}{place}"), f"192.168.{number}.{10 + place}"
        self.plug(space, "eth0", router, "lan", f"{address}/24")
        lab.run("ip", "-n", space, "route", "add", "default", "via", f"192.168.{number}.1")
        self.machines[address] = space
        return address


ROUTER = """
table inet home {
 chain leaving {
  type nat hook postrouting priority 100
  oifname "wan" %s
 }
 chain passing {
  type filter hook forward priority 0; policy drop;
  iifname "lan" accept
  ct state established,related accept
 }
 chain incoming {
  type filter hook input priority 0; policy accept;
  iifname "wan" ct state new drop
 }
}
"""


@contextlib.contextmanager
def homes(publics, counts, nat="masquerade"):
    """Make ``publics`` public machines and a home for each of ``counts``, with so many machines; yield a Homes."""
    if missing := lab.namespaces_missing():
        pytest.skip(missing)
    if shutil.which("nft") is None:
        pytest.skip("routers need the nft command (Debian: nftables)")
    made = Homes(f"gh{os.getpid() % 100_000}")
    try:
        for number in range(publics):
            made.public(number)
        for number, count in enumerate(counts):
            made.home(number, count, nat)
        yield made
    finally:
        for space in made.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
