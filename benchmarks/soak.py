"""A soak test: hours of an ordinary swarm with churn, to find memory, descriptors or tables that grow without limit.

    python benchmarks/soak.py [--minutes 120] [--nodes 6] [--out soak]       (^C ends it early)

Half of the nodes stay from beginning to end. Every 90 s one of the others has a fault: it is killed and restarted with
its state, it leaves and is replaced by a new member, or it is stopped for 15 s. Every 30 s each node records its
memory, descriptors, threads, tasks, and the number of items in each of its tables. At the end the slopes of the nodes
that stayed are fitted by least squares over the last three quarters. OUT.csv has the rows, OUT.md the table. Steps are
so slow that the whole run takes less than a quarter of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from pages import table
from swarm_lab import Lab, Patient

FAULT_S = 90.0
STOPPED_S, GONE_S = 15.0, 10.0
LEAVES_S = 60.0  # limit for leaving, which takes a second, and for unloading torch, which takes one of CPU time
WHOLE_S = 240.0  # limit for a node to start; importing torch dominates

MB = 1e6
FIGURES: dict[str, tuple[str, float, float]] = {  # figure -> (unit, its size, largest growth in an hour)
    "rss": ("MB", MB, 4.0),  # 1 % of a node with torch, as allocators keep some of each burst
    "descriptors": ("", 1.0, 1.0),
    "threads": ("", 1.0, 0.5),
    "tasks": ("", 1.0, 1.0),
}
TABLE_PER_HOUR = 12.0  # items, one every five minutes: more than the noise of a small table
# Tables that may grow up to a bound of their own (docs/protocol.md, Limits), and that bound in items.
BOUNDED: dict[str, tuple[int, str]] = {
    "exchanges.outcomes": (4_096, "ends of exchanges, for those who ask"),
    "membership": (20_000, "members, those who left included, for a day"),
    "partners.back_off": (20_000, "one for each member"),
    "refusals.counts": (256, "partners and reasons"),
    "misbehaviour": (1_024, "members and kinds of misconduct"),
    "connector.notified": (64, "refusals told to people"),
    "durations": (20_000, "one for each partner"),
    "pool.free_arrays": (24, "vectors: eight of the largest in all"),
}


Points = list[tuple[float, float]]  # (seconds, value)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the growth per hour, by least squares over the last three quarters of (seconds, value)."""
    late = list(points)[len(points) // 4 :]
    if len(late) < 3:
        return 0.0
    seconds, values = np.array(late).T
    return float(np.polyfit(seconds / 3600, values, 1)[0])


class Soak(Lab):
    """The swarm of a run: half of its members stay, and the others have a fault in turn."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        options: dict[str, Any] = {"step_ms": arguments.step_ms, "row_s": arguments.row_s, "for": 1e6}
        super().__init__("digits_node.py", census=True, **options)
        self.encrypt()
        self.arguments = arguments
        self.staying: list[Patient] = []
        self.others: list[Patient] = []  # the present node of each of the other places
        self.faults = 0

    def begin(self) -> None:
        for number in range(self.arguments.nodes):
            patient = self.launch(f"n{number}")
            self.until(lambda patient=patient: patient.event("joined"), WHOLE_S, f"node {number}")
            (self.staying if number < self.arguments.nodes // 2 else self.others).append(patient)

    def launch(self, name: str, state: str = "") -> Patient:
        """Start a node, with the state of the node ``state`` or with none."""
        return self.start(self.staying[:1], name=name, state_dir=str(self.folder / (state or f"{name}-state")))

    def run(self) -> None:
        end = time.monotonic() + 60 * self.arguments.minutes
        faults, places = itertools.cycle([self.kill, self.replace, self.stop]), itertools.cycle(range(len(self.others)))
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(FAULT_S, left))
            if time.monotonic() >= end:
                break
            fault, place = next(faults), next(places)
            self.others[place] = fault(self.others[place])
            self.faults += 1
            ended = [node.name for node in (*self.staying, *self.others) if node.process.poll() is not None]
            if ended:
                raise RuntimeError(f"{', '.join(ended)} ended: {self.staying[0].now}")

    # Each fault returns the node that takes this place afterwards.
    def kill(self, node: Patient) -> Patient:
        node.signal(signal.SIGKILL)
        node.process.wait()
        time.sleep(GONE_S)
        first = node.name.partition(".")[0]
        return self.launch(f"{first}.{self.faults}", f"{first}-state")

    def replace(self, node: Patient) -> Patient:
        self.end([node], LEAVES_S)
        time.sleep(GONE_S)
        return self.launch(f"{node.name.partition('.')[0]}-{self.faults}")

    def stop(self, node: Patient) -> Patient:
        node.signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        node.signal(signal.SIGCONT)
        return node

    # -- results -----------------------------------------------------------------------------------------------------
    def write_rows(self, path: Path) -> None:
        rows = [(node.name, row) for node in (*self.staying, *self.others) for row in node.looks]
        names = sorted({name for _, row in rows for name in row.get("tables", {})})
        plain = ["t", "steps", "done", "failed", "alive", "members", "links", "accuracy", *FIGURES]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["node", *plain, *names])
            for name, row in rows:
                tables = row.get("tables", {})
                writer.writerow([name, *(row.get(key, "") for key in plain), *(tables.get(key, "") for key in names)])

    def verdict(self) -> tuple[str, bool]:
        """Return the table as Markdown, and True if nothing grows without a bound."""
        looks = [node.looks for node in self.staying]
        lines, is_flat = [["", *(node.name for node in self.staying), "may grow in an hour by"]], True

        def note(name: str, series: list[Points], bound: str) -> None:
            cells = [f"{points[-1][1]:.0f}, {slope(points):+.2f} an hour" if points else "" for points in series]
            lines.append([name, *cells, bound])

        for figure, (unit, size, bound) in FIGURES.items():
            series = [[(row["t"], row[figure] / size) for row in rows if figure in row] for rows in looks]
            is_flat = is_flat and max(map(slope, series)) <= bound
            note(f"{figure} ({unit})" if unit else figure, series, f"{bound:g}")
        for path in sorted({path for rows in looks for row in rows for path in row.get("tables", {})}):
            tables = [[(row["t"], row["tables"]) for row in rows if path in row.get("tables", {})] for rows in looks]
            series = [[(at, items[path]) for at, items in points] for points in tables]
            if max(map(slope, series)) <= TABLE_PER_HOUR:
                continue
            most, why = next((limit for name, limit in BOUNDED.items() if name in path), (-1, ""))
            is_flat = is_flat and max(points[-1][1] for points in series if points) <= most
            note(f"`{path}`", series, f"{most:,}: {why}" if why else "no bound is known")
        slow_rows = sum(row["inside"] > 1.0 for rows in looks for row in rows)
        accuracies = ", ".join(f"{100 * node.now['accuracy']:.1f} %" for node in (*self.staying, *self.others))
        text = f"{self.faults} faults; steps() over 1 s: {slow_rows} rows; last accuracies: {accuracies}."
        return f"{table(lines)}\n{text}", is_flat


def busy_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--row-s", type=float, default=30.0)
    parser.add_argument("--step-ms", type=float, default=500.0)
    parser.add_argument("--out", type=Path, default=Path("soak"), help="OUT.csv and OUT.md are written")
    arguments = parser.parse_args()
    began = time.monotonic()
    with Soak(arguments) as soak:
        soak.begin()
        with contextlib.suppress(KeyboardInterrupt):  # ^C ends the run early, with the rows so far
            soak.run()
        soak.write_rows(arguments.out.with_suffix(".csv"))
        found, is_flat = soak.verdict()
        soak.end([*soak.staying, *soak.others])
    took = time.monotonic() - began
    head = f"{arguments.nodes} nodes, {took / 60:.0f} minutes, {100 * busy_s() / took:.0f} % of one core in all: "
    text = f"{head}{'flat' if is_flat else 'NOT flat'}.\n\n{found}\n"
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps({"flat": is_flat}))
    sys.exit(0 if is_flat else 1)


if __name__ == "__main__":
    main()
