"""One play of a scenario by real processes on emulated links."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.links import EmulatedLinks
from benchmarks.replay.node import Errand, Go, live
from benchmarks.replay.plan import PORT, Life, Plan
from benchmarks.replay.seen import Change, Seen
from gossip.errors import LocalError
from gossip.ids import PeerId
from node.identity.keys import new_secret
from sim.learning.learners import Learners
from sim.seeds import derive

READY_S = 180.0  # Limit for all processes to load torch and their data, on a busy machine.
LEAVE_S = 10.0  # After SIGTERM.
SEEDS = 3  # The seeds that a newcomer gets, as in sim.simulation.
LEAD_S = 0.2  # From "all are ready" to the beginning.
READ_BEFORE = ["benchmarks.replay.node", "benchmarks.replay.predict", "sim.learning.datasets"]


def forks() -> ForkServerContext:
    """Return the context of processes forked from one that has loaded torch already, so that its pages are shared."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(READ_BEFORE)
    return context


@dataclass(slots=True)
class Body:
    """The process of one life."""

    life: Life
    process: Any
    parent: Connection
    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        text = (self.folder / "output").read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


def play(plan: Plan, say: Callable[[str], None]) -> Seen:
    """Play a scenario. :func:`replay.links.missing` must have returned nothing.

    All processes are gone afterwards, whatever happens. ``say`` gets the progress. Raises :class:`LocalError` if a
    process ends unexpectedly.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gossip-replay-") as name,
        EmulatedLinks(len(plan.names), plan.scenario.seed) as links,
    ):
        playing = Playing(plan, links, Path(name), say)
        playing.run()
        return playing.seen()


class Playing:
    """A play in progress: the process of each life, and the links as the plan has them at present."""

    def __init__(self, plan: Plan, links: EmulatedLinks, folder: Path, say: Callable[[str], None]) -> None:
        self.plan, self.links, self.folder, self.say = plan, links, folder, say
        self.bodies: list[Body] = []  # One for each life of the plan.
        self.now_up: dict[int, Body] = {}  # By node.
        self.dark: set[int] = set()  # Nodes whose machines lost power.
        self.split: set[tuple[int, int]] = set()  # The pairs of nodes that a cut separates.
        self.order: list[int] = []  # Nodes in the order of their first start.
        self.zero = 0.0  # The time of the beginning, by the monotonic clock.

    def run(self) -> None:
        """Run from the first process to the last; none is left, whatever happens."""
        try:
            self.prepare()
            self.go()
        finally:
            self.end()

    # -- before ------------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Set up the scenario's links, and start a process for each life before the clock starts."""
        plan, links = self.plan, self.links
        network, spec = plan.network(), plan.scenario.network
        assert spec.congestion is not None, "a plan refuses it"
        for node in range(len(plan.names)):
            links.rate(node, network.up_bytes_s(node) * 8e-6, network.down_bytes_s(node) * 8e-6)
            links.congestion(node, spec.congestion)
            for other in range(node):
                links.latency(node, other, network.latency(node, other))
                links.loss(node, other, network.loss_of(node, other))
        secret = None
        if spec.tls:
            secret = self.folder / "swarm.secret"
            secret.touch(0o600)
            secret.write_text(new_secret() + "\n", encoding="utf-8")
        context = forks()
        for number, life in enumerate(plan.lives):
            folder = self.folder / f"life-{number}"
            folder.mkdir()
            errand = Errand(
                plan, life.node, links.files[life.node], folder,
                self.folder / f"node-{life.node}", secret, f"{links.address(life.node)}:{PORT}",
            )  # fmt: skip
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(errand, theirs), daemon=True)
            process.start()
            theirs.close()
            self.bodies.append(Body(life, process, ours, folder))
        until = time.monotonic() + READY_S
        for body in self.bodies:
            try:
                if not body.parent.poll(max(0.0, until - time.monotonic())):
                    raise LocalError(
                        f"A node of the replay took more than {READY_S:g} s to start: try a quiet machine."
                    )
                body.parent.recv()
            except (EOFError, OSError):
                raise LocalError(f"Node {body.life.node} of the replay could not start: {body.sentence}") from None

    # -- the run -----------------------------------------------------------------------------------------------------
    def go(self) -> None:
        plan = self.plan
        events: list[tuple[float, int, Callable[[], None]]] = []
        for number, body in enumerate(self.bodies):
            events.append((body.life.from_s, number, partial(self.come, body)))
            if body.life.until_s < plan.duration_s:
                events.append((body.life.until_s, number, partial(self.leave, body)))
        for number, cut in enumerate(plan.cuts):
            events.append((cut.at_s, number, partial(self.cut, set(cut.pairs()))))
            if cut.until_s < plan.duration_s:
                events.append((cut.until_s, number, partial(self.cut, set[tuple[int, int]]())))
        events.sort(key=lambda event: event[:2])
        self.zero = time.monotonic() + LEAD_S
        self.before = self.links.stats()
        for at_s, _, happen in events:
            self.wait_until(at_s)
            happen()
        self.wait_until(plan.duration_s)
        self.after = self.links.stats()

    def wait_until(self, at_s: float) -> None:
        while (left_s := self.zero + at_s - time.monotonic()) > 0:
            self.say(f"{max(0.0, time.monotonic() - self.zero):.0f} of {self.plan.duration_s:g} s")
            for node, body in self.now_up.items():
                if not body.process.is_alive():
                    raise LocalError(f"Node {node} of the replay ended by itself: {body.sentence}")
            time.sleep(min(left_s, 0.5))

    def come(self, body: Body) -> None:
        node, life = body.life.node, body.life
        if node in self.dark:
            self.dark.remove(node)
            self.connect()
        present = [other for other in self.order if other in self.now_up]
        rng = random.Random(derive(self.plan.scenario.seed, self.plan.names[node], f"seeds at {life.from_s}"))
        drawn = rng.sample(present, min(SEEDS, len(present)))
        seeds = tuple(f"{self.links.address(seed)}:{PORT}" for seed in drawn)
        earlier = [row for other in self.bodies if other.life.node == node for row in looks(read(other))]
        taken = max((row["steps"] for row in earlier), default=0)
        body.parent.send(Go(self.zero, seeds, taken))
        self.now_up[node] = body
        if node not in self.order:
            self.order.append(node)

    def leave(self, body: Body) -> None:
        del self.now_up[body.life.node]
        if body.life.farewell:
            os.kill(body.process.pid, signal.SIGTERM)
            return
        if body.life.silent:
            self.dark.add(body.life.node)
            self.connect()
        body.process.kill()

    def cut(self, pairs: set[tuple[int, int]]) -> None:
        self.split = pairs
        self.connect()

    def connect(self) -> None:
        """Apply the cuts of the network, and the ones around machines without power."""
        self.links.heal()
        for one, other in self.split:
            self.links.cut(one, other)
        for node in self.dark:
            self.links.cut(node, -1)

    def end(self) -> None:
        """Kill the processes that are left, and close their connections."""
        for body in self.bodies:
            body.process.kill()
        for body in self.bodies:
            body.process.join(LEAVE_S)
            body.parent.close()

    # -- after -------------------------------------------------------------------------------------------------------
    def seen(self) -> Seen:
        plan, seen = self.plan, Seen(self.plan)
        duration_s, learners = plan.duration_s, Learners(plan.scenario.task, plan.names, plan.scenario.seed)
        models_at: dict[float, list[np.ndarray[Any, Any]]] = {}  # By time of the look.
        for body in self.bodies:
            rows = [row for row in read(body) if row["at_s"] <= duration_s]
            joined = [row for row in rows if row["kind"] == "joined"]
            if joined:
                seen.ids[PeerId(bytes.fromhex(joined[0]["id"]))] = body.life.node
                if body.life.from_s > 0:
                    seen.joins.append(joined[0]["at_s"] - body.life.from_s)
            seen.mixes += [(row["at_s"], row["seconds"]) for row in rows if row["kind"] == "mix"]
            seen.streams += [row["seconds"] for row in rows if row["kind"] == "stream"]
            seen.changes += [
                Change(row["at_s"], body.life.node, PeerId(bytes.fromhex(row["subject"])), row["state"])
                for row in rows if row["kind"] == "member"
            ]  # fmt: skip
            look_rows = looks(rows)
            if not look_rows:
                continue
            last = look_rows[-1]
            seen.failed += last["failed"]
            seen.sent_bytes += last["sent"]
            minutes = max(last["at_s"] - body.life.from_s, 1.0) / 60
            seen.late_s_minute = max(seen.late_s_minute, last["late_s"] / minutes)
            vectors = np.fromfile(body.folder / "vectors.f32", np.float32).reshape(-1, learners.elements)
            for row, vector in zip(look_rows, vectors, strict=False):
                models_at.setdefault(round(row["look_at"], 6), []).append(vector)
        for when, models in sorted(models_at.items()):
            stacked = np.stack(models)
            seen.record_models(when, learners.evaluate(stacked)[1].tolist(), stacked)
        seen.late_packets = self.after.late_since(self.before)
        return seen


def read(body: Body) -> list[dict[str, Any]]:
    """Return the complete lines of a diary."""
    path = body.folder / "diary.jsonl"
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def looks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "look"]
