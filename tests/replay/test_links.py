"""Emulated links: latency, rate, loss and cuts. Times have only lower bounds, since a busy machine is slower."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.replay import links as emulated
from benchmarks.replay.links import EmulatedLinks, missing
from gossip.errors import LocalError
from tests.harness.warm import is_running

PORT = 5001
WAIT_S = 10.0
SIZE = 500_000


@pytest.fixture(scope="module")
def possible():
    if why := missing():
        pytest.skip(why)


@pytest.fixture(scope="module")
def two(possible):
    with EmulatedLinks(2) as links:
        yield links


def reset(links):
    links.heal()
    links.latency(-1, -1, 0.0)
    links.loss(-1, -1, 0.0)
    links.rate(-1, 1000, 1000)


def datagrams(links, node):
    with links.inside(node):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((links.address(node), PORT))
    made.settimeout(WAIT_S)
    return made


@contextlib.contextmanager
def connection(links):
    """Connect the first node to the second; yield both ends."""
    with links.inside(1):
        server = socket.create_server((links.address(1), PORT))
    with links.inside(0):
        client = socket.create_connection((links.address(1), PORT), WAIT_S)
    with server, client, server.accept()[0] as accepted:
        yield client, accepted


def arrived(links, count=200):
    """Send ``count`` datagrams from the first node; return the numbers that reach the second."""
    with datagrams(links, 0) as sender, datagrams(links, 1) as receiver:
        for number in range(count):
            sender.sendto(bytes([number]), (links.address(1), PORT))
        until = time.monotonic() + WAIT_S
        while links.stats().nodes[0][0] < count and time.monotonic() < until:
            time.sleep(0.01)
        links.loss(-1, -1, 0.0)
        sender.sendto(b"end", (links.address(1), PORT))
        seen = []
        while (data := receiver.recv(9)) != b"end":
            seen.append(data[0])
    return seen


@pytest.mark.netns
def test_a_round_trip_takes_two_latencies(two):
    reset(two)
    two.latency(0, 1, 0.03)
    with datagrams(two, 0) as one, datagrams(two, 1) as other:
        begun = time.monotonic()
        one.sendto(b"x", (two.address(1), PORT))
        other.recv(9)
        other.sendto(b"x", (two.address(0), PORT))
        one.recv(9)
        assert time.monotonic() - begun >= 0.06


@pytest.mark.netns
def test_a_stream_is_no_faster_than_uplink_and_downlink(two):
    reset(two)
    for up, down in ((8, 1000), (1000, 8)):
        two.rate(0, up, 1000)
        two.rate(1, 1000, down)
        with connection(two) as (client, accepted):
            accepted.settimeout(WAIT_S)
            sender = threading.Thread(target=client.sendall, args=(bytes(SIZE),))
            begun, left = time.monotonic(), SIZE
            sender.start()
            while left:
                left -= len(accepted.recv(left))
            took_s = time.monotonic() - begun
            sender.join()
            assert took_s >= SIZE / 1e6  # 8 Mbit/s are a byte a microsecond, without headers.


@pytest.mark.netns
@pytest.mark.usefixtures("possible")
def test_the_seed_decides_which_packets_are_lost():
    seen = {}
    for run, seed in (("first", 5), ("again", 5), ("other", 6)):
        with EmulatedLinks(2, seed=seed) as links:
            links.loss(0, 1, 0.2)
            seen[run] = arrived(links)
    assert seen["first"] == seen["again"] != seen["other"]
    assert 130 < len(seen["first"]) < 190  # 160 of 200 should arrive, with a standard deviation of 6.


@pytest.mark.netns
def test_a_cut_lets_nothing_pass_until_it_heals(two):
    reset(two)
    two.cut(0, 1)
    with datagrams(two, 0) as one, datagrams(two, 1) as other:
        one.sendto(b"lost", (two.address(1), PORT))
        until = time.monotonic() + WAIT_S
        while not two.stats().severed and time.monotonic() < until:
            time.sleep(0.01)
        assert two.stats().severed
        two.heal(0, 1)
        one.sendto(b"there", (two.address(1), PORT))
        assert other.recv(9) == b"there"


@pytest.mark.netns
def test_congestion_control_is_a_nodes_own(two):
    reset(two)
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for name in known:
        two.congestion(0, name)
        two.congestion(1, name)
        with connection(two) as ends:
            for end in ends:
                given = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert given.split(b"\0")[0].decode() == name
    with pytest.raises(LocalError, match="nosuch is not in this kernel"):
        two.congestion(0, "nosuch")


@pytest.mark.netns
@pytest.mark.usefixtures("possible")
def test_a_router_that_is_ended_is_one_sentence():
    with EmulatedLinks(2) as links:
        links.process.kill()
        links.process.wait()
        with pytest.raises(LocalError, match="was ended"):
            links.latency(-1, -1, 0.01)


@pytest.mark.netns
@pytest.mark.usefixtures("possible")
def test_no_router_outlives_a_process_that_is_killed_with_signal_9():
    program = (
        "import sys, time\nfrom benchmarks.replay.links import EmulatedLinks\n"
        "with EmulatedLinks(2) as links:\n    print(links.process.pid, flush=True)\n    time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    router = int(owner.stdout.readline())
    assert is_running(router)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + WAIT_S
    while is_running(router) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(router)


# -- where there can be none -------------------------------------------------------------------------------------------
def test_without_root_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(emulated.os, "geteuid", lambda: 1000)
    assert missing() == "emulated links need root, for network namespaces: run it with sudo."


@pytest.mark.parametrize(("program", "package"), [("gcc", "gcc"), ("ip", "iproute2")])
def test_without_a_program_the_sentence_names_its_package(monkeypatch, program, package):
    monkeypatch.setattr(emulated.os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulated.Path, "exists", lambda path: True)
    monkeypatch.setattr(emulated.shutil, "which", lambda name: None if name == program else name)
    assert missing() == f"emulated links need {program}: on Debian, apt-get install {package}."
