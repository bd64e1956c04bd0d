"""The outer step of decision 22 compared with the plain mean of a pair, over inner optimizers, data and worlds.

    python benchmarks/outer.py [--inner] [--worlds]

Each cell has accuracies in %: the mean over nodes at the end, in brackets the worst node, and the average of all
models, over two or three seeds. Each cell of an inner optimizer uses the best of three learning rates. Neither way has
the correction of decision 94, and both mix in fp32 every 8 steps. It takes ten minutes of one core.
"""

import argparse
import statistics

import torch

from sim import Scenario, simulate

STEP_S = 0.1
WAYS = {"plain mean": {"outer_momentum": 0.0, "outer_rate": 1.0}, "outer step": {"correction": 0.0}}
PARTITIONS = {"IID": {"kind": "iid"}, "Dirichlet 0.1": {"kind": "dirichlet", "alpha": 0.1}}
TASKS = {"digits": (32, 960), "fashion-mnist": (16, 480)}  # peers, steps
INNER_OPTIMIZERS = {  # optimizer, and the learning rates to try by data set
    "SGD": ({"name": "sgd"}, {"digits": (0.1, 0.3, 1.0), "fashion-mnist": (0.03, 0.1, 0.3)}),
    "SGD, momentum 0.9": ({"name": "sgd", "momentum": 0.9}, dict.fromkeys(TASKS, (0.01, 0.03, 0.1))),
    "AdamW": ({"name": "adamw"}, dict.fromkeys(TASKS, (0.001, 0.003, 0.01))),
}
WORLDS = {  # peers, and the changes from 32 peers of equal speed on a fast network
    "2 nodes": (2, {}),
    "4 nodes": (4, {}),
    "128 nodes": (128, {}),
    "a fifth ten times slower": (32, {"compute.stragglers": {"share": 0.2, "slowdown": 10}}),
    "step times lognormal, sigma 0.7": (32, {"compute.step_s": {"kind": "lognormal", "median": STEP_S, "sigma": 0.7}}),
    "an exchange takes half an interval": (32, {"network.rate_mbit_s": 0.4}),
    "an exchange takes two intervals": (32, {"network.rate_mbit_s": 0.1, "gossip.slowest_rate_mb_s": 0.005}),
    "latency 50 ms": (32, {"network.latency": {"kind": "constant", "value_ms": 50}}),
    "a mix every 32 steps": (32, {"gossip.mix_every_steps": 32}),
}


def scenario(dataset, peers, steps, partition, optimizer, seed):
    end = steps * STEP_S
    return Scenario.from_mapping(
        {
            "name": "outer", "seed": seed, "peers": peers, "duration_s": end, "report": {"every_s": end},
            "task": {
                "dataset": dataset, "model": "mlp", "batch_size": 8, "partition": partition, "optimizer": optimizer,
            },
            "network": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
            "membership": {"mode": "ideal"}, "fidelity": "whole", "gossip": {"mix_every_steps": 8},
            "compute": {"step_s": {"kind": "uniform", "low_s": 0.95 * STEP_S, "high_s": 1.05 * STEP_S}},
        }
    )  # fmt: skip


def figures(run):
    result = simulate(run, progress=False)
    accuracy, last = result.summary["accuracy"], result.history[-1]
    return 100 * accuracy["mean"], 100 * accuracy["min"], 100 * last["accuracy_average_model"]


def mean(runs):
    return [statistics.mean(column) for column in zip(*map(figures, runs), strict=True)]


def cell(means):
    return "{:.1f} ({:.1f}) \\| {:.1f}".format(*means)


def inner():
    yield "| data | inner optimizer | " + " | ".join(WAYS) + " |"
    yield "|---|---|" + "---|" * len(WAYS)
    for dataset, (peers, steps) in TASKS.items():
        for data, partition in PARTITIONS.items():
            for name, (optimizer, rates) in INNER_OPTIMIZERS.items():
                cells = []
                for way in WAYS.values():
                    tried = []
                    for rate in rates[dataset]:
                        runs = [
                            scenario(dataset, peers, steps, partition, optimizer | {"lr": rate}, seed).replace(
                                **{f"gossip.{key}": value for key, value in way.items()}
                            )
                            for seed in (1, 2)
                        ]
                        tried.append((mean(runs), rate))
                    best, rate = max(tried)
                    cells.append(f"{cell(best)} at {rate:g}")
                yield f"| {dataset}, {data} | {name} | " + " | ".join(cells) + " |"


def worlds():
    columns = [f"{data}, {way}" for data in PARTITIONS for way in WAYS]
    yield "| world | " + " | ".join(columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for name, (peers, changes) in WORLDS.items():
        cells = [
            cell(mean(
                scenario("digits", peers, 960, partition, {"name": "sgd", "lr": 0.3}, seed).replace(
                    **changes, **{f"gossip.{key}": value for key, value in way.items()}
                )
                for seed in ((1, 2) if peers > 64 else (1, 2, 3))
            ))
            for partition in PARTITIONS.values() for way in WAYS.values()
        ]  # fmt: skip
        yield f"| {name} | " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", action="store_true", help="inner optimizers alone")
    parser.add_argument("--worlds", action="store_true", help="worlds alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for table, is_chosen in ((inner, args.inner), (worlds, args.worlds)):
        if is_chosen or not (args.inner or args.worlds):
            for line in table():
                print(line, flush=True)
            print()


if __name__ == "__main__":
    main()
