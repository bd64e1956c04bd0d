"""The accuracy of a node's averaged weights, compared with its own weights and the average of all nodes.

    python benchmarks/averaged.py [--cell "digits, IID"]... [--seeds 3] [--joining]

Cells are those of benchmarks/methods.py, with the default settings where none are named: nodes choose their interval
and codec. The columns are ways to obtain one model from a node. Figures are accuracies in % of the mean node, and in
brackets of the worst node, over the seeds. --joining simulates churn with newcomers that fetch their donors' averages
instead of their weights. It takes half an hour of one core.
"""

import argparse
from collections import defaultdict

import numpy as np
import torch
from methods import JOBS, SLICE_S, STEP_S, Row, after_mixes, scenario

from gossip.averaging.boundary import Boundary
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation

FACTOR = 0.8  # the weight of the old average at a mix, as in docs/recipes.md
FACTORS = (0.5, FACTOR, 0.9)
MANY = "digits, 128 nodes"  # as many steps in all as the other runs on digits
WORLDS = JOBS | {MANY: {"peers": 128, "steps": 240}}
ADAMW = {"name": "adamw", "lr": 0.003}
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0, "correction": 0.0, "mix_every_steps": 8}
CELLS = {  # world, condition, learning rate, changes of the default settings, another optimizer
    "digits, IID": ("digits", "iid", 1.0, {}, None),
    "digits, Dirichlet 0.1": ("digits", "dirichlet", 0.3, {}, None),
    "the same, every 8 steps": ("digits", "dirichlet", 0.3, {"mix_every_steps": 8}, None),
    "the same at rate 0.1": ("digits", "dirichlet", 0.1, {}, None),
    "the same, 30 % failing": ("digits", "loss", 0.3, {}, None),
    "the same, churn": ("digits", "churn", 0.3, {}, None),
    "the same, every 32 steps": ("digits", "dirichlet", 0.3, {"mix_every_steps": 32}, None),
    "the same, AdamW": ("digits", "dirichlet", 0.0, {}, ADAMW),
    "the same, plain mean, every 8 steps": ("digits", "dirichlet", 0.3, PLAIN, None),
    "the same, groups every 8 steps": ("digits", "dirichlet", 0.3, {"mixing": "group"}, None),
    "the same, push-sum every 8 steps": ("digits", "dirichlet", 0.3, {"mixing": "push-sum", "filter": "none"}, None),
    "the same, 4 fragments every 2": (
        "digits", "dirichlet", 0.3,
        {"part": "fragments 4", "mix_every_steps": 2, "outer_momentum": 0.5, "outer_rate": 0.7}, None,
    ),
    "digits, Dirichlet 0.1, 128 nodes at rate 0.6": (MANY, "dirichlet", 0.6, {}, None),
    "Fashion-MNIST, IID": ("fashion-mnist", "iid", 1.0, {}, None),
    "Fashion-MNIST, Dirichlet 0.1": ("fashion-mnist", "dirichlet", 0.3, {}, None),
}  # fmt: skip


class Averages:
    """The averaged weights of all peers of a simulation, for each factor."""

    def __init__(self, simulation):
        self.matrix, self.hosts = simulation.learners.matrix, simulation.swarm.hosts
        self.averages = {factor: self.matrix.copy() for factor in FACTORS}
        self.taken = np.zeros(len(self.matrix), np.int64)  # elements averaged so far, (peers,)
        self.rows = {}  # the row of each boundary, by id

    def on_visit(self, boundary, visit):
        """Average a row's weights after a visit that added mixes; begin anew after one that replaced them."""
        if id(boundary) not in self.rows:  # a peer has joined
            self.rows = {id(host.boundary): host.row for host in self.hosts if not host.gone}
        row = self.rows[id(boundary)]
        if visit.adopted or visit.restored:
            self.taken[row] = 0
            for average in self.averages.values():
                average[row] = self.matrix[row]
        elif visit.updates:
            parts = [update.positions for update in visit.updates]
            for part in (None,) if any(part is None for part in parts) else parts:
                self.average_part(row, part)

    def average_part(self, row, part):
        """Average the elements at the positions ``part`` of a row; None: all elements."""
        begins, weights = not self.taken[row], self.matrix[row]
        self.taken[row] += len(weights) if part is None else len(part)
        mixes = -(-int(self.taken[row]) // len(weights))
        positions = slice(None) if part is None or begins else part
        for factor, average in self.averages.items():
            average[row, positions] += max(1 - factor, 1 / mixes) * (weights[positions] - average[row, positions])


def watched(simulation, averages):
    """Report each visit to a boundary to ``averages``, and return a function that ends the reports."""
    usual_visit = Boundary.visit

    def visit(self, *arguments):
        visit = usual_visit(self, *arguments)
        averages.on_visit(self, visit)
        return visit

    Boundary.visit = visit
    return lambda: setattr(Boundary, "visit", usual_visit)


def run(simulation, world):
    steps, peers = WORLDS[world]["steps"], WORLDS[world]["peers"]
    swarm = simulation.swarm
    with np.errstate(all="ignore"):
        while swarm.training.steps < steps * peers and swarm.now < 8 * steps * STEP_S:
            swarm.events.run_until(swarm.now + SLICE_S)
            for host in swarm.hosts:
                if not host.gone:
                    swarm.training.count_steps(host, swarm.now)
        simulation.measures.row()  # brings every model up to date
    return [host.row for host in swarm.hosts if not host.gone and host.peer.view.ready]


def built(world, condition, rate, changes, optimizer, seed):
    table = scenario((world.partition(",")[0], condition, Row("averaged", changes), seed, rate))
    table["peers"], table["duration_s"] = WORLDS[world]["peers"], WORLDS[world]["steps"] * STEP_S
    if optimizer is not None:
        table["task"]["optimizer"] = optimizer
    return Simulation(Scenario.from_mapping(table))


def beside_another(models, seed):
    """Return the mean of each model with that of a random other node."""
    count = len(models)
    others = (np.arange(count) + np.random.default_rng(seed).integers(1, count, count)) % count
    return (models + models[others]) / 2


def play(cell, seed):
    """Simulate a cell, and return the accuracies of all peers, (peers,), for each way to obtain a model."""
    simulation = built(*cell, seed)
    learners, averages = simulation.learners, Averages(simulation)
    after_mix, has_mixed = after_mixes(learners)
    end = watched(simulation, averages)
    try:
        ready = run(simulation, cell[0])
    finally:
        end()
    now = learners.matrix[ready]
    after_mix[~has_mixed] = learners.matrix[~has_mixed]
    ways = {"at an instant": now, "just after a mix": after_mix[ready]}
    ways |= {f"average, {factor:g}": averages.averages[factor][ready] for factor in FACTORS}
    ways |= {"one mix into a copy": beside_another(now, seed), "all nodes": now.mean(0, keepdims=True)}
    return {way: 100 * learners.evaluate(np.ascontiguousarray(models))[1] for way, models in ways.items()}


def table(cells, seeds):
    heads = None
    for name in cells:
        rows_by_way = defaultdict(list)  # mean and least accuracy of each seed
        for seed in range(1, seeds + 1):
            for way, accuracies in play(CELLS[name], seed).items():
                rows_by_way[way].append((accuracies.mean(), accuracies.min()))
        if heads is None:
            heads = list(rows_by_way)
            print("| | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads), flush=True)
        means = {way: np.mean(rows, axis=0) for way, rows in rows_by_way.items()}
        row = [f"{means[way][0]:.1f}" + (f" ({means[way][1]:.1f})" if way != "all nodes" else "") for way in heads]
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


def joining(seeds):
    """Print the accuracy of newcomers that fetch quarters of the model from four donors: weights or averages."""
    after = (0, 1, 2, 4)  # the newcomer's mixes after which it is measured
    print("| | newcomers take | at once | after " + " | ".join(map(str, after[1:])) + " mixes | all, at the end |")
    print("|---|---|" + "---|" * (len(after) + 1))
    for dataset in JOBS:
        for way in ("weights", "averages"):
            seen = defaultdict(list)
            for seed in range(1, seeds + 1):
                for place, accuracies in newcomers(dataset, seed, way == "averages", after).items():
                    seen[place].extend(accuracies)
            row = [f"{np.mean(seen[place]):.1f}" for place in (*after, "end")]
            print(f"| {dataset}, {len(seen[0])} newcomers | {way} | " + " | ".join(row) + " |", flush=True)


def newcomers(dataset, seed, averaged, after):
    simulation = built(dataset, "churn", 0.3, {}, None, seed)
    learners, averages = simulation.learners, Averages(simulation)
    matrix, random, mixes = learners.matrix, np.random.default_rng(seed), {}
    seen = defaultdict(list)
    usual_adopt = Boundary.apply_adoption
    usual_on_mixed, usual_on_replaced = learners.on_mixed, learners.on_weights_replaced

    def adopt(boundary, adoption, visit, replaced):
        hosts = [host for host in simulation.swarm.hosts if not host.gone and host.peer.view.ready]
        donors = random.choice([host.row for host in hosts if host.boundary is not boundary], 4)
        donated = averages.averages[FACTOR] if averaged else matrix
        for donor, piece in zip(donors, np.array_split(np.arange(adoption.vector.size), 4), strict=True):
            adoption.vector[piece] = donated[donor][piece]
        usual_adopt(boundary, adoption, visit, replaced)

    def record(row):
        if mixes[row] in after:
            seen[mixes[row]].append(matrix[row].copy())

    def mixed(row):
        usual_on_mixed(row)
        if row in mixes:
            mixes[row] += 1
            record(row)

    def joined(row):
        usual_on_replaced(row)
        mixes[row] = 0
        record(row)

    learners.on_mixed, learners.on_weights_replaced, Boundary.apply_adoption = mixed, joined, adopt
    end = watched(simulation, averages)
    try:
        seen["end"] = list(matrix[run(simulation, dataset)])
    finally:
        end()
        Boundary.apply_adoption = usual_adopt
    return {place: 100 * learners.evaluate(np.stack(models))[1] for place, models in seen.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", choices=list(CELLS), help="one cell; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--joining", action="store_true", help="newcomers alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.joining:
        joining(args.seeds)
    else:
        table(args.cell or list(CELLS), args.seeds)


if __name__ == "__main__":
    main()
