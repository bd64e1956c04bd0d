"""`gossip up`: a node on each of several hosts, started, shown and ended over ssh."""

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossip.errors import ConfigError, LocalError
from node.child import Child
from node.cli.local import ending_on_signals, folder_of
from node.identity.keys import new_secret, read_secret
from node.local import POLL_PERIOD_S
from node.options import flags_of
from node.transport.tcp import is_loopback

PORT = 7700  # The default port of a host's first node; further ones take the next.
END_S = 15.0  # Nodes that are told to end take up to 7 s with their last mixes.
# The shell on a host: it reads the secret, runs the node, and ends it when this side closes the connection.
REMOTE = """\
read -r secret && cd "$1" || exit 1
shift
umask 077
GOSSIP_SECRET_FILE=$(mktemp) || exit 1
export GOSSIP_SECRET_FILE
printf '%s\\n' "$secret" > "$GOSSIP_SECRET_FILE"
unset secret
exec 3<&0
"$@" 3<&- < /dev/null &
node=$!
(cat <&3; kill -TERM $node) > /dev/null 2>&1 &
wait $node
code=$?
kill $! 2> /dev/null
rm -f "$GOSSIP_SECRET_FILE"
exit $code
"""


class HostNode(NamedTuple):
    """A node to start, on one of the hosts."""

    name: str  # Its host as the file has it, with a number for its second node and further ones.
    destination: str  # The destination for ssh: [USER@]HOST.
    address: str  # HOST:PORT at which the others dial it.
    folder: str  # Where it runs.
    python: str  # The command of a Python that has gossip-trainer.

    def command(self, seeds: Sequence[str], what: Sequence[str], options: Mapping[str, Any]) -> str:
        """Return the command of its shell that runs a node: ``what`` is the script with its arguments."""
        every = "[::]" if self.address.startswith("[") else "0.0.0.0"
        flags = flags_of(seeds=seeds, listen=f"{every}:{self.address.rpartition(':')[2]}", **options)
        run = [*shlex.split(self.python), "-m", "gossip", "run", *flags, *what]
        return shlex.join(["sh", "-c", REMOTE, "sh", self.folder, *run])


def run_up(
    hosts: Path, script: Path, args: Sequence[str], options: Mapping[str, Any], *, module: bool, ssh: str,
    secret_file: Path | None, log_dir: Path | None,
) -> int:  # fmt: skip
    """Run a script as a node on each host of a file, all seeds of each other, until all have ended.

    Every line that a node writes is printed after its host's name, and kept in ``log_dir``. When this command ends,
    by ^C for example, or loses its connections, the nodes end in order.

    Args:
        hosts: A file with a host a line, as :func:`read_places` reads it.
        script: The script, or with ``module`` the name of a module, on the hosts.
        args: Its arguments.
        options: The options of :mod:`node.options` that `gossip local` takes, for all nodes.
        module: ``script`` is run as ``python -m`` does it.
        ssh: The command that runs a command on a host.
        secret_file: The swarm's secret; None for a new one.
        log_dir: The folder for the outputs, HOST.log; None keeps none.

    Returns:
        The highest exit code of the nodes; 255 is ssh's own.

    Raises:
        GossipError: A setting cannot work, or ssh is missing.
    """
    try:
        ssh_words = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh {ssh!r} is no command: {error}.") from None
    places = read_places(hosts, ssh_words)
    if secret_file is not None:
        read_secret(secret_file)  # It raises the errors that every node would raise.
    secret = new_secret() if secret_file is None else secret_file.read_text("ascii").strip()
    given = {"wait_for": len(places)} | {name: value for name, value in options.items() if value is not None}
    what = (["-m"] if module else []) + [str(script), *args]
    nodes: list[tuple[HostNode, Child]] = []
    with ending_on_signals(), folder_of(log_dir) as logs:
        try:
            for number, place in enumerate(places):
                seeds = [other.address for other in places if other is not place]
                command = [*ssh_words, place.destination, place.command(seeds, what, given)]
                nodes.append((place, started(number, command, secret, logs / f"{place.name}.log")))
            while show(nodes):
                time.sleep(POLL_PERIOD_S)
        except (KeyboardInterrupt, BrokenPipeError):  # The reader of the lines may have gone, as `head`.
            print("gossip: The nodes are told to end.", file=sys.stderr)
        finally:
            end(nodes)
            with contextlib.suppress(BrokenPipeError):
                show(nodes)
    for place, child in nodes:
        if child.code:
            print(f"gossip: {place.name} ended with code {child.code}.", file=sys.stderr)
    return max(child.code or 0 for _, child in nodes)


def read_places(hosts: Path, ssh: Sequence[str]) -> list[HostNode]:
    """Return the places of a file of hosts, which may name a host more than once.

    A line has a host as ssh takes it, perhaps ``folder=DIR`` (else the path of the current folder), ``python=COMMAND``
    (else python3) and ``port=N`` (else 7700, and the next ones for further nodes of a host).

    Raises:
        ConfigError: The file cannot work.
    """
    try:
        lines = hosts.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of hosts {hosts} cannot be read ({error}).") from None
    places, taken, names = list[HostNode](), set[str](), set[str]()
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            settings = dict(word.split("=", 1) for word in words[1:])
            port = int(settings.pop("port", PORT))
            given = {"folder": str(Path.cwd()), "python": "python3"} | settings
            shlex.split(given["python"])
            base = words[0].strip("/").rpartition("/")[2]
            is_wrong = len(given) > 2 or not 0 < port < 65_000 or not base or words[0].startswith("-")
        except ValueError:
            is_wrong = True
        if is_wrong:
            raise ConfigError(f"{hosts}: {line!r} is no [USER@]HOST [folder=DIR] [python=COMMAND] [port=N].")
        host = hostname_of(words[0], ssh)
        host = f"[{host}]" if ":" in host else host
        while f"{host}:{port}" in taken:
            port += 1
        taken.add(f"{host}:{port}")
        name = next(
            one for one in (base, *(f"{base}-{count}" for count in range(2, len(names) + 3))) if one not in names
        )
        names.add(name)
        places.append(HostNode(name, words[0], f"{host}:{port}", **given))
    if not places:
        raise ConfigError(f"{hosts} names no host: write one a line, as ssh takes it.")
    known = {place.address.rpartition(":")[0].strip("[]") for place in places}
    if len(known) > 1 and (lonely := next(filter(is_loopback, known), None)):
        raise ConfigError(f"{hosts}: {lonely} is another machine on each host: name it as others dial it.")
    return places


def hostname_of(destination: str, ssh: Sequence[str]) -> str:
    """Return the host that ssh would dial, which its configuration may set; without its answer, what the file has."""
    try:
        asked = subprocess.run([*ssh, "-G", destination], capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return destination.rpartition("@")[2]
    named = (line.partition(" ")[2] for line in asked.stdout.splitlines() if line.startswith("hostname "))
    return next(named, destination.rpartition("@")[2])


def started(number: int, command: Sequence[str], secret: str, log: Path) -> Child:
    """Start ssh in a session of its own, so that ^C here reaches nodes by the end of their input alone.

    Raises:
        LocalError: ssh cannot be run, or the log, which gets its output, cannot be written.
    """
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
    except OSError as error:
        if error.filename == str(log):
            raise LocalError(f"{log} cannot be written ({error.strerror}).") from None
        raise LocalError(f"{command[0]} cannot be run ({error.strerror}): install it, or name another --ssh.") from None
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has ended, and its output says why.
        process.stdin.write(f"{secret}\n".encode())
        process.stdin.flush()
    return Child(number, process, log.with_suffix(".jsonl"), log, log)


def show(nodes: Sequence[tuple[HostNode, Child]]) -> bool:
    """Print the new lines of all nodes after their hosts' names. Return True if a node was running before."""
    is_running = any(child.code is None for _, child in nodes)
    for place, child in nodes:
        for line in child.new_lines():
            print(f"{place.name}: {line.rstrip()}", flush=True)
    return is_running


def end(nodes: Sequence[tuple[HostNode, Child]]) -> None:
    """Close the input of all nodes, upon which they end in order, and what is left of ssh after ``END_S``."""
    for _, child in nodes:
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()
    end_at = time.monotonic() + END_S  # For all together.
    for _, child in nodes:
        try:
            child.process.wait(max(0.0, end_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
