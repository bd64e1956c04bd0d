"""A comparison of mixing intervals and codecs: automatic choice and fixed settings.

    python benchmarks/interval.py [--seeds 3] [--setting NAME]... [--page]    the grid: writes docs/results/interval.md

Peers of the grid train 30,720 steps in total on digits, or 7,680 on Fashion-MNIST, in batches of 8 with steps of 0.1 s
and the default method. The page compares the default with fixed pairs of an interval and a codec that send the same
bytes. A figure is the mean node's accuracy in %, as the mean of four measurements in the last tenth of a run. A run
takes 4 to 40 seconds of one core. Finished runs are cached in runs/interval.jsonl. The cache does not notice changed
code; remove the file then. --page plays nothing and writes the page from the cache.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
from pathlib import Path

import torch
from interval_page import write_page

from sim import Scenario, simulate

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "runs" / "interval.jsonl"
PAGE = ROOT / "docs" / "results" / "interval.md"
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
    """What the runs of one row of the page have in common."""

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
DEFAULT, BUDGET, COSTLY = "the default", "fp32 every 8", "moniqua4 every 1"
SETTINGS = {
    DEFAULT: {},
    BUDGET: {"codec": "fp32", "mix_every_steps": 8},
    "bf16 every 4": {"codec": "bf16", "mix_every_steps": 4},
    "int8 every 2": {"codec": "int8", "mix_every_steps": 2},
    "int8 every 4": {"codec": "int8", "mix_every_steps": 4},
    "int4 every 1": {"codec": "int4", "mix_every_steps": 1},
    COSTLY: {"codec": "moniqua4", "mix_every_steps": 1},  # played message by message, in three times the time
}


def scenario(seed, peers, end, task, network, gossip, **more):
    return Scenario.from_mapping({
        "name": "interval", "seed": seed, "peers": peers, "duration_s": end,
        "task": {"dataset": "digits", "model": "mlp", "batch_size": 8} | task, "network": network,
        "membership": {"mode": "ideal"}, "gossip": gossip, "compute": COMPUTE,
    } | more)  # fmt: skip


# -- the grid ----------------------------------------------------------------------------------------------------------
def key_of(world, setting, seed):
    return json.dumps([dataclasses.astuple(world), SETTINGS[setting], seed], sort_keys=True)


def play(world, setting, seed):
    """Simulate a run, and return its figures at the end."""
    steps = ALL_STEPS[world.dataset] // world.peers
    end = steps * STEP_S
    task = {"dataset": world.dataset, "partition": PARTITIONS[world.data], "optimizer": {"lr": world.rate}}
    report = {"every_s": end / LOOKS}
    played = scenario(seed, world.peers, end, task, NETWORKS[world.links], SETTINGS[setting], report=report)
    result = simulate(played, progress=False)
    looks = result.history[-4:]
    return {
        "mean": statistics.mean(look["accuracy_mean"] for look in looks),
        "worst": statistics.mean(look["accuracy_min"] for look in looks),
        "mb": looks[-1]["bytes_sent"] / world.peers / 1e6, "mixes": looks[-1]["mixes"],
        "interval": result.summary["interval_steps"], "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def read_cache():
    lines = CACHE.read_text(encoding="utf-8").splitlines() if CACHE.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def cells(seeds, settings):
    """Yield the runs of the grid in the order of playing.

    The first seed of all cells comes before the second one. The costly setting comes last, and has one seed.
    """
    for seed in range(1, seeds + 1):
        for setting in settings:
            if setting != COSTLY:
                yield from ((world, setting, seed) for world in WORLDS)
    if COSTLY in settings:
        yield from ((world, COSTLY, 1) for world in WORLDS)


def play_grid(seeds, settings):
    """Simulate the runs that are not cached, and cache each as it ends."""
    cache = read_cache()
    CACHE.parent.mkdir(exist_ok=True)
    left = [cell for cell in cells(seeds, settings) if key_of(*cell) not in cache]
    print(f"{len(left)} runs to play", file=sys.stderr, flush=True)
    with CACHE.open("a", encoding="utf-8") as file:
        for world, setting, seed in left:
            figures = play(world, setting, seed)
            file.write(json.dumps({"key": key_of(world, setting, seed), **figures}) + "\n")
            file.flush()
            print(f"{world.name}, {setting}, {seed}: {100 * figures['mean']:.1f} %", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this setting; may be repeated")
    parser.add_argument("--page", action="store_true", help="play nothing: write the page from what was played")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.page:
        play_grid(args.seeds, args.setting or list(SETTINGS))
    cache = read_cache()
    figures = {}
    for world, setting, seed in cells(args.seeds, SETTINGS):
        line = cache.get(key_of(world, setting, seed))
        figures.setdefault((world.name, setting), {}).update({seed: line} if line else {})
    write_page(PAGE, figures, list(SETTINGS), DEFAULT, BUDGET, COSTLY)


if __name__ == "__main__":
    main()
