"""The resources of one process: memory, file descriptors, threads, tasks, and the length of every table of a node.

Tables are found by walking the node's objects instead of a list of names, so that new tables are counted too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

DEPTH = 8  # attributes and containers from a root to the deepest of its tables
ITEMS = 64  # items of a container that are inspected, because all are alike
OURS = ("gossip.", "node.")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_figures() -> dict[str, int]:
    """Return this process's resident bytes, open descriptors and threads."""
    status = Path("/proc/self/status").read_text()
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"rss": pages * PAGE_BYTES, "descriptors": len(os.listdir("/proc/self/fd")), "threads": threads}


def tasks() -> int:
    """Return the number of tasks in this thread's trio run."""
    return trio.lowlevel.current_statistics().tasks_living


def tables(roots: Mapping[str, object]) -> dict[str, int]:
    """Return the number of items of every container that these objects reach, by attribute path.

    In a path ``[]`` stands for all items of a container.
    """
    lengths: dict[str, int] = {}
    visited: set[int] = set()  # ids of objects
    # The nearest objects come first, so that each is walked from its shortest path, which DEPTH cuts off last.
    waiting: deque[tuple[str, object, int]] = deque((name, root, 0) for name, root in roots.items())
    while waiting:
        path, thing, depth = waiting.popleft()
        if depth > DEPTH or id(thing) in visited or isinstance(thing, str | bytes | int | float | bool | type(None)):
            continue
        visited.add(id(thing))
        if isinstance(thing, dict | list | set | frozenset | deque | tuple | bytearray):
            # Tuples, frozen sets and bounded deques cannot grow.
            if not isinstance(thing, tuple | frozenset) and getattr(thing, "maxlen", None) is None:
                lengths[path] = lengths.get(path, 0) + len(thing)
            values = list(thing.values()) if isinstance(thing, dict) else [] if isinstance(thing, bytearray) else thing
            waiting += [(f"{path}[]", item, depth + 1) for _, item in zip(range(ITEMS), values, strict=False)]
        elif type(thing).__module__.startswith(OURS):
            waiting += [(f"{path}.{name}", value, depth + 1) for name, value in attributes(thing)]
    return lengths


def attributes(thing: object) -> list[tuple[str, Any]]:
    names = list(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [(name, getattr(thing, name)) for name in names if hasattr(thing, name)]
