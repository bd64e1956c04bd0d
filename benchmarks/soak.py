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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
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


@dataclass
class Member:
    """One place in the swarm, whose process may change."""

    name: str
    patient: Patient
    stays: bool


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the growth per hour, by least squares over the last three quarters of (seconds, value)."""
    late = list(points)[len(points) // 4 :]
    if len(late) < 3:
        return 0.0
    seconds, values = np.array(late).T
    return float(np.polyfit(seconds / 3600, values, 1)[0])


class Soak:
    """The swarm of a run: half of its members stay, and the others have a fault in turn."""

    def __init__(self, lab: Lab, arguments: argparse.Namespace) -> None:
        self.lab, self.arguments = lab, arguments
        self.members: list[Member] = []
        self.faults: list[str] = []

    def start(self) -> None:
        first = self.launch("n0", [])
        self.members.append(Member("n0", first, True))
        self.lab.until(lambda: first.event("joined"), WHOLE_S, "the first node")
        for number in range(1, self.arguments.nodes):
            patient = self.launch(f"n{number}", [first])
            self.members.append(Member(f"n{number}", patient, number < self.arguments.nodes // 2))
            self.lab.until(lambda patient=patient: patient.event("joined"), WHOLE_S, f"node {number}")

    def launch(self, state: str, seeds: list[Patient]) -> Patient:
        return self.lab.start(seeds=seeds, state_dir=str(self.lab.folder / state))

    def run(self) -> None:
        end = time.monotonic() + 60 * self.arguments.minutes
        faults: itertools.cycle[tuple[str, Callable[[Member], None]]] = itertools.cycle(
            [("killed and back", self.kill), ("left, another came", self.replace), ("stopped", self.stop)]
        )
        faulty = itertools.cycle([member for member in self.members if not member.stays])
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(FAULT_S, left))
            if time.monotonic() >= end:
                break
            (name, fault), member = next(faults), next(faulty)
            fault(member)
            self.faults.append(name)
            ended = [other.name for other in self.members if other.patient.process.poll() is not None]
            if ended:
                raise RuntimeError(f"{', '.join(ended)} ended: {self.members[0].patient.now}")

    def seeds(self) -> list[Patient]:
        return [self.members[0].patient]

    def kill(self, member: Member) -> None:
        member.patient.signal(signal.SIGKILL)
        member.patient.process.wait()
        time.sleep(GONE_S)
        member.patient = self.launch(member.name, self.seeds())

    def replace(self, member: Member) -> None:
        self.lab.end([member.patient], LEAVES_S)
        time.sleep(GONE_S)
        member.patient = self.launch(f"{member.name}-{len(self.faults)}", self.seeds())

    def stop(self, member: Member) -> None:
        member.patient.signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        member.patient.signal(signal.SIGCONT)

    # -- results -----------------------------------------------------------------------------------------------------
    def stayed(self) -> list[Member]:
        return [member for member in self.members if member.stays]

    def write_rows(self, path: Path) -> None:
        rows = [(member.name, row) for member in self.members for row in member.patient.looks]
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
        members = self.stayed()
        lines = ["| | " + " | ".join(member.name for member in members) + " | may grow in an hour by |"]
        lines.append("|---|" + "---|" * (len(members) + 1))
        is_flat = True
        for figure, (unit, size, bound) in FIGURES.items():
            cells = []
            for member in members:
                points = [(row["t"], row[figure] / size) for row in member.patient.looks if figure in row]
                grows = slope(points)
                is_flat = is_flat and grows <= bound
                cells.append(f"{points[-1][1]:.0f}, {grows:+.2f} an hour")
            lines.append(f"| {figure}{f' ({unit})' if unit else ''} | " + " | ".join(cells) + f" | {bound:g} |")
        table_lines, are_bounded = self.tables(members)
        lines += table_lines
        slow_rows = sum(row["inside"] > 1.0 for member in members for row in member.patient.looks)
        lines += [
            "",
            f"{len(self.faults)} faults; steps() over 1 s: {slow_rows} rows; last accuracies: "
            + ", ".join(f"{100 * member.patient.now['accuracy']:.1f} %" for member in self.members)
            + ".",
        ]
        return "\n".join(lines), is_flat and are_bounded

    def tables(self, members: list[Member]) -> tuple[list[str], bool]:
        """Return a line for each table that grows on any of these nodes, and True if all of them are bounded."""
        series: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for member in members:
            for row in member.patient.looks:
                for path, items in row.get("tables", {}).items():
                    series.setdefault((path, member.name), []).append((row["t"], items))
        slopes = {key: slope(points) for key, points in series.items()}
        are_bounded, lines = True, []
        for path in sorted({path for path, _ in slopes}):
            grows = [slopes.get((path, member.name), 0.0) for member in members]
            if max(grows) <= TABLE_PER_HOUR:
                continue
            bound = next((limit for name, limit in BOUNDED.items() if name in path), None)
            last = max(points[-1][1] for (other, _), points in series.items() if other == path)
            are_bounded = are_bounded and bound is not None and last <= bound[0]
            bound_text = f"{bound[0]:,}: {bound[1]}" if bound is not None else "no bound is known"
            cells = [f"{series[(path, m.name)][-1][1]:.0f}, {slopes[(path, m.name)]:+.1f} an hour"
                     if (path, m.name) in series else "" for m in members]  # fmt: skip
            lines.append(f"| `{path}` | " + " | ".join(cells) + f" | {bound_text} |")
        return lines, are_bounded


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
    options: dict[str, Any] = {"step_ms": arguments.step_ms, "row_s": arguments.row_s, "census": True, "for": 1e6}
    with Lab("digits_node.py", **options) as lab:
        lab.encrypt()
        soak = Soak(lab, arguments)
        soak.start()
        with contextlib.suppress(KeyboardInterrupt):  # ^C ends the run early, with the rows so far
            soak.run()
        soak.write_rows(arguments.out.with_suffix(".csv"))
        table, is_flat = soak.verdict()
        lab.end([member.patient for member in soak.members])
    took = time.monotonic() - began
    head = f"{arguments.nodes} nodes, {took / 60:.0f} minutes, {100 * busy_s() / took:.0f} % of one core in all: "
    text = f"{head}{'flat' if is_flat else 'NOT flat'}.\n\n{table}\n"
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps({"flat": is_flat}))
    sys.exit(0 if is_flat else 1)


if __name__ == "__main__":
    main()
