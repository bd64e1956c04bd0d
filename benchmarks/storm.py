"""The fault schedules ("storms") of ft-diloco on real nodes: goodput, and accuracy by samples against a calm run.

    python benchmarks/storm.py [--storm n32] [--speed 3] [--minutes 3] [--seed 1] [--json]

Eight nodes learn digits from the beginning, undisturbed, and then eight others in a storm. ft-diloco
(https://github.com/Neumann-Labs/ft-diloco, chaos/gen_schedule.py) draws its faults from three Poisson processes. Kills
are followed by a restart by a supervisor that polls every 15 s. Stops (SIGSTOP) last 10 to 30 s and partitions 15 to
40 s. ``--speed`` divides all of these times. A fault whose node is gone or stopped does nothing. A partition here
separates the two halves of the swarm, while theirs isolates one node. It needs network namespaces, and so root.

The table goes into docs/results/goodput.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # set before numpy and torch are imported; nodes are forked from this process
os.environ["OPENBLAS_NUM_THREADS"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import digits_node
import goodput_page as page
import numpy as np
from chaos import NODES, Chaos, Place, waits
from pages import put
from swarm_lab import Cut, Patient, namespaces_missing, taken


class Storm(NamedTuple):
    """Mean seconds between kills, between stops and between partitions, from ft-diloco's files."""

    kill_s: float
    stop_s: float
    cut_s: float


STORMS = {"n8": Storm(70, 200, 250), "n32": Storm(60, 240, 300), "k120": Storm(120, 300, 400)}
STOPPED_S, CUT_S = (10.0, 30.0), (15.0, 40.0)
SUPERVISED_S = 15.0  # interval at which a supervisor looks for nodes that are gone
SPARED_S = {"kill": 0.0, "stop": 30.0, "cut": 45.0}  # time before the end in which no fault of the kind begins
SHARES = (0.125, 0.25, 0.5, 1.0)  # Accuracies are compared at these shares of the samples that both runs trained.
SPEED, MINUTES, SEED = 3.0, 3.0, 1  # This is the first seed whose storm has all kinds of faults.


class Fault(NamedTuple):
    """One fault of a schedule: ``at`` seconds after the beginning, for the node ``node``, for ``lasts`` seconds."""

    at: float
    kind: str
    node: int
    lasts: float


def schedule(storm: Storm, duration_s: float, speed: float, seed: int) -> list[Fault]:
    """Draw a storm as ft-diloco does, ``speed`` times as fast, sorted by time; no fault begins too late to end."""
    lasting = {"kill": (0.0, SUPERVISED_S), "stop": STOPPED_S, "cut": CUT_S}
    faults = []
    for kind, mean_s in zip(lasting, storm, strict=True):
        rng = random.Random(f"{kind} {seed}")
        at_s = rng.expovariate(1 / mean_s)
        while at_s < duration_s * speed - SPARED_S[kind]:
            node, lasts = rng.randrange(NODES), rng.uniform(*lasting[kind])
            faults.append(Fault(at_s / speed, kind, node, lasts / speed))
            at_s += rng.expovariate(1 / mean_s)
    return sorted(faults)


class Stormy(Chaos):
    """Eight nodes from the beginning of their training, with a fault schedule instead of random faults."""

    warm_steps = 0

    def __init__(self, minutes: float, seed: int, cable: Cut | None, faults: Sequence[Fault]) -> None:
        super().__init__(minutes, seed, cable)
        self.schedule = list(faults)
        self.killed: list[tuple[Place, Patient]] = []  # (place, killed process)

    def apply_faults(self) -> None:
        began, left = time.monotonic(), list(self.schedule)
        while (now := time.monotonic()) < began + 60 * self.minutes:
            self.check()
            self.end_due_faults(now)
            while left and began + left[0].at <= now:
                self.apply_fault(left.pop(0))
            time.sleep(0.02)
        self.end_faults()

    def apply_fault(self, fault: Fault) -> None:
        """Apply a fault if its node is running now."""
        place, lasts = self.places[fault.node], (fault.lasts, fault.lasts)
        if fault.kind == "cut":
            if self.cable is not None and self.healing is None:
                self.cut_s = lasts
                self.cut()
        elif place not in self.free() or len(self.free()) == 1:  # ft-diloco spares the last replica
            return
        elif fault.kind == "stop":
            self.stopped_s = lasts
            self.stop(place)
        else:
            self.gone_s = lasts
            life = place.now
            self.kill(place)
            self.killed.append((place, life))


# -- figures ---------------------------------------------------------------------------------------------------------
def lost(life: Patient) -> int:
    """Return the most steps that can have died with a process: those since the row before its last exchange."""
    rows = life.looks
    if not rows:
        return 0
    last = max((number for number, row in enumerate(rows) if row["mixes"]), default=0)
    return int(rows[-1]["steps"] - rows[max(0, last - 1)]["steps"])


def back(place: Place, life: Patient) -> float | None:
    """Return the seconds from the start of the process after this one to its first exchange; None if there was none."""
    after = place.lives[place.lives.index(life) + 1 :]
    if not after or not (joined := after[0].event("joined")):
        return None
    mixes = [when for row in after[0].looks for when, _ in row["mixes"]]
    began = joined["t"] - joined["seconds"]
    return mixes[0] - began if mixes else None


class Curve(NamedTuple):
    """The progress of a swarm: samples of all processes together, and the mean accuracy of those present."""

    samples: list[float]
    accuracies: list[float]

    def at(self, samples: float) -> float:
        """Return the accuracy after ``samples`` samples, interpolated between two measurements."""
        return float(np.interp(samples, self.samples, self.accuracies, right=math.nan))


def learned(lives: Sequence[Patient], every_s: float = 0.5) -> Curve:
    """Return the learning curve of a run from its first row to its last."""
    diaries = [life.looks for life in lives if life.looks]
    first, last = min(rows[0]["t"] for rows in diaries), max(rows[-1]["t"] for rows in diaries)
    curve = Curve([], [])
    for number in range(int((last - first) / every_s) + 1):
        now = first + (number + 1) * every_s
        so_far = [[row for row in rows if row["t"] <= now] for rows in diaries]
        steps = sum(rows[-1]["steps"] - rows[0]["steps"] for rows in so_far if rows)
        present = [rows[-1]["accuracy"] for rows in so_far if rows and now - rows[-1]["t"] < 2 * every_s]
        if present:
            curve.samples.append(float(steps * digits_node.BATCH))
            curve.accuracies.append(statistics.fmean(present))
    return curve


def play(minutes: float, seed: int, faults: Sequence[Fault]) -> tuple[dict[str, Any], Curve]:
    """Let eight nodes learn for some minutes with these faults; return figures and the learning curve."""
    missing = namespaces_missing()
    with contextlib.nullcontext() if missing else Cut() as cable, Stormy(minutes, seed, cable, faults) as swarm:
        swarm.begin()
        began = time.monotonic()
        swarm.apply_faults()
        ended = time.monotonic()
        time.sleep(2.0)
        swarm.check()
        lives = [life for place in swarm.places for life in place.lives]
        kinds = [kind for _, kind in swarm.faults]
        back_s = [seconds for place, life in swarm.killed if (seconds := back(place, life)) is not None]
        figures = {
            "seconds": ended - began, "steps": taken(lives, began, ended),
            "lost": sum(lost(life) for _, life in swarm.killed),
            "kinds": {kind: kinds.count(kind) for kind in set(kinds)},
            "resume": waits(swarm.places, swarm.kills, 600.0), "back": back_s,
        }  # fmt: skip
        return figures, learned(lives)


def beside(calm: dict[str, Any], storm: dict[str, Any], still: Curve, stormy: Curve, speed: float) -> dict[str, Any]:
    """Compare a storm with a run without faults, whose pace determines the number of possible steps."""
    possible = calm["steps"] / calm["seconds"] * storm["seconds"]
    storm |= {
        "trained": storm["steps"] / possible, "kept": (storm["steps"] - storm["lost"]) / possible,
        "faults an hour": sum(storm["kinds"].values()) / storm["seconds"] / speed * 3_600,
    }  # fmt: skip
    common = min(still.samples[-1], stormy.samples[-1])  # the samples that both runs trained
    accuracies = [(common * share, stormy.at(common * share), still.at(common * share)) for share in SHARES]
    return {"calm": calm, "storm": storm, "accuracies": accuracies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storm", choices=list(STORMS), default="n32")
    parser.add_argument("--speed", type=float, default=SPEED)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each of the two runs")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", action="store_true", help="one object on the screen, and nothing into the page")
    arguments = parser.parse_args()
    digits_node.warm_up()
    calm, still = play(arguments.minutes, arguments.seed, [])
    faults = schedule(STORMS[arguments.storm], 60 * arguments.minutes, arguments.speed, arguments.seed)
    storm, stormy = play(arguments.minutes, arguments.seed, faults)
    found = beside(calm, storm, still, stormy, arguments.speed)
    found["cuts"] = namespaces_missing() or "in network namespaces"
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    rows = page.storm_rows(found)
    put(page.PAGE, "storm", rows)
    for row in rows:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
