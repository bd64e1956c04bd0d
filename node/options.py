"""Everything that a node can be told, each option written once.

These rows make the keyword arguments of :class:`node.node.Node` with their documentation, the flags of `gossip run` and
`gossip local`, the GOSSIP_* variables, the flags for processes that one process starts, and docs/options.md. To add an
option, add its row here and its field in :class:`node.settings.Settings`, and read it in ``Settings.gather`` unless it
is a number.

The rows are read at run time: this module does without postponed annotations, and imports nothing heavy.
"""

import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    from gossip.config import Config

T = TypeVar("T")
Text = str | os.PathLike[str]
KINDS: dict[str, Any] = {
    "HOST:PORT": str, "HOST:PORT|INVITE|@FILE": list[str], "HOW": str, "FILE": Path, "DIR": Path, "N": int,
    "SECONDS": float, "": bool,
}  # fmt: skip
"""The type of a flag's value by its metavar."""
HEAD = """\
# Every option of a node

Written by `make reference` from `node/options.py`. An argument of `Node` wins over the flag, and the flag over the
variable.

| argument | flag | variable | meaning |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One option, and how it reaches a node.

    Attributes:
        flag: Its flag of `gossip run`.
        metavar: What follows the flag, a key of KINDS; empty for a switch.
        variable: Its environment variable.
        help: The help of the flag.
        meaning: A description for the documents, in Markdown.
        least: The smallest number that the flag takes.
        own: Each Node of a process needs a value of its own: the next port, a folder or a file of another name.
        inherited: The variable also holds for the processes of `gossip local`, whose other options differ.
        local_help: The help of the flag of `gossip local`; empty if it has none.
    """

    flag: str
    metavar: str
    variable: str
    help: str
    meaning: str
    least: float | None = None
    own: bool = False
    inherited: bool = False
    local_help: str = ""

    @property
    def kind(self) -> Any:
        """The type of the flag's value."""
        return KINDS[self.metavar]


class NodeOptions(TypedDict, total=False):
    """The options of a node, as a program gives them to :class:`node.node.Node`; None and empty: not given."""

    seeds: Annotated[Iterable[str] | Callable[[], Iterable[str]] | None, Option(
        "--seed", "HOST:PORT|INVITE|@FILE", "GOSSIP_SEEDS",
        "A node to join through, a name of several, or a file of such lines; may be repeated.",
        '"host:port" of any nodes, "host:port#id", invites, "@path" of a file of such lines, or a function that '
        "returns such texts ([seeds](node.md#seeds)); in the variable separated by commas. None: the swarm in the "
        "state directory, or a new one.",
    )]  # fmt: skip
    listen: Annotated[str | None, Option(
        "--listen", "HOST:PORT", "GOSSIP_LISTEN", "Default 127.0.0.1:0.",
        'Where to listen: "host:port", port 0 for any free one, "none" to only dial out. The default is 127.0.0.1:0; '
        "with a secret and a seed elsewhere, or a [launcher](launching.md) of other hosts, the address towards them.",
        own=True,
    )]  # fmt: skip
    advertise: Annotated[str | None, Option(
        "--advertise", "HOST:PORT", "GOSSIP_ADVERTISE", "What others should dial, behind a forwarded port.",
        'The "host:port" that others dial, if it differs. The default for 0.0.0.0 is the address on the way to the '
        "seed, else to a known member, else the first that is not loopback.",
        own=True,
    )]  # fmt: skip
    secret: Annotated[Text | None, Option(
        "--secret-file", "FILE", "GOSSIP_SECRET_FILE", "The secret, as `gossip secret` made it.",
        "The file with the swarm's secret; needed where other machines can reach `listen`. The default is that of the "
        "state directory.",
    )]  # fmt: skip
    state_dir: Annotated[Text | None, Option(
        "--state-dir", "DIR", "GOSSIP_STATE_DIR", "Keeps the node's identity and its swarm.",
        "A directory that keeps key, secret and address book. None gives a new identity at every start.",
        own=True,
    )]  # fmt: skip
    config: Annotated["Config | None", Option(
        "--config", "FILE", "GOSSIP_CONFIG", "TOML with the keys of gossip.Config.",
        "A `Config`; in flag and variable a TOML file of its [keys](config.md).",
        local_help="TOML with the keys of gossip.Config.",
    )]  # fmt: skip
    join_or_fail_s: Annotated[float | None, Option(
        "--must-join", "SECONDS", "GOSSIP_MUST_JOIN", "Fail unless the swarm is joined by then.",
        "Raise LocalError unless a swarm's weights are here within so many seconds. Without it, a node that reaches no "
        "peer finally starts alone.",
        least=0.001,
    )]  # fmt: skip
    wait_for: Annotated[int | None, Option(
        "--wait-for", "N", "GOSSIP_WAIT_FOR", "Train only when so many members are here, this one included.",
        "Train only when so many members are here; default 1.",
        least=1, local_help="Train only when so many members are here; all if not given.",
    )]  # fmt: skip
    wait_s: Annotated[float | None, Option(
        "--wait-s", "SECONDS", "GOSSIP_WAIT_S", "Wait for them no longer; 60 if not given.",
        "Go on after so many seconds without them; default 60. Raise LocalError then if a launcher started members on "
        "other hosts and none of them came.",
        least=0, local_help="Wait for them no longer; 600 if not given.",
    )]  # fmt: skip
    page: Annotated[str | None, Option(
        "--page", "HOST:PORT", "GOSSIP_PAGE", "A live page for browsers, as 127.0.0.1:7780.",
        'The "host:port" of a live [page](page.md) for browsers and monitors.',
        own=True,
    )]  # fmt: skip
    on_fault: Annotated[str | None, Option(
        "--on-fault", "HOW", "GOSSIP_ON_FAULT",
        "After a fault of this program's network side: restart (default) or raise.",
        'The reaction to a [fault of this program](operating.md#faults-of-this-program) in the network side. "restart" '
        '(the default) starts it again while the loop trains; "raise" lets `node.step` raise FaultError.',
        inherited=True,
    )]  # fmt: skip
    map_port: Annotated[str | None, Option(
        "--map-port", "HOW", "GOSSIP_MAP_PORT",
        "Ask the router for a port if nobody can dial this node: auto (default) or off.",
        'Whether to ask the router to pass connections on, by PCP, NAT-PMP or, with the extra `homes`, UPnP. "auto" '
        "(the default) asks where the swarm has a secret, no `advertise` is given and no member outside can dial this "
        'node; "off" never does.',
    )]  # fmt: skip
    tunnels: Annotated[int | None, Option(
        "--tunnels", "N", "GOSSIP_TUNNELS", "Links of others that this node may carry at once; 2 if not given.",
        "Links between undialable members that this node [carries](protocol.md#meetings) at once; default 2, "
        "0 carries none.",
        least=0,
    )]  # fmt: skip
    trace: Annotated[Text | None, Option(
        "--trace", "FILE", "GOSSIP_TRACE", "Writes a timeline of this node, for ui.perfetto.dev.",
        "A file for a [timeline](timeline.md) of steps and exchanges, for ui.perfetto.dev.",
        own=True, local_help="Writes a timeline of all nodes, for ui.perfetto.dev.",
    )]  # fmt: skip


ARGUMENTS: dict[str, Any] = inspect.get_annotations(NodeOptions)
OPTIONS: dict[str, Option] = {name: hint.__metadata__[0] for name, hint in ARGUMENTS.items()} | {
    # These are of the command or of the machine, and no arguments of Node.
    "insecure": Option(
        "--insecure", "", "GOSSIP_INSECURE", "No secret: anybody may join and read.",
        "No secret although others can reach the address; in the variable 1.",
    ),
    "grace_s": Option(
        "--grace", "SECONDS", "GOSSIP_GRACE",
        "When it ends, mix a last time for at most this long; else 5 s.",
        "Seconds for which a node that ends [mixes a last time](loop.md#with-node-as-node); default 5.",
        least=0, inherited=True,
    ),
    "log": Option(
        "--log", "FILE", "GOSSIP_LOG",
        "JSON lines: an event a row, and a row a second for a minute, ever fewer then, every 10 s in the end.",
        "A file of [JSON lines](cli.md#progress).",
    ),
    "quiet": Option(
        "--quiet", "", "GOSSIP_PROGRESS", "No live line and no closing table.",
        "No live line and no closing table; in the variable `off` instead of `line`.",
    ),
}  # fmt: skip
"""All options by name: those of Node first."""


def flags_of(**values: Any) -> list[str]:
    """Return these options as flags of `gossip run`. A value of None or False is left out. Raises TypeError."""
    flags: list[str] = []
    for name, value in values.items():
        if (option := OPTIONS.get(name)) is None:
            raise TypeError(f"{name!r} is no option of a node: docs/options.md lists them.")
        if option.kind is bool:
            flags += [option.flag] if value else []
        elif value is not None:
            for one in value if option.kind == list[str] and not isinstance(value, str) else [value]:
                flags += [option.flag, f"{one:g}" if isinstance(one, float) else str(one)]
    return flags


def takes_options(cls: type[T]) -> type[T]:
    """Show the options in the signature and the documentation of a class whose constructor takes them as ``**options``.

    The line "**options" of its docstring becomes the options; the constructor refuses other names, as Python does.
    """
    init: Callable[..., None] = vars(cls)["__init__"]
    signature = inspect.signature(init)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    # The type in each annotation: itself, or its text where it was written as one.
    types = {name: getattr(hint.__origin__, "__forward_arg__", hint.__origin__) for name, hint in ARGUMENTS.items()}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in types.items()
    ]
    signature = signature.replace(parameters=own + options)

    @functools.wraps(init)
    def checked(*args: Any, **arguments: Any) -> None:
        signature.bind(*args, **arguments)  # It raises TypeError.
        init(*args, **arguments)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    setattr(cls, "__init__", checked)  # noqa: B010  mypy refuses the assignment.
    text = "\n".join(map(entry, ARGUMENTS))
    cls.__doc__ = re.sub(r"^ *\*\*options:.*$", lambda _: text, cls.__doc__ or "", flags=re.MULTILINE)
    return cls


def entry(name: str) -> str:
    """Return an argument's entry in a docstring, without the links of the documents."""
    meaning = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", OPTIONS[name].meaning)
    text = f"{name}: {meaning} The variable is {OPTIONS[name].variable}."
    return textwrap.fill(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)


def reference_page() -> str:
    """Return docs/options.md."""
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in reference_rows())


def reference_rows() -> Iterator[tuple[str, ...]]:
    for name, option in OPTIONS.items():
        argument = f"`{name}`" if name in ARGUMENTS else ""
        yield argument, f"`{option.flag}`", f"`{option.variable}`", option.meaning.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference_page())
