"""Emulated links: network namespaces joined by a router (``router.c``), with sockets and processes inside them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gossip.errors import LocalError

SOURCE = Path(__file__).parent / "router.c"
MOST_NODES = 32  # The limit of router.c.
CLONE_NEWNET = 0x40000000
DISTURBED = 0.05  # The share of packets over 5 ms late from which a run measures this machine, not the links.
QUEUE_MS = 100.0  # The queue of each uplink and downlink.


@dataclass(frozen=True, slots=True)
class Stats:
    """The links' counters so far. ``nodes``: packets and bytes sent, packets and bytes received, of each."""

    delivered: int
    late: int  # Over 5 ms.
    latest_ms: float
    lost: int
    full: int
    severed: int
    nodes: list[list[int]]

    def late_since(self, before: Stats) -> float:
        """Return the share of late packets since ``before``."""
        return (self.late - before.late) / max(1, self.delivered - before.delivered)


def missing() -> str:
    """Return why this machine cannot emulate links, and what would help; empty if it can."""
    if os.geteuid() != 0:
        return "emulated links need root, for network namespaces: run it with sudo."
    if not Path("/dev/net/tun").exists():
        return "emulated links need /dev/net/tun: load the module tun, and let a container have the device."
    for program, package in (("gcc", "gcc"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            return f"emulated links need {program}: on Debian, apt-get install {package}."
    try:
        with EmulatedLinks(1):
            return ""
    except LocalError as error:
        return str(error)


class EmulatedLinks:
    """``with EmulatedLinks(count) as links``: so many namespaces; node k's address is ``links.address(k)``.

    Initially all have 1 Gbit/s each way, no latency and no loss. Changes apply to packets sent from then on. The
    namespaces have no name and live only in their processes, so nothing is left when this process ends. Raises
    :class:`LocalError`, a sentence, if they cannot be made.
    """

    def __init__(self, count: int, seed: int = 1, queue_ms: float = QUEUE_MS) -> None:
        assert 1 <= count <= MOST_NODES, "router.c has no more"
        self.count, self.seed, self.queue_ms = count, seed, queue_ms
        self.spaces: list[int] = []  # Namespaces, as open files of this process.
        self.files: list[str] = []  # Their paths, by which another process may open them.

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory(prefix="gossip-links-") as folder:
            program = Path(folder) / "router"
            run("gcc", "-O2", "-o", str(program), str(SOURCE))
            # A session of its own: the scheduler first divides a processor among sessions (autogroup), and ours may be
            # full of training.
            self.process = subprocess.Popen(
                [str(program), str(self.seed), str(self.queue_ms), str(self.count)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, start_new_session=True,
            )  # fmt: skip
            ready = self.line().split()
        try:
            if ready[:1] != ["ready"]:
                assert self.process.stderr is not None
                why = self.process.stderr.read().strip() or "the router ended"
                raise LocalError(f"emulated links cannot be made here ({why}): allow network namespaces and TUN.")
            for number in ready[1:]:
                self.files.append(f"/proc/{self.process.pid}/fd/{number}")
                self.spaces.append(os.open(self.files[-1], os.O_RDONLY))
            for node in range(self.count):
                self.ip(node, "link", "set", "lo", "up")
                self.ip(node, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
                # The queue before the device holds all that TCP puts there, so that only the links drop packets.
                self.ip(node, "link", "set", "eth0", "mtu", "1500", "txqueuelen", "10000", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # Input that a dead router did not read.
                    stream.close()
        for space in self.spaces:
            os.close(space)
        self.spaces.clear()

    @staticmethod
    def address(node: int) -> str:
        return f"10.78.0.{node + 1}"

    # -- the links ---------------------------------------------------------------------------------------------------
    # -1 stands for every node.
    def rate(self, node: int, up_mbit_s: float, down_mbit_s: float) -> None:
        self.tell(f"rate {node} {up_mbit_s!r} {down_mbit_s!r}")

    def latency(self, one: int, other: int, latency_s: float) -> None:
        """Set the one-way latency, the same both ways."""
        self.tell(f"latency {one} {other} {1e3 * latency_s!r}")

    def loss(self, one: int, other: int, share: float) -> None:
        """Set the share of lost packets, both ways."""
        self.tell(f"loss {one} {other} {share!r}")

    def cut(self, one: int, other: int) -> None:
        """Let nothing pass, not even packets in flight."""
        self.tell(f"cut {one} {other}")

    def heal(self, one: int = -1, other: int = -1) -> None:
        self.tell(f"heal {one} {other}")

    def congestion(self, node: int, name: str) -> None:
        """Set TCP's congestion control for all connections of this node, as a property of its route.

        A namespace may set by sysctl only what the host allows everybody, but its route may name any that the host has.
        """
        subnet = ["route", "replace", "10.78.0.0/24", "dev", "eth0", "src", self.address(node)]
        try:
            self.ip(node, *subnet, "congctl", name)
        except LocalError:
            raise LocalError(
                f"The congestion control {name} is not in this kernel: it has "
                f"{Path('/proc/sys/net/ipv4/tcp_available_congestion_control').read_text().strip()}."
            ) from None

    def stats(self) -> Stats:
        return Stats(**json.loads(self.ask("stats")))

    # -- inside ------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Make sockets of this thread, and processes that it starts, belong to the node."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(self.spaces[node])
            try:
                yield
            finally:
                enter(own)
        finally:
            os.close(own)

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process of the node, in a session of its own."""
        with self.inside(node):
            return subprocess.Popen(command, start_new_session=True, **options)

    def ip(self, node: int, *words: str) -> None:
        with self.inside(node):
            run("ip", *words)

    # -- the router --------------------------------------------------------------------------------------------------
    def tell(self, command: str) -> None:
        answer = self.ask(command)
        assert answer == "ok", f"{command}: {answer}"

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # The answer is then empty.
        if not (answer := self.line()):
            raise LocalError("The process of the emulated links was ended: run it again.")
        return answer

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def enter(space: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise LocalError(f"A network namespace cannot be entered ({os.strerror(number)}).")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalError(f"{' '.join(command)} failed: {done.stderr.strip()}")
