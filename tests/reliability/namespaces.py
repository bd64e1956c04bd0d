"""Network namespaces that stand for machines: on one switch, or at homes behind routers."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.engines.launched import until
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

    Public machine number n has the address 192.79.0.(10 + n). Home number h has a router with the outside address
    192.79.0.(100 + h), and machines with addresses 192.168.h.(10 + n). ``machines`` has the name of each namespace, by
    its address, and ``routers`` those of the routers. No namespace has a link to the world outside, where miniupnpd
    takes these outside addresses to be.
    """

    def __init__(self, mark):
        self.mark, self.spaces, self.machines, self.routers, self.daemons = mark, [], {}, [], []
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
        lab.run("ip", "-n", space, "address", "add", address, "dev", device, *(("nodad",) if ":" in address else ()))
        lab.run("ip", "-n", space, "link", "set", device, "up")

    def public(self, number, has_firewall=False, is_v6=False):
        """Add a public machine, with a firewall that drops new connections from outside, and return its address."""
        space, host = self.space(f"p{number}"), 10 + number
        address = f"2a0f:79::{host}" if is_v6 else f"192.79.0.{host}"
        self.plug(space, "eth0", self.net, "br0", f"{address}/{64 if is_v6 else 24}")
        if has_firewall:
            self.filter(space, FIREWALL)
        self.machines[address] = space
        return address

    def home(self, number, count=1, nat="masquerade", opens_ports=False, is_nested=False):
        """Add a home with ``count`` machines and return their addresses.

        ``nat`` is the rule of nft for its router, which miniupnpd controls if it ``opens_ports``, and which is behind
        another one if it ``is_nested``.
        """
        router, switch, bridge, outside = self.space(f"r{number}"), self.net, "br0", f"192.79.0.{100 + number}/24"
        self.routers.append(router)
        if is_nested:
            switch, bridge = self.space(f"o{number}"), "lan"
            self.route(switch, self.net, "br0", outside, f"172.20.{number}.1/24", nat)
            outside = f"172.20.{number}.2/24"
        self.route(router, switch, bridge, outside, f"192.168.{number}.1/24", nat)
        if is_nested:
            lab.run("ip", "-n", router, "route", "add", "default", "via", f"172.20.{number}.1")
        if opens_ports:
            self.open_ports(router, number)
        return [self.inside(number, router, place) for place in range(count)]

    def route(self, router, switch, bridge, outside, inside, nat):
        """Make a namespace a router with an address on a bridge outside and one on a bridge of its own."""
        self.plug(router, "wan", switch, bridge, outside)
        self.bridge(router, "lan")
        lab.run("ip", "-n", router, "address", "add", inside, "dev", "lan")
        lab.run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.filter(router, ROUTER % nat)

    def limit_rates(self):
        """Limit what each machine sends to 100 Mbit/s."""
        for space in self.machines.values():
            shape = ("root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "100ms")
            lab.run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", *shape)

    def filter(self, space, rules):
        subprocess.run(["ip", "netns", "exec", space, "nft", "-f", "-"], input=rules, text=True, check=True)

    def open_ports(self, router, number):
        """Start miniupnpd on a router."""
        folder = Path(tempfile.mkdtemp(prefix="gossip-upnp-"))
        config = folder / "conf"
        config.write_text(MINIUPNPD.format(number=number, outside=100 + number))
        command = ("ip", "netns", "exec", router, "miniupnpd", "-d", "-f", config, "-P", folder / "pid")
        with (folder / "log").open("w") as log:
            self.daemons.append((subprocess.Popen(command, stdout=log, stderr=log), folder))
        until(lambda: "Listening for NAT-PMP/PCP" in (folder / "log").read_text(), (folder / "log").read_text)

    def restart_router(self, number):
        """Give a home's router another address outside, upon which it forgets all connections."""
        router = self.routers[number]
        lab.run("ip", "-n", router, "address", "del", f"192.79.0.{100 + number}/24", "dev", "wan")
        lab.run("ip", "-n", router, "address", "add", f"192.79.0.{200 + number}/24", "dev", "wan")

    def opened_ports(self, number):
        """Return the ports outside that the router of a home passes on."""
        command = ["ip", "netns", "exec", self.routers[number], "nft", "list", "chain", "inet", "home", "opened_in"]
        rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {int(port) for port in re.findall(r"dport (\d+)", rules)}

    def close(self):
        """End what was started, and remove all namespaces."""
        for daemon, folder in self.daemons:
            daemon.terminate()
            daemon.wait(10)
            shutil.rmtree(folder)
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def inside(self, number, router, place):
        space, address = self.space(f"h{number}{place}"), f"192.168.{number}.{10 + place}"
        self.plug(space, "eth0", router, "lan", f"{address}/24")
        lab.run("ip", "-n", space, "route", "add", "default", "via", f"192.168.{number}.1")
        self.machines[address] = space
        return address


ROUTER = """
table inet home {
 chain opened_in { }
 chain opened_out { }
 chain opened { }
 chain entering {
  type nat hook prerouting priority -100
  jump opened_in
 }
 chain leaving {
  type nat hook postrouting priority 100
  jump opened_out
  oifname "wan" %s
 }
 chain passing {
  type filter hook forward priority 0; policy drop;
  iifname "lan" accept
  ct state established,related accept
  jump opened
 }
 chain incoming {
  type filter hook input priority 0; policy accept;
  iifname "wan" ct state new drop
 }
}
"""

FIREWALL = """
table inet home {
 chain incoming {
  type filter hook input priority 0; policy accept;
  iifname "eth0" meta l4proto tcp ct state new drop
 }
}
"""

MINIUPNPD = """\
ext_ifname=wan
ext_ip=192.79.0.{outside}
listening_ip=lan
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
uuid=6a2a1a3e-0000-4000-8000-0000000000{number:02}
upnp_table_name=home
upnp_nat_table_name=home
upnp_forward_chain=opened
upnp_nat_chain=opened_in
upnp_nat_postrouting_chain=opened_out
allow 1024-65535 192.168.{number}.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


@contextlib.contextmanager
def homes(publics, counts, nat="masquerade", opens_ports=()):
    """Make ``publics`` public machines and a home for each of ``counts``, with so many machines; yield a Homes.

    The routers of the homes ``opens_ports`` open ports when they are asked to.
    """
    if missing := lab.namespaces_missing():
        pytest.skip(missing)
    for command, package in (("nft", "nftables"), ("miniupnpd", "miniupnpd")):
        if shutil.which(command) is None and (opens_ports or command == "nft"):
            pytest.skip(f"routers need the {command} command (Debian: {package})")
    made = Homes(f"gh{os.getpid() % 100_000}")
    try:
        for number in range(publics):
            made.public(number)
        for number, count in enumerate(counts):
            made.home(number, count, nat, opens_ports=number in opens_ports)
        yield made
    finally:
        made.close()
