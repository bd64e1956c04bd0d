"""The output of `gossip methods`."""

from __future__ import annotations

import json

from gossip.config import as_published
from gossip.config.methods import METHODS, Method, method

__all__ = ["all_methods", "as_json", "one"]

WIDTH = 16


def all_methods() -> str:
    """Return a line for every method, and how to use one."""
    lines = [f"{one.name:<{WIDTH}}  {one.title}: {one.paper}" for one in METHODS.values()]
    return "\n".join((
        *lines, "",
        "gossip methods NAME shows the settings of one. Use it in a file of settings or a scenario, as",
        "method = \"noloco\" under [gossip], or in Python: Config.published(\"noloco\").",
    ))  # fmt: skip


def one(name: str) -> str:
    """Return one method as a [gossip] section, with its needs and its differences from the paper."""
    found = method(name)
    lines = [f"# {found.title}: {found.paper}"]
    if found.needs:
        lines.append(f"# needs {found.needs}")
    if found.differs:
        lines.append(f"# differs: {found.differs}")
    return "\n".join(
        (*lines, "[gossip]", *(f"{key} = {json.dumps(value)}" for key, value in as_published(name).items()))
    )


def as_json(name: str | None) -> str:
    """Return one method, or all by name, as JSON."""
    return json.dumps(described(method(name)) if name else {key: described(found) for key, found in METHODS.items()})


def described(found: Method) -> dict[str, object]:
    return {
        "title": found.title, "paper": found.paper, "settings": as_published(found.name), "needs": found.needs,
        "differs": found.differs,
    }  # fmt: skip
