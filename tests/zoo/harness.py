"""Run a program of the zoo alone and as a swarm of processes, and compare the results."""

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gossip import Node
from node.observe.notices import LEVELS
from tests.zoo.plain import Plain
from tests.zoo.registry import Program, programs

LIMIT_S = 300.0  # A busy machine needs a minute where an idle one takes ten seconds.
POLL_S = 0.05
SLOW_STEP_S = 0.1  # The pace of the others until a late node has come.
KILLED_AT, LATE_AT = 0.5, 0.4  # The share of the run's samples at which one node is killed, and a late one joins.
# Warnings that a busy machine causes in any program.
ORDINARY = {"alone", "together", "asleep", "stalled", "moving", "overloaded"}


@dataclass
class Result:
    """The results of one process."""

    metric: float = float("nan")
    seconds: float = 0.0
    settle_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)  # Tensors of the inventory by treatment.
    notices: list[tuple[str, str]] = field(default_factory=list)  # Warnings: kind and sentence.
    mixes: int = 0
    error: str = ""


@dataclass
class Outcome:
    """The results of a program as a swarm: each node's, and the difference between their tensors."""

    nodes: list[Result]
    difference: float  # The largest relative difference of an averaged tensor between the first node and another.
    tensor: str  # Its name.
    is_exact: bool  # True if all averaged tensors are equal to the bit.

    @property
    def metrics(self) -> list[float]:
        return [node.metric for node in self.nodes]

    @property
    def mean(self) -> float:
        return sum(self.metrics) / len(self.metrics)

    @property
    def notices(self) -> Counter[str]:
        return Counter(kind for node in self.nodes for kind, _ in node.notices)

    @property
    def accusations(self) -> list[str]:
        return [text for node in self.nodes for kind, text in node.notices if "misbehaves" in text]


class Place:
    """The folder by which the processes of one run meet, and the part of this process in the run.

    Args:
        folder: The folder.
        rank: The number of this process, from 0.
        size: The number of processes that begin together.
        fate: "" for a node from beginning to end, "killed" or "late".
        expects_late: The run has a late node, and this is another one.
    """

    def __init__(self, folder: str, rank: int, size: int, fate: str, expects_late: bool) -> None:
        self.folder, self.rank, self.size, self.fate = Path(folder), rank, size, fate
        self.nodes: list[Placed] = []
        self.expects_late = expects_late  # A late node has yet to come.
        self.result = Result()

    def write(self, name: str, text: str) -> None:
        file = self.folder / f"{name}.{self.rank}.part"
        file.write_text(text)
        file.rename(self.folder / name)

    def read(self, name: str) -> str:
        """Wait for the file that another process writes under this name, and return its text."""
        until = time.monotonic() + LIMIT_S
        while not (file := self.folder / name).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no process wrote {name}")
            time.sleep(POLL_S)
        return file.read_text()


class Placed(Node):
    """A Node that finds the others of its run by :data:`place`, and records its notices."""

    place: Place

    def __init__(self, model: Any, optimizer: Any = None, **choices: Any) -> None:
        place = self.place
        self.number = len(place.nodes)  # A program may have several.
        place.nodes.append(self)
        address = f"address-{self.number}"
        seeds = [] if place.rank == 0 else [place.read(address)]
        members = 1 if place.fate == "late" else place.size
        super().__init__(
            model, optimizer, seeds=seeds, listen="127.0.0.1:0", wait_for=members, wait_s=LIMIT_S, **choices
        )
        self.on("*", self.note)
        if place.rank == 0:
            self.on("listening", lambda event: place.write(address, self.address))
        self.tensors = tensors_of(model)

    def note(self, event: Any) -> None:
        if LEVELS.get(event.kind, 0) >= 30 and event.kind not in ORDINARY:
            self.place.result.notices.append((event.kind, str(event)))

    def step(self, loss: Any = None, samples: int | None = None, lr: float | None = None) -> None:
        super().step(loss, samples, lr)
        place = self.place
        if self.number or not (place.fate == "killed" or place.expects_late):
            return
        progress = self.progress()
        if place.fate == "killed" and progress > KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if place.expects_late and progress > LATE_AT:
            place.write("late", "")
            place.expects_late = not (place.folder / "arrived").exists()
            time.sleep(SLOW_STEP_S)  # On a busy machine starting a process may take longer than a short program.

    def __enter__(self) -> Self:
        entered = super().__enter__()
        if self.place.fate == "late":
            self.place.write("arrived", "")
        return entered

    def settle(self, seconds: float = 5.0, wait_s: float = 0.0) -> float | None:
        began = time.monotonic()
        distance = super().settle(seconds, wait_s)
        self.place.result.settle_s = max(self.place.result.settle_s, time.monotonic() - began)
        return distance

    def close(self) -> None:
        self.look()
        super().close()

    def __exit__(self, *error: Any) -> None:
        self.look()
        super().__exit__(*error)

    def look(self) -> None:
        """Note the inventory and the mixes of this node before it leaves."""
        result, items = self.place.result, self.inventory()
        for item in items:
            result.counts[item.treatment] = result.counts.get(item.treatment, 0) + 1
        result.mixes += self.metrics().exchanges_done or 0
        self.averaged = [item.name for item in items if item.treatment == "average"]


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the live tensors of a model by name."""
    model = getattr(model, "_orig_mod", model)
    return dict([*model.named_parameters(), *model.named_buffers()])


def play(
    program: Program,
    nodes: int = 0,
    seed: int = 0,
    kill: bool = False,
    late: bool = False,
    workers: int = 1,
    share: int = 1,
) -> Outcome:
    """Run a program alone (0 nodes) or as a swarm.

    Args:
        program: The program.
        nodes: The nodes that begin together.
        seed: The seed of the first process; each has another.
        workers: Alone, the batches that make one step, as in synchronous training by so many workers.
        share: Alone, the divisor of the epochs.
        kill: Kill one of the nodes halfway.
        late: Add one more node before that.

    Raises:
        AssertionError: A process failed, with its traceback.
    """
    fates = [""] * max(nodes, 1)
    if kill:
        fates[1] = "killed"
    if late:
        fates.append("late")
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        with started(program, folder, fates, nodes, seed, workers, share) as processes:
            for process in processes:
                process.join(LIMIT_S)
        ranks = [rank for rank, fate in enumerate(fates) if fate != "killed"]
        results = [read_result(Path(folder), rank) for rank in ranks]
        states = [torch.load(Path(folder, f"state.{rank}"), weights_only=True) for rank in ranks] if nodes else []
    return Outcome(results, *largest_difference(states))


@contextmanager
def started(
    program: Program, folder: str, fates: Sequence[str], nodes: int, seed: int, workers: int, share: int
) -> Iterator[list[Any]]:
    """Start the processes from a fork server that has imported torch, and end the remaining ones on exit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "sklearn.datasets"])
    processes = [
        context.Process(
            target=child,
            args=(program.name, folder, rank, nodes, fate, "late" in fates, seed, workers, share),
            daemon=True,
        )
        for rank, fate in enumerate(fates)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def child(
    name: str, folder: str, rank: int, nodes: int, fate: str, late: bool, seed: int, workers: int, share: int
) -> None:  # fmt: skip
    """Run the program in this process, and leave its result in the folder."""
    torch.set_num_threads(1)
    logging.getLogger("gossip").addHandler(logging.NullHandler())  # Notices are read as events.
    program, place = programs()[name], Place(folder, rank, nodes, fate, late and fate != "late")
    Placed.place, Plain.workers, Plain.share = place, workers, share
    try:
        if fate == "late":
            place.read("late")
        began = time.monotonic()
        place.result.metric = float(program.run(Placed if nodes else Plain, 1000 * seed + rank))
        place.result.seconds = time.monotonic() - began
        averaged = {
            f"{node.number}:{key}": node.tensors[key].detach() for node in place.nodes for key in node.averaged
            if key in node.tensors
        }  # fmt: skip
        torch.save(averaged, place.folder / f"state.{rank}")
    except BaseException:
        place.result.error = traceback.format_exc()
    place.write(f"result.{rank}", json.dumps(vars(place.result)))


def read_result(folder: Path, rank: int) -> Result:
    file = folder / f"result.{rank}"
    assert file.exists(), f"process {rank} ended without a result"
    result = Result(**json.loads(file.read_text()))
    assert not result.error, f"process {rank} failed:\n{result.error}"
    return result


def largest_difference(states: Sequence[dict[str, Tensor]]) -> tuple[float, str, bool]:
    """Return the largest relative difference from the first state, its tensor, and whether all are equal to the bit."""
    worst, name, is_exact = 0.0, "", True
    for state in states[1:]:
        for key, ours in states[0].items():
            is_exact = is_exact and torch.equal(ours, state[key])
            apart = float((ours.double() - state[key].double()).norm() / (ours.double().norm() + 1e-12))
            if not apart <= worst:
                worst, name = apart, key
    return worst, name, is_exact
