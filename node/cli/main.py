"""The `gossip` command, after `gossip.__main__` has parsed its options."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from gossip.errors import ConfigError, GossipError, LocalError
from gossip.ids import PeerId, from_hex, parse_address
from node import running
from node.identity.keys import InviteToken, is_invite, keep_secret, parse_invite, read_secret
from node.identity.keys import new_secret as make_secret
from node.options import OPTIONS
from node.terminal import plain_console

if TYPE_CHECKING:
    from rich.console import Console


# Seconds from a script's last import until its user is told that it made no Node. Building a model takes less. The line
# is needless for a script that reads data for longer, or whose own processes still import their libraries: so it says
# "if it trains by now". A longer time costs users without a Node as much training.
NODELESS_S = 5.0
OPEN_INVITE = (
    "gossip: every user of this machine can read the arguments of this process, and in them the invite with the "
    "swarm's secret: write it into a file of yours (chmod 600), and give --seed @FILE."
)
WITH_NODE = "Put 'with Node(model, optimizer) as node:' around its loop"


# -- gossip run --------------------------------------------------------------------------------------------------------
def run(script: Path, args: Sequence[str], options: Mapping[str, Any], is_module: bool = False) -> int:
    """Run a training script in this process with the options in its environment; return its exit code.

    With ``is_module``, ``script`` is the name of a module, which is run as ``python -m`` does it.

    Raises:
        GossipError: A setting is wrong, or the script let such an error through.
        SystemExit: The script's own, or 143 after SIGTERM.
    """
    from node.local import check_script  # Imported here, because it imports numpy.

    check_script(script, is_module)
    for name, value in environment_of(options, os.environ).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if any(map(is_invite, options.get("seeds") or ())):
        print(OPEN_INVITE, file=sys.stderr)
    os.environ[running.MADE] = str(folder_of_this_process() / "made")
    signal.signal(signal.SIGTERM, leave)
    log = Path(text) if (text := os.environ.get("GOSSIP_LOG")) else None
    threading.Thread(target=tell_of_missing_node, args=(script, log), daemon=True).start()
    sys.argv = ["-m" if is_module else str(script), *args]
    put_first(Path.cwd() if is_module else script.resolve().parent)
    try:
        if is_module:
            find_module(str(script))
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A second ^C silently ends what the interpreter still does.
        return 128 + signal.SIGINT
    except GossipError:
        raise
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        print_script_error(error)
        return 1
    if running.is_unstepped():
        print(f"gossip: {script} has trained without node.step(), so it has mixed with nobody.", file=sys.stderr)
        return 2
    if running.has_made_node():
        return 0
    print(f"gossip: {script} has ended and made no Node, so it was in no swarm. {WITH_NODE}.", file=sys.stderr)
    return 2


def inspect(script: Path, args: Sequence[str], is_module: bool = False) -> int:
    """Run a training script until it makes a Node, which prints its inventory and ends the script."""
    os.environ[running.INSPECTS] = "1"
    return run(script, args, {"quiet": True}, is_module)


def find_module(name: str) -> None:
    """Raise ConfigError if ``python -m name`` would find nothing to run. Imports the packages around the module."""
    spec = None
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # An import of the script's own has failed.
            raise
    if spec is None:
        raise ConfigError(f"There is no module {name} to run: name it as for python -m, in the folder that holds it.")


def put_first(folder: Path) -> None:
    """Put the script's folder first on the import path, as Python does.

    The packages `gossip` and `node` are imported already and stay ours; warn of a file of the script that they hide.
    """
    if sys.flags.safe_path:
        sys.path.insert(0, str(folder))
    else:
        sys.path[0] = str(folder)
    for name in ("gossip", "node"):
        for hidden in (folder / f"{name}.py", folder / name / "__init__.py"):
            if hidden.is_file() and not hidden.samefile(sys.modules[name].__file__ or ""):
                print(
                    f"gossip: {hidden} is hidden by the package {name!r} of gossip-trainer: rename it if the script "
                    "imports it.", file=sys.stderr,
                )  # fmt: skip


def tell_of_missing_node(script: Path, log: Path | None) -> None:
    """Report once that a script runs without a Node: on stderr, and as a row of its log. Runs in a thread of its own.

    Imports may take minutes on a busy machine, so the time counts from the last of them.
    """
    since_s = time.monotonic()  # The last moment at which the main thread was importing.
    while time.monotonic() - since_s < NODELESS_S:
        time.sleep(NODELESS_S / 20)
        if running.has_made_node():
            return
        if is_importing(threading.main_thread()):
            since_s = time.monotonic()
    sentence = (
        f"{script} has run for {NODELESS_S:g} s since its last import and has made no Node yet: if it trains by now, "
        f"it is in no swarm. {WITH_NODE}."
    )
    print(f"gossip: {sentence}", file=sys.stderr)
    if log is not None:
        row = {"t": round(time.time(), 3), "event": "nodeless", "sentence": sentence}
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")


def is_importing(thread: threading.Thread) -> bool:
    """Return True if the thread is inside an import statement."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Unwind the script on SIGTERM, so that `with Node` announces LEFT; a second one ends the process at once.

    If an import catches the exception raised here, the script ends when it begins to train.
    """
    running.request_stop()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + signal.SIGTERM)


def environment_of(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return changes to the variables that Node reads (None: unset), by the options as :mod:`node.options` names them.

    They are checked here, since a script may take minutes to reach its Node.

    Raises:
        GossipError: An option cannot work.
    """
    from node.settings import Settings  # Imported here, because it imports trio.

    changes: dict[str, str | None] = {}
    secret_file, is_insecure, log = options.get("secret"), options.get("insecure"), options.get("log")
    if is_insecure and secret_file is not None:
        raise ConfigError("--insecure and --secret-file exclude each other: leave one out.")
    if options.get("seeds"):
        seeds, invited = resolve_seeds(options["seeds"])
        changes["GOSSIP_SEEDS"] = ",".join(seeds)
        if invited is not None:
            if is_insecure or secret_file is not None:
                raise ConfigError("An invite carries the swarm's secret: leave out --secret-file and --insecure.")
            secret_file = keep_secret(invited, options.get("state_dir") or folder_of_this_process())
    if not is_insecure and secret_file is None and (inherited := environment.get("GOSSIP_SECRET_FILE")):
        secret_file = Path(inherited)
    if is_insecure:
        changes |= {"GOSSIP_INSECURE": "1", "GOSSIP_SECRET_FILE": None}  # The option wins over an inherited secret.
    elif secret_file is not None:
        changes |= {"GOSSIP_SECRET_FILE": str(secret_file.resolve()), "GOSSIP_INSECURE": None}
    if (advertise := options.get("advertise")) and parse_address(advertise).port == 0:
        raise ConfigError(f"--advertise {advertise} cannot be dialled: name the port.")
    if log is not None and not log.resolve().parent.is_dir():
        raise ConfigError(f"The log's folder {log.resolve().parent} does not exist: make it first.")
    for name, option in OPTIONS.items():
        value = options.get(name)
        if value in (None, "") or name in ("seeds", "secret", "insecure", "quiet"):
            continue
        if isinstance(value, Path):
            value = value.resolve()  # Scripts may change their directory.
        changes[option.variable] = f"{value:g}" if isinstance(value, float) else str(value)
    changes["GOSSIP_PROGRESS"] = "off" if options.get("quiet") else environment.get("GOSSIP_PROGRESS") or "line"
    changed = {name: value for name, value in {**environment, **changes}.items() if value is not None}
    Settings.gather({}, changed)  # It raises the errors that Node would raise.
    return changes


def resolve_seeds(texts: Sequence[str]) -> tuple[list[str], bytes | None]:
    """Return seeds as Node reads them (``host:port``, ``host:port#id`` or ``@file``), and an invite's secret."""
    from node.transport.seeds import parse_seed, source_of  # Imported here, because it imports trio.

    seeds: list[str] = []
    secrets: set[bytes] = set()
    for text in texts:
        if is_invite(text):
            invite = parse_invite(text)
            secrets.add(invite.secret)
            seeds += [f"{address}#{invite.seed_id.hex()}" for address in invite.seeds]
        elif (file := source_of(text)) is not None:
            if "," in str(file):
                raise ConfigError(
                    f"--seed {text}: the path of a file of seeds can hold no comma; give it another name."
                )
            seeds.append(f"@{file}")
        else:
            (address,) = parse_seed(text).addresses
            if address.port == 0:
                raise ConfigError(f"--seed {text} cannot be dialled: name the port.")
            seeds.append(text.strip())
    if len(secrets) > 1:
        raise ConfigError("These invites belong to different swarms: give those of one swarm.")
    return seeds, next(iter(secrets), None)


def folder_of_this_process() -> Path:
    """Create a temporary folder that only its owner can read, and delete it when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gossip-"))  # Created with mode 0700.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def print_script_error(error: BaseException) -> None:
    """Print the script's traceback as if Python had run it, without frames of this command and of runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


# -- gossip status, secret, invite -------------------------------------------------------------------------------------
def status(address: str, *, secret_file: Path | None, as_json: bool, timeout_s: float, with_left: bool = False) -> None:
    """Print the status of a running node.

    Members that left are only counted, unless ``with_left``, since a node remembers them for a day. JSON has them all.
    """
    answer = ask(address, secret_file, timeout_s)
    if as_json:
        # A diverged loss travels as NaN, which JSON does not have.
        print(json.dumps(json.loads(json.dumps(answer), parse_constant=lambda _: None)))
    else:
        print_status(answer, plain_console(), address, with_left)


def print_status(answer: Mapping[str, Any], console: Console, address: str = "", with_left: bool = False) -> None:
    """Print the answer of a node as tables."""
    from rich.table import Table

    from node.observe.figures import HEADINGS

    console.print(f"node {answer['id']} at {answer['address'] or address}, swarm {answer['swarm']!r}", soft_wrap=True)
    metrics = Table(show_header=False)
    for name, value in answer["metrics"].items():
        if name not in HEADINGS:
            metrics.add_row(name, shown(value))
    members = Table("member", "address", "link", "state", "steps", "samples", "loss", "ready")
    hidden_count = 0  # Members that left, which the table does not show.
    for member in answer["members"]:
        if member["state"] == "left" and not with_left:
            hidden_count += 1
            continue
        cells = (member.get(key) for key in ("address", "link", "state", "steps", "samples", "loss", "ready"))
        members.add_row(member["id"][:8], *map(shown, cells))
    console.print(metrics)
    if members.row_count:
        console.print(members)
    if hidden_count:
        console.print(f"and {hidden_count:,} members that left within a day; --all names them")
    for name, heads in HEADINGS.items():
        rows = answer["metrics"].get(name)  # Another version may have none.
        if rows:
            shown_rows = Table(*heads)
            for member, code, count in rows:
                shown_rows.add_row(short_name(str(member)), str(code), shown(count))
            console.print(shown_rows)


def short_name(member: str) -> str:
    """Shorten ids to 8 digits, as everywhere in the output; shorten addresses to 15 characters."""
    return member[:8] if from_hex(member) else member[:15]


def fetch(
    seeds: Sequence[str], path: Path, *, secret_file: Path | None, timeout_s: float, every_s: float | None
) -> None:  # fmt: skip
    """Write the weights of a live swarm to a file, and their figures to stdout; with ``every_s`` until ^C.

    Once it has written the file, a read that fails is told, and tried again.
    """
    from node.reader import Reader  # Imported here, because it imports torch.

    reader, has_written = Reader(seeds, secret_file, timeout_s), False
    while True:
        began_at = time.monotonic()
        try:
            weights = reader.read()
            print(f"{weights.save(path)}: {weights}", flush=True)
            has_written = True
        except LocalError as error:
            if not has_written:
                raise
            print(f"gossip: {error}", file=sys.stderr)
        if every_s is None:
            return
        time.sleep(max(0.0, began_at + every_s - time.monotonic()))


def secret() -> None:
    """Print a new secret on stdout, and on stderr how to keep it."""
    print(make_secret())
    advice = "Keep it private: (umask 077; gossip secret > swarm.secret), and copy that file to every node."
    with contextlib.suppress(OSError):
        output_mode = os.fstat(1).st_mode
        if stat.S_ISREG(output_mode) and not output_mode & 0o077:
            advice = "Only you may read that file: keep it so, and copy it to every node."
    print(advice, file=sys.stderr)


def invite(address: str, *, secret_file: Path, timeout_s: float) -> None:
    """Print an invite through the node at an address, with the id that it proves to hold."""
    answer = ask(address, secret_file, timeout_s)
    print(InviteToken(read_secret(secret_file), (parse_address(address),), PeerId(bytes.fromhex(answer["id"]))).text)


def ask(address: str, secret_file: Path | None, timeout_s: float) -> dict[str, Any]:
    """Return the answer of the node at an address to a status query."""
    secret = None if secret_file is None else read_secret(secret_file)
    parsed = parse_address(address)
    from node.observe.status import query  # Imported here, because it imports trio.

    return query(parsed, secret, timeout_s)


def shown(value: Any) -> str:
    """Return a figure as text."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
    return str(value)
