"""A comparison of mixing intervals and codecs: automatic choice and fixed settings.

    python benchmarks/interval.py [--seeds 3] [--setting NAME]... [--page]    the tables of docs/results/interval.md

Peers of the grid train 30,720 steps in total on digits, or 7,680 on Fashion-MNIST, in batches of 8 with steps of 0.1 s
and the default method. The tables compare the default with fixed pairs of an interval and a codec that send the same
bytes. A figure is the mean node's accuracy in %, as the mean of four measurements in the last tenth of a run. A run
takes 4 to 40 seconds of one core. Finished runs are kept in runs/interval.jsonl. --page plays nothing and writes the
tables from these runs.
"""

import argparse
import dataclasses
import math
import statistics

import torch
from pages import RESULTS, Runs, put

from sim import Scenario, simulate

PAGE = RESULTS / "interval.md"
AIM = 0.3  # points that the default may be behind the best fixed pair
SLACK = 1.05  # The default may send so many times the budget's bytes, as int8 needs scales.
STEP_S, LOOKS = 0.1, 40
ALL_STEPS = {"digits": 960 * 32, "fashion-mnist": 480 * 16}
COMPUTE = {"step_s": {"kind": "uniform", "low_s": 0.95 * STEP_S, "high_s": 1.05 * STEP_S}}
NETWORKS = {
    "LAN": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
    "internet": {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": 100},
}
UNEVEN = {"kind": "dirichlet", "alpha": 0.1}
PARTITIONS = {"IID": {"kind": "iid"}, "Dirichlet 0.1": UNEVEN}


@dataclasses.dataclass(frozen=True)
class World:
    """The settings that the runs of one row of the page share."""

    data: str
    peers: int
    links: str
    rate: float  # learning rate; higher for many nodes with few steps each
    dataset: str = "digits"

    @property
    def name(self):
        return f"{self.dataset}, {self.data}, {self.peers} nodes, {self.links}"


WORLDS = [
    *(World("IID", peers, "LAN", 1.0) for peers in (4, 16, 32, 128, 256)),
    *(World("Dirichlet 0.1", peers, "LAN", 0.3) for peers in (4, 16, 32)),
    *(World("Dirichlet 0.1", peers, "LAN", 0.6) for peers in (128, 256)),
    World("IID", 32, "internet", 1.0),
    World("Dirichlet 0.1", 32, "internet", 0.3),
    World("Dirichlet 0.1", 16, "LAN", 0.015, "fashion-mnist"),
]
DEFAULT, BUDGET = "the default", "fp32 every 8"
SETTINGS = {
    DEFAULT: {},
    BUDGET: {"codec": "fp32", "mix_every_steps": 8},
    "bf16 every 4": {"codec": "bf16", "mix_every_steps": 4},
    "int8 every 2": {"codec": "int8", "mix_every_steps": 2},
    "int8 every 4": {"codec": "int8", "mix_every_steps": 4},
    "int4 every 1": {"codec": "int4", "mix_every_steps": 1},
}


# -- the grid ----------------------------------------------------------------------------------------------------------
def scenario(world, setting, seed):
    """Return the scenario of a run as nested mappings."""
    end = ALL_STEPS[world.dataset] // world.peers * STEP_S
    return {
        "name": "interval", "seed": seed, "peers": world.peers, "duration_s": end,
        "task": {
            "dataset": world.dataset, "model": "mlp", "batch_size": 8, "partition": PARTITIONS[world.data],
            "optimizer": {"lr": world.rate},
        },
        "network": NETWORKS[world.links], "membership": {"mode": "ideal"}, "gossip": SETTINGS[setting],
        "compute": COMPUTE, "report": {"every_s": end / LOOKS},
    }  # fmt: skip


def play(cell):
    """Simulate a run, and return its figures at the end."""
    torch.set_num_threads(1)
    table = scenario(*cell)
    result = simulate(Scenario.from_mapping(table), progress=False)
    looks = result.history[-4:]
    return {
        "mean": statistics.mean(look["accuracy_mean"] for look in looks),
        "worst": statistics.mean(look["accuracy_min"] for look in looks),
        "mb": looks[-1]["bytes_sent"] / table["peers"] / 1e6, "mixes": looks[-1]["mixes"],
        "interval": result.summary["interval_steps"],
    }  # fmt: skip


def cells(seeds, settings):
    """Return the runs of the grid in the order of playing: the first seed of all cells comes before the second one."""
    return [(world, setting, seed) for seed in range(1, seeds + 1) for setting in settings for world in WORLDS]


# -- the tables --------------------------------------------------------------------------------------------------------
def average(runs, name):
    return statistics.mean(run[name] for run in runs.values())


def accuracy(runs):
    return f"{100 * average(runs, 'mean'):.1f} ({100 * average(runs, 'worst'):.0f})"


def difference(runs, reference):
    """Return the mean of ``runs - reference`` in points over common seeds, and its standard error or None."""
    values = [100 * (runs[seed]["mean"] - reference[seed]["mean"]) for seed in sorted(runs.keys() & reference.keys())]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def in_common(figures, world, settings):
    """Return the figures of these settings with only the seeds that all of them have."""
    seeds = sorted(set.intersection(*(set(figures[world, setting]) for setting in settings)))
    return {setting: {seed: figures[world, setting][seed] for seed in seeds} for setting in settings}


def beside_best(figures, worlds):
    """Return the table that compares the default with the best fixed pair; a world that misses the aim has a star."""
    pairs = [setting for setting in SETTINGS if setting != DEFAULT]
    rows = [
        ["world", "best fixed pair", "the default", "difference", "MB: pair, default", "mixes: pair, default", "seeds"]
    ]
    for world in worlds:
        equal = in_common(figures, world, [DEFAULT, *pairs])
        ours = equal[DEFAULT]
        pair = max(pairs, key=lambda pair, equal=equal: average(equal[pair], "mean"))
        best = equal[pair]
        points, error = difference(ours, best)
        shown = f"{round(points, 1) + 0.0:+.1f}" + ("" if error is None else f" ± {error:.1f}")
        missed = round(points, 1) < -AIM or average(ours, "mb") > SLACK * average(equal[BUDGET], "mb")
        rows.append([
            world + " \\*" * missed, f"{pair}: {accuracy(best)}", accuracy(ours), shown,
            f"{average(best, 'mb'):.2f}, {average(ours, 'mb'):.2f}",
            f"{average(best, 'mixes'):.0f}, {average(ours, 'mixes'):.0f}", str(len(ours)),
        ])  # fmt: skip
    return rows


def all_pairs(figures, worlds):
    def cell(runs):
        if not runs:
            return "-"
        return f"{accuracy(runs)} {average(runs, 'mb'):.2f}"

    return [["", *SETTINGS], *([world, *(cell(figures[world, setting]) for setting in SETTINGS)] for world in worlds)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this setting; may be repeated")
    parser.add_argument("--page", action="store_true", help="play nothing: write the tables from what was played")
    args = parser.parse_args()
    runs = Runs("interval")
    if not args.page:
        runs.play(cells(args.seeds, args.setting or list(SETTINGS)), play, lambda cell: scenario(*cell))
    figures = {}
    for world, setting, seed in cells(args.seeds, SETTINGS):
        found = runs.get(scenario(world, setting, seed))
        figures.setdefault((world.name, setting), {}).update({seed: found} if found else {})
    worlds = [world.name for world in WORLDS if any(in_common(figures, world.name, SETTINGS).values())]
    put(PAGE, "best", beside_best(figures, worlds))
    put(PAGE, "pairs", all_pairs(figures, worlds))


if __name__ == "__main__":
    main()
