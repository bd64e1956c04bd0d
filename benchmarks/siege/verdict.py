"""The measurements of an attack's effects on the honest nodes, and the check of what is promised."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attack import Attack
from swarm_lab import Patient, between, taken

MIXING = 0.90  # required mixes with honest partners per step, as a share of those in the calm
ACCURACY = 0.01
PROGRESS = 1.2  # growth of the sample counts, as a multiple of the growth by the rule for this many members
BUDGET_MB = 64.0  # memory that an attacker may make a node use: all tables and buffers at their limits at once
WELL_S = 10.0  # within which the swarm must recover
NAMING = (
    "misbehaves",
    "come to nothing",
    "stopped moving",
)  # phrases of log lines that name a peer and its misbehaviour
JOINS_S = 10.0  # within which a newcomer must join


@dataclass
class Verdict:
    """The figures of one attack, and the promises that were broken."""

    attack: Attack
    mixing: float = float("nan")  # rate of mixes as a share of that in the calm
    mixing_error: float = float("nan")  # its standard error, by the differences between seconds
    steps: float = float("nan")  # steps of all nodes as a share of those in the calm
    accuracy: float = float("nan")  # change against the calm
    memory_mb: float = float("nan")  # largest growth of a node against the calm
    pause_s: float = float("nan")  # longest call of step() of an honest node
    moved: float = float("nan")  # largest movement of a model along (1, 1, ... 1), divided by its norm
    progress: float = float("nan")  # growth of the nodes' sample counts, divided by the samples that they trained
    usual: float = float("nan")  # The same without lies: each member in contact with a node counts a step.
    well_s: float | None = None  # seconds from the end of the attack to the recovery
    named: str = ""  # the first log line that names the attacker
    newcomer: str = ""  # fault of the node that joined meanwhile
    faults: list[str] = field(default_factory=list)

    def judge(self) -> None:
        faults = self.faults
        if not self.mixing >= MIXING:
            faults.append(f"mixing at {100 * self.mixing:.0f} %")
        if not self.accuracy >= -ACCURACY:
            faults.append(f"accuracy {100 * self.accuracy:+.1f} points")
        if not self.memory_mb <= BUDGET_MB:
            faults.append(f"memory +{self.memory_mb:.0f} MB")
        if not self.progress <= PROGRESS * self.usual:
            faults.append(f"progress {self.progress:.2f}, where the members in contact make {self.usual:.2f}")
        if self.well_s is None or self.well_s > WELL_S:
            faults.append(f"not well {WELL_S:.0f} s after")
        if self.attack.named and not self.named:
            faults.append("named by nobody")

    @property
    def row(self) -> str:
        well = "-" if self.well_s is None else f"{self.well_s:.1f} s"
        named = self.named or ("-" if not self.attack.named else "no")
        return (
            f"| `{self.attack.name}` | {self.attack.what} | "
            f"{100 * self.mixing:.0f} ± {100 * self.mixing_error:.0f} % | {100 * self.steps:.0f} % | "
            f"{100 * self.accuracy:+.1f} | "
            f"{self.memory_mb:+.0f} MB | {1000 * self.pause_s:.0f} ms | {self.progress:.2f} | {well} | {named} | "
            f"{'kept' if not self.faults else '; '.join(self.faults)} |"
        )

    HEAD = (
        "| attack | what it does | mixing, of the calm's | steps | accuracy, points | memory | longest step() "
        "| progress | well again after | named as | promise |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )


def mixing(nodes: Iterable[Patient], since: float, until: float, newcomer: Patient | None = None) -> float:
    """Return the finished exchanges with honest partners per step of these nodes, between two times.

    An honest ``newcomer`` counts as a partner: among five members it has a quarter of each other member's exchanges.
    """
    nodes = list(nodes)
    honest = {node.id for node in nodes}
    if newcomer is not None and newcomer.event("joined") is not None:
        honest.add(newcomer.id)
    steps = mixes = 0
    for node in nodes:
        rows = between(node, since, until)
        if len(rows) > 1:
            steps += rows[-1]["steps"] - rows[0]["steps"]
            first, last = rows[0]["t"], rows[-1]["t"]
            mixes += sum(
                partner in honest and first < when <= last for row in node.looks for when, partner in row["mixes"]
            )
    return mixes / steps if steps else 0.0


def mixing_share(
    nodes: list[Patient], calm: tuple[float, float], siege: tuple[float, float], newcomer: Patient | None = None
) -> tuple[float, float]:
    """Return the mixing of one time as a share of that of another, and the share's standard error."""
    began, ended = siege
    share = mixing(nodes, began, ended, newcomer) / max(mixing(nodes, *calm), 1e-9)
    parts = relative_error(nodes, *calm), relative_error(nodes, began, ended, newcomer)
    return share, share * math.hypot(*parts)


def relative_error(nodes: list[Patient], since: float, until: float, newcomer: Patient | None = None) -> float:
    """Return the standard error of :func:`mixing` as a share of it, by its seconds; NaN if these are fewer than two."""
    rates = [mixing(nodes, since + second, since + second + 1.0, newcomer) for second in range(int(until - since))]
    mean = statistics.fmean(rates) if len(rates) > 1 else 0.0
    return statistics.stdev(rates) / math.sqrt(len(rates)) / mean if mean else float("nan")


def progressed(nodes: list[Patient], since: float, until: float, batch: int) -> float:
    """Return the largest growth of a node's count of the swarm's samples, divided by the samples trained meanwhile."""
    rows = [of_one for node in nodes if (of_one := between(node, since, until))]
    grown = max((of_one[-1]["swarm_samples"] - of_one[0]["swarm_samples"] for of_one in rows), default=0)
    trained = batch * taken(nodes, since, until)
    return max(0, grown) / trained if trained else float("nan")


def contacts(nodes: Iterable[Patient], since: float, until: float) -> float:
    """Return the members that a node was in contact with, itself included: the mean of the node that had most."""
    counts = [[row["alive"] for row in between(node, since, until)] for node in nodes]
    return max((statistics.fmean(of_node) for of_node in counts if of_node), default=float("nan"))


def accuracy(nodes: Iterable[Patient], since: float, until: float) -> float:
    """Return the mean accuracy over the nodes and over this time."""
    values = [row["accuracy"] for node in nodes for row in between(node, since, until)]
    return statistics.fmean(values) if values else float("nan")


def resident(nodes: Iterable[Patient], since: float, until: float) -> list[float]:
    """Return the peak resident memory of each node in this time, in MB."""
    return [max((row["rss"] / 1e6 for row in between(node, since, until)), default=float("nan")) for node in nodes]


def names(logs: Sequence[Path], identities: Iterable[str], address: bool) -> str:
    """Return the first log line that names one of these members (or an address, if ``address``), "" for none."""
    short_ids = [identity[:8] for identity in identities]
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            text = re.sub(r"^[0-9a-f]{8}  ", "", line.strip())  # drop the id of the node that logged it
            if not any(word in text for word in NAMING):
                continue
            if any(short_id in text for short_id in short_ids) or (address and "127.0.0.1" in text):
                return re.sub(r"^.*misbehaves: |^A transfer with [0-9a-f]+ ", "", text).rstrip(".")
    return ""
