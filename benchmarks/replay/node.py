"""One node of a replay: a process that trains as the simulated peer of its number does, and keeps a diary.

Its model is that peer's row of :class:`sim.learning.learners.Learners`: the same initial weights, samples and batches,
and the same arithmetic. Each step sleeps until the scenario's duration has passed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.links import enter
from benchmarks.replay.plan import Plan
from benchmarks.replay.seen import Watch
from gossip.effects import Effect
from node import Node
from node.network import service
from node.network.runtime import Runtime
from node.transport import tcp
from sim.learning.learners import Learners
from sim.threads import one_thread
from sim.world.step_times import StepTimes

PR_SET_PDEATHSIG = 1
OVERTIME_S = 60.0  # Limit beyond the run's end, for a process that is never told to stop.
MOST_BYTES = 1 << 30  # Of diaries, for all models of all looks.


@dataclass(frozen=True, slots=True)
class Errand:
    """A process's task: one life of one node."""

    plan: Plan
    node: int
    space: str  # The file of its network namespace.
    folder: Path  # The folder of its diary.
    state: Path  # The state directory with its identity, the same in each of its lives.
    secret: Path | None
    listen: str


@dataclass(frozen=True, slots=True)
class Go:
    """The beginning of a life; times are of CLOCK_MONOTONIC, which all processes of a machine share."""

    zero: float  # The run's beginning.
    seeds: tuple[str, ...]
    taken: int  # Steps in earlier lives, after which its batches continue.


class Diary:
    """``diary.jsonl`` and ``vectors.f32``, with a line for each vector: complete up to the moment of a kill."""

    def __init__(self, folder: Path, zero: float) -> None:
        self.zero = zero
        self.file = (folder / "diary.jsonl").open("w", buffering=1, encoding="utf-8")
        self.vectors = (folder / "vectors.f32").open("wb", buffering=0)

    def note(self, kind: str, **what: Any) -> None:
        self.file.write(json.dumps({"kind": kind, "at_s": round(time.monotonic() - self.zero, 6)} | what) + "\n")


class Watched(Runtime):
    """A node's driver with an observer."""

    onlooker: Watch
    diary: Diary

    def perform(self, effects: Iterable[Effect]) -> None:
        watch, diary, effects = self.onlooker, self.diary, list(effects)
        for effect in effects:
            watch.see(effect, time.monotonic())
        for _, took_s in watch.mixes:
            diary.note("mix", seconds=took_s)
        for took_s in watch.streams:
            diary.note("stream", seconds=took_s)
        for change in watch.changes:
            diary.note("member", subject=change.subject.hex(), state=change.state)
        watch.mixes.clear()
        watch.streams.clear()
        watch.changes.clear()
        super().perform(effects)


def live(errand: Errand, parent: Connection) -> None:
    """Run the process: prepare all that takes long, report that, wait for the start, and train."""
    os.setsid()  # A scheduling group of its own (autogroup).
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(errand.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        space = os.open(errand.space, os.O_RDONLY)
        enter(space)
        os.close(space)
        for name in [name for name in os.environ if name.startswith("GOSSIP_")]:
            del os.environ[name]
        os.environ["GOSSIP_PROGRESS"] = "off"
        if errand.secret is None:
            os.environ["GOSSIP_INSECURE"] = "1"  # The links are private.
        # A node selects bbr, which root may always do. The scenario's choice is a property of the route instead.
        tcp.choose_bbr = lambda sock: None
        plan = errand.plan
        learners = Learners(plan.scenario.task, plan.names, plan.scenario.seed)
        parent.send("ready")
        go: Go = parent.recv()
        with one_thread(), np.errstate(all="ignore"):
            train(errand, go, learners)
    except EOFError:
        pass  # The parent is gone.
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


def train(errand: Errand, go: Go, learners: Learners) -> None:
    plan, row = errand.plan, errand.node
    scenario = plan.scenario
    learners.steps_taken[row] = go.taken
    vector = learners.matrix[row]
    diary = Diary(errand.folder, go.zero)
    Watched.onlooker, Watched.diary = Watch(row), diary
    vars(service)["Runtime"] = Watched  # In this process, which has one node.
    durations = StepTimes(scenario.compute, scenario.seed, scenario.fleet).durations(plan.names[row])
    rows, counts = np.array([row]), np.array([1])
    began = time.monotonic()
    config = scenario.config
    if not config.measures_momentum:  # Set explicitly, or a Node would measure that of untrained vectors.
        config = replace(config, outer_momentum=config.outer[0], outer_rate=config.outer[1])
    peer = Node(
        {"model": vector}, config=config, seeds=go.seeds, listen=errand.listen, secret=errand.secret,
        state_dir=errand.state,
    )  # fmt: skip
    ends = go.zero + plan.duration_s
    every_s = max(plan.every_s, plan.duration_s * vector.nbytes * len(plan.names) / MOST_BYTES)
    with peer:
        due = time.monotonic()
        diary.note("joined", id=peer.id, seconds=due - began)
        look_at, late_s = (int((due - go.zero) / every_s) + 1) * every_s, 0.0
        while due < ends + OVERTIME_S:
            due += float(durations(1)[0])
            now = time.monotonic()
            if now > due:  # Lost time is not made up, as on any machine.
                late_s += now - due
                due = now
            else:
                time.sleep(due - now)
            learners.train(rows, counts)
            peer.step(samples=learners.samples_per_step)
            if time.monotonic() - go.zero >= look_at:
                metrics = peer.metrics()
                diary.vectors.write(vector.tobytes())
                diary.note(
                    "look", look_at=look_at, steps=metrics.steps, failed=metrics.exchanges_failed,
                    sent=metrics.bytes_sent, late_s=late_s,
                )  # fmt: skip
                look_at += every_s
