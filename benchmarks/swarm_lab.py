"""Swarms of real processes for fault injection (stop, kill, partition), and the diaries that they write."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from forked import Forked

ROOT = Path(__file__).parents[1]
POLL_S = 0.05
START_S = 60.0  # limit for joining; importing torch in eight processes on two cores takes seconds
Row = dict[str, Any]


class Patient:
    """One node's process and its diary, a file of JSON rows: events, and figures at intervals."""

    def __init__(self, name: str, process: subprocess.Popen[bytes] | Forked, diary: Path, errors: Path) -> None:
        self.name, self.process, self.diary, self.errors = name, process, diary, errors
        self.rows: list[Row] = []
        self.offset = 0

    def read(self) -> list[Row]:
        """Return all rows so far."""
        with contextlib.suppress(FileNotFoundError), self.diary.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offset += len(whole)
            self.rows += [json.loads(line) for line in whole.splitlines()]
        return self.rows

    @property
    def looks(self) -> list[Row]:
        """Return the rows with figures, without events."""
        return [row for row in self.read() if "event" not in row]

    def event(self, kind: str) -> Row | None:
        return next((row for row in self.read() if row.get("event") == kind), None)

    @property
    def joined(self) -> Row:
        joined = self.event("joined")
        assert joined is not None, f"{self.name} has not joined"
        return joined

    @property
    def id(self) -> str:
        return str(self.joined["id"])

    @property
    def address(self) -> str:
        return str(self.joined["address"])

    @property
    def now(self) -> Row:
        """Return the latest figures; empty before the first ones."""
        looks = self.looks
        return looks[-1] if looks else {}

    def first(self, after: float, condition: Callable[[Row], bool]) -> float | None:
        """Return the seconds from ``after`` to the first row for which ``condition`` holds, or None."""
        return next((row["t"] - after for row in self.looks if row["t"] > after and condition(row)), None)

    def pauses(self, after: float = 0.0, before: float = float("inf")) -> tuple[float, float]:
        """Return the longest step(), and the longest time between two minus the usual time, in seconds."""
        rows = [row for row in self.looks if after < row["t"] < before]
        if len(rows) < 2:
            return 0.0, 0.0
        first, last = rows[0], rows[-1]
        usual = (last["t"] - first["t"]) / max(1, last["steps"] - first["steps"])
        return max(row["inside"] for row in rows), max(row["gap"] for row in rows) - usual

    def signal(self, number: signal.Signals) -> float:
        """Send a signal to the process, and return the time."""
        self.process.send_signal(number)
        return time.monotonic()


def between(member: Patient, since: float, until: float) -> list[Row]:
    """Return the rows with figures of a time."""
    return [row for row in member.looks if since <= row["t"] <= until]


def taken(members: Iterable[Patient], since: float, until: float) -> int:
    """Return the steps that these processes took between two times, according to their rows."""
    rows = [between(member, since, until) for member in members]
    return sum(of_one[-1]["steps"] - of_one[0]["steps"] for of_one in rows if of_one)


class Lab:
    """A set of node processes: ``with Lab() as lab``. All of them are killed at the end.

    ``program`` is a file of this folder, or a module: its ``main`` runs in processes forked from this one, which start
    in a tenth of a second (:mod:`forked`). ``defaults`` are options of the program for all nodes.
    """

    def __init__(self, program: str | ModuleType = "ledger_node.py", **defaults: Any) -> None:
        self.program, self.defaults = program, defaults
        self.folder = Path(tempfile.mkdtemp(prefix="gossip-lab-"))
        self.patients: list[Patient] = []
        self.numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patient in self.patients:
            if patient.process.poll() is None:
                patient.process.kill()
        for patient in self.patients:
            patient.process.wait()
        if error is not None:
            for patient in self.patients:
                text = patient.errors.read_text(encoding="utf-8", errors="replace")[-1500:]
                print(
                    f"--- {patient.name} ended with {patient.process.returncode}: {patient.now}\n{text}",
                    file=sys.stderr,
                )
        shutil.rmtree(self.folder, ignore_errors=True)

    def encrypt(self) -> str:
        """Give all nodes that start from now on one secret, and return its file."""
        from node.identity.keys import new_secret

        path = self.folder / "secret"
        path.write_text(new_secret())
        path.chmod(0o600)
        self.defaults["secret"] = str(path)
        return str(path)

    def start(
        self, seeds: Sequence[Patient | str] = (), namespace: str | None = None, name: str = "", **options: Any
    ) -> Patient:
        """Start a node with these options of the program, without waiting for it; an option that is True is a flag."""
        name = name or f"n{next(self.numbers)}"
        diary, errors = self.folder / f"{name}.jsonl", self.folder / f"{name}.err"
        arguments = ["--diary", str(diary)]
        for seed in seeds:
            arguments += ["--seed", seed if isinstance(seed, str) else seed.address]
        for option, value in {**self.defaults, **options}.items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"--{option.replace('_', '-')}", *([] if value is True else [text])]
        begin = self.spawn if isinstance(self.program, str) else self.fork
        patient = Patient(name, begin(arguments, errors, namespace), diary, errors)
        self.patients.append(patient)
        return patient

    def spawn(self, arguments: list[str], errors: Path, namespace: str | None) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "benchmarks" / str(self.program)), *arguments]
        if namespace is not None:
            command = ["ip", "netns", "exec", namespace, *command]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GOSSIP_")}
        environment |= {"OMP_NUM_THREADS": "1", "GOSSIP_PROGRESS": "line", "PYTHONPATH": str(ROOT)}
        with errors.open("wb") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=self.folder)

    def fork(self, arguments: list[str], errors: Path, namespace: str | None) -> Forked:
        from forked import Forked

        assert isinstance(self.program, ModuleType)
        main = self.program.main

        def work() -> None:
            os.environ["GOSSIP_PROGRESS"] = "line"
            main(arguments)

        return Forked(work, errors, namespace)

    def swarm(self, count: int, first: Mapping[str, Any] | None = None, **options: Any) -> list[Patient]:
        """Start ``count`` nodes with the first as seed, and return them once each sees all and mixes.

        ``first`` are further options of the first one.
        """
        seed = self.start(**options, **(first or {}))
        self.joined([seed])
        members = [seed, *(self.start(seeds=[seed], **options) for _ in range(count - 1))]
        self.joined(members)
        self.until(
            lambda: all(m.now.get("alive") == count and m.now["done"] > 2 for m in members), START_S, "a whole swarm"
        )
        return members

    def joined(self, members: list[Patient]) -> None:
        self.until(lambda: all(member.event("joined") for member in members), START_S, "nodes to join")

    def check(self, name: str = "nothing") -> None:
        """Raise RuntimeError if a process has failed that was not killed."""
        ended = [patient.name for patient in self.patients if patient.process.poll() not in (None, 0, -signal.SIGKILL)]
        if ended:
            raise RuntimeError(f"{', '.join(ended)} ended while waiting for {name}.")

    def until(self, condition: Callable[[], Any], seconds: float, name: str) -> float:
        """Wait until ``condition`` holds, and return the time. Raises TimeoutError after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            self.check(name)
            if time.monotonic() > end:
                raise TimeoutError(f"Waited {seconds:g} s for {name} in vain.")
            time.sleep(POLL_S)
        return time.monotonic()

    def end(self, members: list[Patient], seconds: float = 60.0) -> None:
        """Send SIGTERM, and wait until all processes have ended; unloading torch takes a while after leaving."""
        for member in members:
            member.signal(signal.SIGTERM)
        for member in members:
            member.process.wait(seconds)

    def notices(self, member: Patient, word: str) -> int:
        """Return the number of lines in a node's log that contain a word."""
        return sum(word in line for line in member.errors.read_text(encoding="utf-8", errors="replace").splitlines())


class Cut:
    """Two network namespaces, connected by two switches and a cable between them.

    Pulling the cable (:meth:`cut`) is silent, as between two data centres: both hosts keep their link and route, and
    packets vanish. The switches are in a third namespace, so that nothing of this is visible outside.
    """

    def __init__(self) -> None:
        mark = f"gl{os.getpid() % 100_000}"
        self.left, self.right, self.middle = (f"{mark}{side}" for side in "lrm")
        self.addresses = {self.left: "10.77.0.1", self.right: "10.77.0.2"}

    def __enter__(self) -> Self:
        try:
            for name in (self.left, self.right, self.middle):
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            for host, switch in ((self.left, "sl"), (self.right, "sr")):
                run("ip", "-n", self.middle, "link", "add", switch, "type", "bridge")
                run("ip", "-n", self.middle, "link", "set", switch, "up")
                run("ip", "-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", f"{switch}h", "netns",
                    self.middle)  # fmt: skip
                run("ip", "-n", self.middle, "link", "set", f"{switch}h", "master", switch, "up")
                run("ip", "-n", host, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
                run("ip", "-n", host, "link", "set", "eth0", "up")
            run("ip", "-n", self.middle, "link", "add", "cl", "type", "veth", "peer", "name", "cr")
            run("ip", "-n", self.middle, "link", "set", "cl", "master", "sl", "up")
            run("ip", "-n", self.middle, "link", "set", "cr", "master", "sr", "up")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def cut(self) -> float:
        run("ip", "-n", self.middle, "link", "set", "cl", "down")
        return time.monotonic()

    def heal(self) -> float:
        run("ip", "-n", self.middle, "link", "set", "cl", "up")
        return time.monotonic()

    def remove(self) -> None:
        for name in (self.left, self.right, self.middle):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def namespaces_missing() -> str:
    """Return why network namespaces cannot be used here, or "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (Debian: iproute2)"
    try:
        with Cut():
            return ""
    except RuntimeError as error:
        return f"network namespaces do not work here ({error})"
