"""A chaos test: eight nodes learn digits, with a fault every 3 to 6 seconds for ten minutes.

    python benchmarks/chaos.py [--minutes 10] [--seed 1] [--json]

Nodes are killed and restarted with their state, killed and replaced by a new node, or stopped and resumed. As root,
with network namespaces, the network is also partitioned into two halves. After a quarter of the time the first node is
killed, which is the seed of all. At half time half of all nodes are killed at once. A minute without faults comes
before, and half a minute after.

Steps are slow enough that the machine is not the limit, and all figures are relative to this run. Compared with the
minute without faults, the living nodes must take 99 % of the steps and lose at most one point of accuracy. No step() of
a running node may take 1 s. The median time from a kill to each survivor's next exchange must be below 0.5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # set before numpy and torch are imported; nodes are forked from this process
os.environ["OPENBLAS_NUM_THREADS"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import digits_node
from swarm_lab import Cut, Lab, Patient, between, namespaces_missing

NODES = 8
STEP_MS = 40.0
CONFIG = {"mix_every_steps": 8}
BEFORE_S, AFTER_S = 60.0, 30.0
FAULT_S = (3.0, 6.0)
GONE_S, STOPPED_S, CUT_S = (2.0, 8.0), (2.0, 10.0), (4.0, 10.0)
LIVING = 4  # nodes that always run, except when half of all are killed at once
JOIN_S = 60.0
LONG_WAIT_S = 10.0  # a survivor that has run for so long without an exchange counts with the time until its end
STEPS, PAUSE_S, ACCURACY, EXCHANGE_S = 0.99, 1.0, 0.01, 0.5


@dataclass
class Place:
    """One of the eight places in the swarm: its successive processes, and the periods in which they were stopped."""

    name: str
    address: str
    namespace: str | None
    lives: list[Patient] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)  # (from, until) of each stop
    busy: bool = False  # True while its process is gone or stopped
    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # (when, function that ends the fault)

    @property
    def now(self) -> Patient:
        """Return the latest process."""
        return self.lives[-1]


class Chaos(Lab):
    """The swarm of a run, and the faults that it suffers. The cable is cut to partition the network; None: no cuts."""

    gone_s, stopped_s, cut_s = GONE_S, STOPPED_S, CUT_S
    warm_steps = 400  # steps that the first node takes without pauses at the start

    def __init__(self, minutes: float, seed: int, cable: Cut | None) -> None:
        super().__init__(digits_node, step_ms=STEP_MS, config=CONFIG, **{"for": 1e6})
        self.encrypt()
        self.minutes, self.rng, self.cable = minutes, random.Random(seed), cable
        sides = list(cable.addresses.items()) if cable is not None else [(None, "127.0.0.1")]
        self.places = []
        for number in range(NODES):
            namespace, host = sides[number % len(sides)]
            self.places.append(Place(f"n{number}", f"{host}:0", namespace))
        self.faults: list[tuple[float, str]] = []
        self.kills: list[tuple[float, frozenset[str]]] = []  # (when, ids of the killed)
        self.healing: float | None = None  # when the present partition ends; None without one

    # -- life --------------------------------------------------------------------------------------------------------
    def launch(self, place: Place, fresh: bool = False) -> None:
        """Start a node at a place, with the state of the node before it unless ``fresh``."""
        state = self.folder / place.name
        if fresh:
            shutil.rmtree(state, ignore_errors=True)
        running = [other for other in self.places if other.lives and not other.busy and other is not place]
        seeds = [other.now.address for other in running if other.now.event("joined")]
        seeds = [seed for seed in seeds if seed != "none"]  # a node that started in a partition may have no address
        place.lives.append(
            self.start(
                self.rng.sample(seeds, min(2, len(seeds))), place.namespace, f"{place.name}.{len(place.lives)}",
                listen=place.address, state_dir=str(state), warm_steps=0 if self.patients else self.warm_steps,
            )
        )  # fmt: skip
        place.busy = False

    def begin(self) -> None:
        for place in self.places:
            self.launch(place)
            self.joined([place.now])
        self.until(
            lambda: all(place.now.now.get("alive") == NODES and place.now.now["done"] > 2 for place in self.places),
            JOIN_S, "a whole swarm",
        )  # fmt: skip

    # -- faults ------------------------------------------------------------------------------------------------------
    def apply_faults(self) -> None:
        began = time.monotonic()
        end = began + 60 * self.minutes
        plan = [(began + 0.25 * (end - began), self.kill_first), (began + 0.5 * (end - began), self.kill_half)]
        fault = began
        while (now := time.monotonic()) < end:
            self.check()
            self.end_due_faults(now)
            if plan and now >= plan[0][0]:
                plan.pop(0)[1]()
                fault = now + self.rng.uniform(*FAULT_S)
            elif now >= fault:
                self.begin_random_fault()
                fault = now + self.rng.uniform(*FAULT_S)
            time.sleep(0.02)
        self.end_faults()

    def end_faults(self) -> None:
        """End all faults at once."""
        for place in self.places:
            place.due = [(0.0, undo) for _, undo in place.due]
        self.healing = None if self.healing is None else 0.0
        self.end_due_faults(time.monotonic())

    def end_due_faults(self, now: float) -> None:
        """End the faults that are over."""
        for place in self.places:
            due, place.due = place.due, []
            for when, undo in due:
                if when <= now:
                    undo()
                else:
                    place.due.append((when, undo))
        if self.healing is not None and self.healing <= now and self.cable is not None:
            self.cable.heal()
            self.healing = None

    def begin_random_fault(self) -> None:
        free = self.free()
        kinds: list[Callable[[Place], None]] = [self.kill, self.replace, self.stop]
        if self.cable is not None and self.healing is None and self.rng.random() < 0.15:
            self.cut()
        elif len(free) > LIVING:
            self.rng.choice(kinds)(self.rng.choice(free))

    def free(self) -> list[Place]:
        """Return the places whose nodes train now."""
        return [place for place in self.places if not place.busy and place.now.event("joined")]

    def kill(self, place: Place, fresh: bool = False) -> None:
        at = place.now.signal(signal.SIGKILL)
        place.now.process.wait()
        place.busy = True
        self.kills.append((at, frozenset({place.now.id})))
        self.faults.append((at, "killed, another came" if fresh else "killed and back"))
        place.due.append((at + self.rng.uniform(*self.gone_s), lambda: self.launch(place, fresh)))

    def replace(self, place: Place) -> None:
        self.kill(place, fresh=True)

    def stop(self, place: Place) -> None:
        at = place.now.signal(signal.SIGSTOP)
        place.busy = True
        self.faults.append((at, "stopped"))

        def wake() -> None:
            place.stops.append((at, place.now.signal(signal.SIGCONT)))
            place.busy = False

        place.due.append((at + self.rng.uniform(*self.stopped_s), wake))

    def cut(self) -> None:
        assert self.cable is not None
        at = self.cable.cut()
        self.healing = at + self.rng.uniform(*self.cut_s)
        self.faults.append((at, "cut in two"))

    def kill_first(self) -> None:
        free = self.free()
        self.kill(self.places[0] if self.places[0] in free else free[0])

    def kill_half(self) -> None:
        free = self.free()
        victims = free[: min(NODES // 2, len(free) - 1)]
        ids = frozenset(place.now.id for place in victims)
        for place in victims:
            self.kill(place)
        at = self.kills[-1][0]
        self.kills = [*self.kills[: -len(victims)], (at, ids)] if victims else self.kills
        self.faults.append((at, f"{len(victims)} killed at once"))


# -- figures ---------------------------------------------------------------------------------------------------------
def awake(place: Place, since: float, until: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each period in which a node of this place ran without a stop and wrote at least two rows.

    A row in whose time a stop began or ended belongs to no period.
    """
    for life in place.lives:
        stretch: list[dict[str, Any]] = []
        for row in life.looks:
            before = stretch[-1]["t"] if stretch else row["t"]
            stopped = any(begin <= row["t"] and before <= end for begin, end in place.stops)
            if stopped or not since <= row["t"] <= until:
                if len(stretch) > 1:
                    yield stretch
                stretch = [] if not since <= row["t"] <= until or stopped else [row]
            else:
                stretch.append(row)
        if len(stretch) > 1:
            yield stretch


def rate(places: list[Place], since: float, until: float) -> float:
    """Return the steps a second of a running node."""
    steps = seconds = 0.0
    for place in places:
        for rows in awake(place, since, until):
            steps += rows[-1]["steps"] - rows[0]["steps"]
            seconds += rows[-1]["t"] - rows[0]["t"]
    return steps / seconds if seconds else 0.0


def longest(places: list[Place], since: float, until: float) -> float:
    """Return the longest step() of nodes that ran, in s. A period's first row is skipped: it may include a stop."""
    return max((row["inside"] for p in places for rows in awake(p, since, until) for row in rows[1:]), default=0.0)


def accuracy(places: list[Place], since: float, until: float) -> float:
    lives = [life for place in places for life in place.lives]  # including processes that have ended since
    return statistics.fmean(row["accuracy"] for life in lives for row in between(life, since, until))


def waits(places: list[Place], kills: list[tuple[float, frozenset[str]]], until: float) -> list[float]:
    """Return the seconds from each kill to the next exchange of each survivor with a surviving partner.

    Survivors that were killed or stopped before that exchange are left out.
    """
    waits_s = []
    for killed_at, dead in kills:
        for place in places:
            for life in place.lives:
                rows = life.looks
                if not rows or life.event("joined") is None or life.id in dead or rows[0]["t"] > killed_at:
                    continue
                mixes = [
                    when for row in rows for when, partner in row["mixes"] if when > killed_at and partner not in dead
                ]
                last = rows[-1]["t"]
                wait_end = mixes[0] if mixes else last
                if last < killed_at or any(begin <= wait_end and killed_at <= end for begin, end in place.stops):
                    continue
                if mixes:
                    waits_s.append(mixes[0] - killed_at)
                elif last > killed_at + LONG_WAIT_S:
                    waits_s.append(last - killed_at)
    return [wait_s for wait_s in waits_s if wait_s <= until]


def figures(chaos: Chaos, before: tuple[float, float], during: tuple[float, float], after: float) -> dict[str, Any]:
    places = chaos.places
    end = time.monotonic()
    usual_rate, fault_rate = rate(places, *before), rate(places, *during)
    waits_s = waits(places, chaos.kills, 600.0)
    joins = [life.joined["seconds"] for p in places for life in p.lives[1:] if life.event("joined")]
    run_ids = sorted(str(place.now.now.get("run_id")) for place in places)  # "None" if not joined yet
    return {
        "faults": len(chaos.faults),
        "kinds": dict(Counter(kind for _, kind in chaos.faults)),
        "seconds between faults": (during[1] - during[0]) / max(1, len(chaos.faults)),
        "steps of the living, of the fault-free": fault_rate / usual_rate,
        "steps a second without faults": usual_rate,
        "longest step() without faults (s)": longest(places, *before),
        "longest step() of a survivor (s)": longest(places, *during),
        "accuracy before": accuracy(places, before[1] - 10.0, before[1]),
        "accuracy at the end": accuracy(places, after + 0.5 * (end - after), end),
        "kill to next exchange, median (s)": statistics.median(waits_s) if waits_s else None,
        "kill to next exchange, 95 % (s)": sorted(waits_s)[int(0.95 * len(waits_s))] if waits_s else None,
        "kill to next exchange, of": len(waits_s),
        "waits for weights, median and most (s)": [statistics.median(joins), max(joins)] if joins else None,
        "all see all at the end": all(place.now.now.get("alive", 0) >= NODES for place in places),
        "one run at the end": len(set(run_ids)) == 1,
        "runs and members alive at the end": [run_ids, [place.now.now.get("alive") for place in places]],
    }


def broken(figures: dict[str, Any]) -> list[str]:
    """Return the names of the broken promises."""
    names = []
    if figures["steps of the living, of the fault-free"] < STEPS:
        names.append("steps")
    if figures["longest step() of a survivor (s)"] >= PAUSE_S:
        names.append("pause")
    if figures["accuracy at the end"] < figures["accuracy before"] - ACCURACY:
        names.append("accuracy")
    if (figures["kill to next exchange, median (s)"] or 0.0) >= EXCHANGE_S:
        names.append("exchange")
    if not figures["one run at the end"] or not figures["all see all at the end"]:
        names.append("whole")
    return names


def play(minutes: float, seed: int, before_s: float, after_s: float) -> dict[str, Any]:
    missing = namespaces_missing()
    with contextlib.nullcontext() if missing else Cut() as cable, Chaos(minutes, seed, cable) as chaos:
        chaos.begin()
        time.sleep(2.0)
        began = time.monotonic()
        time.sleep(before_s)
        faults_began = time.monotonic()
        chaos.apply_faults()
        faults_ended = time.monotonic()
        time.sleep(after_s)
        chaos.check()
        found = figures(chaos, (began, faults_began), (faults_began, faults_ended), faults_ended)
        found["cuts"] = missing or "in network namespaces"
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before-s", type=float, default=BEFORE_S)
    parser.add_argument("--after-s", type=float, default=AFTER_S)
    parser.add_argument("--json", action="store_true", help="one object instead of text")
    arguments = parser.parse_args()
    digits_node.warm_up()
    found = play(arguments.minutes, arguments.seed, arguments.before_s, arguments.after_s)
    broken_promises = broken(found)
    if arguments.json:
        print(json.dumps({**found, "broken": broken_promises}, indent=2))
    else:
        print("| | |\n|---|---|")
        for name, value in found.items():
            print(f"| {name} | {value if not isinstance(value, float) else format(value, '.3f')} |")
        print(f"\n{'kept' if not broken_promises else 'NOT kept: ' + ', '.join(broken_promises)}")
    sys.exit(1 if broken_promises else 0)


if __name__ == "__main__":
    main()
