"""How often to mix: a fixed interval beside consensus control, by accuracy and bytes.

    python benchmarks/interval.py [--seeds 3]

Thirty-two peers learn digits, IID and Dirichlet 0.1, at a constant rate and at one that falls to nothing. A row of a
fixed interval mixes every so many steps; one of control begins at 8 and mixes up to four times as often or as rarely,
so that nodes stay ``consensus_target`` local steps apart. Seconds of one core a run.
"""

import argparse
import statistics

import torch

from sim import Scenario, simulate

STEPS, STEP_S, PEERS = 960, 0.1, 32
RATE, FALLING = {"lr": 0.3}, {"lr": 0.3, "schedule": "cosine", "schedule_steps": STEPS}
UNEVEN = {"kind": "dirichlet", "alpha": 0.1}
WORLDS = {
    "IID": {"partition": {"kind": "iid"}, "optimizer": RATE},
    "Dirichlet 0.1": {"partition": UNEVEN, "optimizer": RATE},
    "Dirichlet 0.1, falling rate": {"partition": UNEVEN, "optimizer": FALLING},
}
ROWS = {f"every {every} steps": {"mix_every_steps": every} for every in (2, 4, 8, 16, 32)} | {
    f"target {target}": {"mix_every_steps": 8, "consensus_target": float(target)} for target in (1, 2, 4, 8, 16)
}


def play(world, settings, seed):
    end = STEPS * STEP_S
    summary = simulate(
        Scenario.from_mapping(
            {
                "name": "interval", "seed": seed, "peers": PEERS, "duration_s": end, "report": {"every_s": end},
                "task": {"dataset": "digits", "model": "mlp", "batch_size": 8} | WORLDS[world],
                "network": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
                "membership": {"mode": "ideal"}, "fidelity": "whole", "gossip": settings,
                "compute": {"step_s": {"kind": "uniform", "low_s": 0.95 * STEP_S, "high_s": 1.05 * STEP_S}},
            }
        ),
        progress=False,
    ).summary  # fmt: skip
    return 100 * summary["accuracy"]["mean"], 100 * summary["accuracy"]["min"], summary["bytes_sent"] / PEERS / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| | " + " | ".join(f"{world}: mean (worst) | MB" for world in WORLDS) + " |")
    print("|---|" + "---|---|" * len(WORLDS))
    for row, settings in ROWS.items():
        cells = []
        for world in WORLDS:
            runs = [play(world, settings, seed) for seed in range(1, args.seeds + 1)]
            mean, worst, sent = (statistics.mean(each) for each in zip(*runs, strict=True))
            cells.append(f"{mean:.1f} ({worst:.1f}) | {sent:.2f}")
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
