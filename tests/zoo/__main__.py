"""Play the zoo and print its tables: python -m tests.zoo [NAME ...] [--seeds 3]."""

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence

from tests.zoo.harness import Outcome, play
from tests.zoo.registry import Program, programs

# The runs of a program as a swarm: name, nodes and faults. All but the first play one seed.
SWARMS = {"3 nodes": {"nodes": 3}, "8 nodes": {"nodes": 8}, "kill, late join": {"nodes": 3, "kill": True, "late": True}}
WORKERS = 3
ALONE = {"alone": {}, f"batch x {WORKERS}": {"workers": WORKERS}, f"1/{WORKERS} alone": {"share": WORKERS}}
COLUMNS = ("program", "metric", *ALONE, *SWARMS, "apart", "settle 3, 8", "mixes", "notices")


def figures(metrics: Sequence[float]) -> str:
    """Return the mean, with the least and the largest value if these differ."""
    if min(metrics) == max(metrics):
        return f"{metrics[0]:.3g}"
    return f"{statistics.mean(metrics):.3g} ({min(metrics):.3g} to {max(metrics):.3g})"


def rows(program: Program, seeds: range) -> tuple[str, str]:
    """Play a program with all seeds, and return its rows of both tables."""
    cells = [figures([play(program, seed=seed, **choices).mean for seed in seeds]) for choices in ALONE.values()]
    swarms: list[Outcome] = []
    settled: list[str] = []
    for choices in SWARMS.values():
        outcomes = [play(program, seed=seed, **choices) for seed in (seeds[:1] if swarms else seeds)]  # type: ignore[arg-type]
        cells.append(figures([metric for outcome in outcomes for metric in outcome.metrics]))
        settled.append(f"{max(node.settle_s for outcome in outcomes for node in outcome.nodes):.1f}")
        swarms += outcomes
    farthest = max(swarms, key=lambda outcome: outcome.difference)
    apart = "exact" if all(swarm.is_exact for swarm in swarms) else f"{farthest.difference:.1e} ({farthest.tensor})"
    mixes = round(statistics.mean(node.mixes for swarm in swarms[: len(seeds)] for node in swarm.nodes))
    notices = sum((outcome.notices for outcome in swarms), Counter())
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(notices.items())) or "none"
    for text in sorted({text for swarm in swarms for node in swarm.nodes for _, text in node.notices}):
        print(f"    {program.name}: {text}", flush=True)
    name = f"{program.title} (`{program.name}`)"
    counts = ", ".join(f"{count} {treatment}" for treatment, count in swarms[0].nodes[0].counts.items())
    return (
        f"| {' | '.join([name, program.metric, *cells, apart, ', '.join(settled[:2]), str(mixes), told])} |",
        f"| `{program.name}` | {program.changed_lines} | {counts} |",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs, all by default")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    known, ports = programs(), ["| program | changed lines | inventory |\n|---|---|---|"]
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for name in options.names or known:
        try:
            played, port = rows(known[name], range(options.seeds))
        except AssertionError as error:
            print(f"| {known[name].title} (`{name}`) | failed: {str(error).strip().splitlines()[-1]} |", flush=True)
            continue
        print(played, flush=True)
        ports.append(port)
    print("\n" + "\n".join(ports))


if __name__ == "__main__":
    main()
