"""Ports for programs that a test starts."""

import contextlib
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port below the range from which the kernel gives ports to other programs."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError("none of 100 ports is free")
