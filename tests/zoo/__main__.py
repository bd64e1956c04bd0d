"""Play the zoo and print its table: python -m tests.zoo [NAME ...] [--nodes 3] [--seeds 1] [--kill] [--late]."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence

from tests.zoo.harness import Outcome, play
from tests.zoo.registry import Program, programs

COLUMNS = (
    "program", "metric", "alone", "nodes: mean", "worst", "mixes", "apart after settle", "settle", "changed lines",
    "inventory", "notices",
)  # fmt: skip


def row(program: Program, alone: Sequence[Outcome], swarms: Sequence[Outcome]) -> str:
    """Return a program's row of the table, over all seeds."""
    lone = statistics.mean(outcome.mean for outcome in alone)
    metrics = [metric for outcome in swarms for metric in outcome.metrics]
    worst = min(metrics) if program.best == "high" else max(metrics)
    farthest = max(swarms, key=lambda outcome: outcome.difference)
    apart = "exact" if all(swarm.is_exact for swarm in swarms) else f"{farthest.difference:.1e} ({farthest.tensor})"
    settle_s = max(node.settle_s for outcome in swarms for node in outcome.nodes)
    mixes = round(statistics.mean(node.mixes for outcome in swarms for node in outcome.nodes))
    counts = ", ".join(f"{count} {name}" for name, count in swarms[0].nodes[0].counts.items())
    notices = sum((outcome.notices for outcome in swarms), Counter())
    told = ", ".join(f"{kind} {count}" for kind, count in notices.items()) or "none"
    return (
        f"| {program.title} (`{program.name}`) | {program.metric} | {lone:.4g} | {statistics.mean(metrics):.4g} | "
        f"{worst:.4g} | {mixes} | {apart} | {settle_s:.1f} s | {program.changed_lines} | {counts} | {told} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs, all by default")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill one node halfway")
    parser.add_argument("--late", action="store_true", help="add a node at 40 %% of the run")
    options = parser.parse_args()
    known = programs()
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for name in options.names or known:
        program, seeds = known[name], range(options.seeds)
        try:
            alone = [play(program, seed=seed) for seed in seeds]
            swarms = [play(program, options.nodes, seed, options.kill, options.late) for seed in seeds]
        except AssertionError as error:
            print(f"| {program.title} (`{name}`) | failed: {str(error).strip().splitlines()[-1]} |", flush=True)
            continue
        print(row(program, alone, swarms), flush=True)
        for text in {text for swarm in swarms for node in swarm.nodes for _, text in node.notices}:
            print(f"    {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
