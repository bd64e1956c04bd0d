"""The harm that attackers do to honest peers with each filter: of forty peers 10 or 20 % send false vectors.

    python benchmarks/attackers.py [--dataset digits] [--partition IID] [--filter clip]... [--attack dissensus]...
                                   [--share 0.1]... [--seeds 3] [--seconds 80] [--astray [--rate 0.3]]

The filter "clip" is the default with all its other settings: nodes choose interval and codec. They choose int8 and come
to mix every 2 steps in this network, which has no latency and 100 Mbit/s. All columns train for the same time.

Each cell is the mean accuracy of the honest peers in % over the seeds, and in brackets that of the worst honest peer of
any seed. A run takes 5 to 20 seconds of one core on digits and more on Fashion-MNIST. --astray has no attackers: a
learning rate of 1.0 makes nodes diverge for a while, and the table states how often and for how long, and the accuracy
of the mean and the worst node over time. The worst node at one instant depends on chance.
"""

import argparse
import statistics
import time
from itertools import groupby

import methods
import numpy as np

from gossip.errors import LocalError
from sim import Scenario, simulate
from sim.simulation import Simulation

FILTERS = {
    "none": {},
    "clip": {"filter": "clip"},
    "clip, every 8 steps": {"filter": "clip", "mix_every_steps": 8},
    "balance": {"filter": "balance"},
}
# By name, the kind and scale of lies. The last two are the attacker's own model at half and at 0.9 of its length.
KINDS = {kind: {"kind": kind} for kind in ("sign-flip", "scaled", "random", "nan", "alie", "ipm", "dissensus")} | {
    name: {"kind": "scaled", "scale": scale} for name, scale in (("half", 0.5), ("most", 0.9))
}
ATTACKS = [
    ("nobody", 0.0),
    *((kind, share) for share in (0.1, 0.2) for kind in KINDS),
]
PARTITIONS = {"IID": {"kind": "iid"}, "Dirichlet 1.0": {"kind": "dirichlet", "alpha": 1.0}}
TASKS = {"digits": {}, "fashion-mnist": {"samples_per_peer": 400}}  # limited so that a run takes seconds


def scenario(dataset, partition, rule, kind, share, seed, seconds):
    """Return the scenario of one run; ideal membership and a network without latency isolate the attack's effect."""
    table = {
        "name": "attackers", "seed": seed, "peers": 40, "duration_s": seconds, "fidelity": "whole",
        "task": {"dataset": dataset, "partition": partition, "optimizer": {"lr": 0.1}} | TASKS[dataset],
        "gossip": {"filter": "none"} | rule,
        "network": {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": 100},
        "membership": {"mode": "ideal"},
    }  # fmt: skip
    if share:
        table["attackers"] = {"share": share} | KINDS[kind]
    return Scenario.from_mapping(table)


def cell(args, dataset, partition, rule, kind, share):
    """Simulate a cell of the table, and return "mean (worst)" over the seeds."""
    means, worst = [], []
    for seed in range(1, args.seeds + 1):
        run = scenario(dataset, partition, rule, kind, share, seed, args.seconds)
        try:
            accuracy = simulate(run, progress=False).summary["accuracy"]
        except LocalError:
            return "nobody mixes"
        means.append(100 * accuracy["mean"])
        worst.append(100 * accuracy["min"])
    return f"{statistics.mean(means):.1f} ({min(worst):.1f})"


def tables(args):
    """Yield the lines of the Markdown tables as they are measured."""
    for dataset in args.dataset or ["digits"]:
        for name in args.partition or PARTITIONS:
            partition = PARTITIONS[name]
            yield f"\n### {dataset}, {name}\n"
            filters = args.filter or list(FILTERS)
            yield "| attackers | " + " | ".join(filters) + " |"
            yield "|---|" + "---|" * len(filters)
            for kind, share in ATTACKS:
                if (args.attack and kind not in args.attack) or (share and args.share and share not in args.share):
                    continue
                who = kind if not share else f"{100 * share:.0f} % {kind}"
                cells = [cell(args, dataset, partition, rule, kind, share) for rule in map(FILTERS.get, filters)]
                yield f"| {who} | " + " | ".join(cells) + " |"


# A node is astray below this accuracy, while the others are at 96 %. It is measured only after SETTLED_S, because all
# nodes start with a low accuracy.
ASTRAY, SETTLED_S = 0.8, 16.0
LOOK_S = 8 * methods.STEP_S
WAYS = {
    "the default": {},
    "every 8 steps": {"mix_every_steps": 8},
    "no correction": {"correction": 0.0},
    "no correction, every 8 steps": {"correction": 0.0, "mix_every_steps": 8},
    "plain mean, every 8 steps": {"outer_momentum": 0.0, "outer_rate": 1.0},
}


def astray(args):
    """Yield a table of how often nodes are astray: digits, IID, 32 peers.

    Each 0.8 s the accuracy of every node just after its last mix is measured. The accuracies are means over the moments
    of the second half of the run, ± the standard error over seeds.
    """
    yield f"\n### digits, IID, rate {args.rate:g}, nobody attacks\n"
    yield "| | filter | mean node | worst node | node-time astray | times | mean length, s | longest, s |"
    yield "|---|---|---|---|---|---|---|---|"
    for way, changes in WAYS.items():
        for rule in args.filter or ("none", "clip"):
            means, worst, share, lengths = [], [], [], []
            for seed in range(1, args.seeds + 1):
                accuracies = over_time(changes | {"filter": rule}, seed, args.rate)
                late, low = accuracies[len(accuracies) // 2 :], accuracies < ASTRAY
                means.append(100 * late.mean())
                worst.append(100 * late.min(axis=1).mean())
                share.append(100 * low.mean())
                lengths += [len([*run]) for node in low.T for is_low, run in groupby(node) if is_low]
            figures = (with_error(means, 2), with_error(worst, 1), f"{with_error(share, 1)} %")
            yield (
                f"| {way} | {rule} | {' | '.join(figures)} | {len(lengths)} | "
                f"{LOOK_S * statistics.mean(lengths or [0]):.1f} | {LOOK_S * max(lengths, default=0):.1f} |"
            )


def with_error(values, digits):
    """Return the mean of the values and the standard error of that mean."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def over_time(changes, seed, rate):
    """Return the accuracy of every node just after its last mix, float64 (moments, nodes)."""
    job = ("digits", "iid", methods.Row("astray", changes), seed, rate)
    simulation = Simulation(Scenario.from_mapping(methods.scenario(job)))
    learners, swarm = simulation.learners, simulation.swarm
    mixed, _ = methods.after_mixes(learners)
    moments = []
    with np.errstate(all="ignore"):  # a diverging model is a result and no error
        while swarm.now < methods.JOBS["digits"]["steps"] * methods.STEP_S:
            swarm.events.run_until(swarm.now + LOOK_S)
            for host in swarm.hosts:
                swarm.training.count_steps(host, swarm.now)
            if swarm.now > SETTLED_S:
                simulation.level.update_models()  # the models of the fast level lag behind
                moments.append(learners.evaluate(mixed)[1])
    return np.array(moments)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", action="append", choices=list(TASKS))
    parser.add_argument("--partition", action="append", choices=list(PARTITIONS))
    parser.add_argument("--filter", action="append", choices=list(FILTERS), help="one column; may be repeated")
    parser.add_argument("--attack", action="append", choices=("nobody", *KINDS), help="one kind; may be repeated")
    parser.add_argument("--share", action="append", type=float, choices=(0.1, 0.2), help="of attackers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=80.0, help="of virtual time; a step takes 0.1")
    parser.add_argument("--astray", action="store_true", help="nobody attacks, at a rate that throws nodes off")
    parser.add_argument("--rate", type=float, default=1.0, help="the learning rate of --astray")
    args = parser.parse_args()
    began = time.process_time()
    for line in (astray if args.astray else tables)(args):
        print(line, flush=True)
    print(f"\n{time.process_time() - began:.0f} s of one core")


if __name__ == "__main__":
    main()
