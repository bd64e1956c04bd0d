"""A comparison of mixing intervals and codecs: automatic choice, fixed settings and consensus control.

    python benchmarks/interval.py [--seeds 3] [--play] [--row NAME]...    the grid of decisions 96 and 107
    python benchmarks/interval.py --control [--seeds 3]                   a fixed interval against consensus control

Peers learn digits for 30,720 steps in total, in batches of 8 with steps of 0.1 s and the default method. A figure of
the grid is the mean node's accuracy in %, as the mean of four measurements in the last tenth of a run. Finished runs
are cached in runs/interval.jsonl; without --play the table has only those. A run takes 5 to 12 seconds of one core.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from sim import Scenario, simulate

CACHE = Path(__file__).resolve().parent.parent / "runs" / "interval.jsonl"
STEP_S, ALL_STEPS, LOOKS = 0.1, 960 * 32, 40
COMPUTE = {"step_s": {"kind": "uniform", "low_s": 0.95 * STEP_S, "high_s": 1.05 * STEP_S}}
NETWORKS = {
    "LAN": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
    "internet": {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": 100},
}
UNEVEN = {"kind": "dirichlet", "alpha": 0.1}
PARTITIONS = {"IID": {"kind": "iid"}, "Dirichlet 0.1": UNEVEN}
# Learning rate by (data, nodes, links). It is higher for many nodes with few steps each.
WORLDS = {
    ("Dirichlet 0.1", 16, "LAN"): 0.3, ("Dirichlet 0.1", 32, "LAN"): 0.3, ("Dirichlet 0.1", 128, "LAN"): 0.6,
    ("Dirichlet 0.1", 32, "internet"): 0.3, ("IID", 32, "LAN"): 1.0, ("IID", 128, "LAN"): 1.0,
}  # fmt: skip
SETTINGS = {
    "fp32 every 8": {"codec": "fp32", "mix_every_steps": 8},
    "int8 every 2": {"codec": "int8", "mix_every_steps": 2},
    "int8 every 4": {"codec": "int8", "mix_every_steps": 4},
    "moniqua4 every 1": {"codec": "moniqua4", "mix_every_steps": 1},
    "moniqua4 every 2": {"codec": "moniqua4", "mix_every_steps": 2},
    "int8 every 2, kappa 0.1": {
        "codec": "int8", "mix_every_steps": 2, "correction": 0.1, "outer_momentum": 0.5, "outer_rate": 0.7,
    },
    "int8 every 1, twice the bytes": {"codec": "int8", "mix_every_steps": 1},
    "the default": {},
}  # fmt: skip

# -- consensus control -------------------------------------------------------------------------------------------------
STEPS, PEERS = 960, 32
RATE, FALLING = {"lr": 0.3}, {"lr": 0.3, "schedule": "cosine", "schedule_steps": STEPS}
CONTROLLED = {
    "IID": {"partition": {"kind": "iid"}, "optimizer": RATE},
    "Dirichlet 0.1": {"partition": UNEVEN, "optimizer": RATE},
    "Dirichlet 0.1, falling rate": {"partition": UNEVEN, "optimizer": FALLING},
}
ROWS = {f"every {every} steps": {"mix_every_steps": every} for every in (2, 4, 8, 16, 32)} | {
    f"target {target}": {"mix_every_steps": 8, "consensus_target": float(target)} for target in (1, 2, 4, 8, 16)
}


def scenario(seed, peers, end, task, network, gossip, **more):
    return Scenario.from_mapping({
        "name": "interval", "seed": seed, "peers": peers, "duration_s": end,
        "task": {"dataset": "digits", "model": "mlp", "batch_size": 8} | task, "network": network,
        "membership": {"mode": "ideal"}, "gossip": gossip, "compute": COMPUTE,
    } | more)  # fmt: skip


def controlled(world, settings, seed):
    """Simulate a run; return the accuracy of the mean and the worst node in %, and the MB a node."""
    end = STEPS * STEP_S
    played = scenario(
        seed, PEERS, end, CONTROLLED[world], NETWORKS["LAN"], settings, report={"every_s": end}, fidelity="whole"
    )
    summary = simulate(played, progress=False).summary
    return 100 * summary["accuracy"]["mean"], 100 * summary["accuracy"]["min"], summary["bytes_sent"] / PEERS / 1e6


def control(seeds):
    print("| | " + " | ".join(f"{world}: mean (worst) | MB" for world in CONTROLLED) + " |")
    print("|---|" + "---|---|" * len(CONTROLLED))
    for row, settings in ROWS.items():
        cells = []
        for world in CONTROLLED:
            runs = [controlled(world, settings, seed) for seed in range(1, seeds + 1)]
            mean, worst, sent = (statistics.mean(each) for each in zip(*runs, strict=True))
            cells.append(f"{mean:.1f} ({worst:.1f}) | {sent:.2f}")
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)


# -- the grid ----------------------------------------------------------------------------------------------------------
def key_of(world, settings, seed):
    return json.dumps([*world, SETTINGS[settings], WORLDS[world], seed], sort_keys=True)


def play(world, settings, seed):
    """Simulate a run, and return its figures at the end."""
    data, peers, network = world
    end = ALL_STEPS // peers * STEP_S
    task = {"partition": PARTITIONS[data], "optimizer": {"lr": WORLDS[world]}}
    report = {"every_s": end / LOOKS}
    played = scenario(seed, peers, end, task, NETWORKS[network], SETTINGS[settings], report=report)
    result = simulate(played, progress=False)
    looks = result.history[-4:]
    return {
        "mean": statistics.mean(look["accuracy_mean"] for look in looks),
        "worst": statistics.mean(look["accuracy_min"] for look in looks),
        "average": looks[-1]["accuracy_average_model"],
        "mb": looks[-1]["bytes_sent"] / peers / 1e6, "mixes": looks[-1]["mixes"],
        "interval": result.summary["interval_steps"],
    }  # fmt: skip


def read_cache():
    lines = CACHE.read_text(encoding="utf-8").splitlines() if CACHE.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def play_grid(seeds, rows):
    """Simulate the runs that are not cached; the first seed of all cells comes before the second seed."""
    cache = read_cache()
    CACHE.parent.mkdir(exist_ok=True)
    with CACHE.open("a", encoding="utf-8") as file:
        for seed in range(1, seeds + 1):
            for settings in rows:
                for world in WORLDS:
                    key = key_of(world, settings, seed)
                    if key not in cache:
                        figures = play(world, settings, seed)
                        file.write(json.dumps({"key": key, **figures}) + "\n")
                        file.flush()
                        print(f"{world} {settings} {seed}: {100 * figures['mean']:.1f} %", file=sys.stderr, flush=True)


def cell(lines):
    if not lines:
        return "–"  # noqa: RUF001  a dash for a cell without runs
    mean, worst, sent = (statistics.mean(line[name] for line in lines) for name in ("mean", "worst", "mb"))
    return f"{100 * mean:.1f} ({100 * worst:.0f}) {sent:.2f}" + ("" if len(lines) > 1 else " *")


def print_grid(seeds, rows):
    cache = read_cache()
    print("| mean (worst) MB | " + " | ".join(f"{data}, {peers}, {net}" for data, peers, net in WORLDS) + " |")
    print("|---" * (1 + len(WORLDS)) + "|")
    for settings in rows:
        keys = [[key_of(world, settings, seed) for seed in range(1, seeds + 1)] for world in WORLDS]
        cells = [cell([cache[key] for key in row if key in cache]) for row in keys]
        if set(cells) != {cell([])}:
            print(f"| {settings} | " + " | ".join(cells) + " |")
    print("\n*: one seed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--play", action="store_true", help="play what is missing of the grid first")
    parser.add_argument("--row", action="append", choices=SETTINGS, help="only this row; may be repeated")
    parser.add_argument("--control", action="store_true", help="a fixed interval beside consensus control")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.control:
        control(args.seeds)
        return
    if args.play:
        play_grid(args.seeds, args.row or SETTINGS)
    print_grid(args.seeds, args.row or SETTINGS)


if __name__ == "__main__":
    main()
