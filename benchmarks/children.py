"""Processes of a benchmark: a parent and its children speak in lines, through pipes."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node import Node


class Child(subprocess.Popen[str]):
    """A Python program with one thread for arithmetic. The end of its ``with`` block kills it."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None) -> None:
        super().__init__(
            [sys.executable, *map(str, arguments)], stdin=-1, stdout=-1, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | (environment or {}),
        )  # fmt: skip

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)

    def tell(self, line: str = "") -> None:
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def line(self) -> str:
        """Return its next line. Raises RuntimeError if it has ended."""
        assert self.stdout is not None
        line = self.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self.args} has ended with code {self.wait(30)}.")
        return line

    def answer(self, question: str | None = None) -> Any:
        """Return its next line, decoded from JSON; ask a question first if one is given."""
        if question is not None:
            self.tell(question)
        return json.loads(self.line())


def finish(children: Sequence[Child]) -> None:
    """Close the inputs of all, and wait for their ends."""
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    for child in children:
        child.wait(30)


def free_port() -> int:
    """Return an unused port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# -- in a child ----------------------------------------------------------------------------------------------------
def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def visit_until_told(node: Node) -> None:
    """Let others join at this node until the parent sends a line."""
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        node._training.visit()
    sys.stdin.readline()
