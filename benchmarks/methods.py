"""A comparison of all published methods on the same work: writes the tables of docs/results/methods.md.

    python benchmarks/methods.py [--dataset digits] [--condition iid]... [--method sgp]... [--seeds 3] [--fresh]
                                 [--page]

Each method takes the same number of local steps with SGD without momentum at its learning rate in RATES, and mixes as
often as its configuration says, which its bytes show. Finished runs are kept in runs/methods.jsonl. Means over the
seeds are kept in docs/results/methods.json, each with the day on which it was played, and the tables are written from
that file: so a part can be played anew.
"""

import argparse
import dataclasses
import json
import math
import signal
import statistics
import time

import methods_page
import numpy as np
import torch
from pages import Runs

from gossip.config import Config, as_published
from gossip.config.internal import Internal
from gossip.config.methods import METHODS
from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation

MEANS = methods_page.PAGE.with_suffix(".json")

STEP_S = 0.1  # duration of a step, +-5 %
JOBS = {"digits": {"peers": 32, "steps": 960}, "fashion-mnist": {"peers": 16, "steps": 480}}
RATE_SCALE = {"digits": 1.0, "fashion-mnist": 0.05}  # Fashion-MNIST's inputs have ten times the norm
NETWORK = {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100}
CONDITIONS = {
    "iid": "IID", "dirichlet": "Dirichlet 0.1", "loss": "Dirichlet 0.1, 30 % failed exchanges",
    "churn": "Dirichlet 0.1, churn", "iid-paces": "IID, uneven paces", "paces": "Dirichlet 0.1, uneven paces",
}  # fmt: skip
DIGITS_ALONE = ("iid-paces", "paces")
SLOW, SLOWDOWN = 6 / 32, 4  # share of slow peers, and the factor of their step times
# Loss probability of messages and streams for which about 30 % of the started exchanges fail. A pair needs two streams,
# an offer and its answer; a push needs one stream. A group's mix fails if one of its members fails.
LOSS = {"pair": 0.135, "push-sum": 0.21, "row-stochastic": 0.17, "group": 0.033}
LOSS_ALL = {"digits": 0.0025, "fashion-mnist": 0.0007}  # for a group of all peers, where one loss fails all of them
# Lifetimes of V100 spot machines in February 2023 (sim/worlds.toml). They pass 14 times as fast in a run of 960 steps,
# so one machine in three stops during a run. Downtimes pass 160 times as fast, so most machines return during the run.
UP_SCALE, DOWN_SCALE = 444 / 960, 30 / 960  # seconds for each step of a run


def churn(steps):
    return {
        "up": {"kind": "weibull", "shape": 0.59, "scale_s": UP_SCALE * steps},
        "down": {"kind": "weibull", "shape": 0.71, "scale_s": DOWN_SCALE * steps},
    }


CPU_LIMIT_S = 180  # limit of one run, which takes 1 to 15 s
LONGEST = 8  # a run ends early after this multiple of its steps' duration, because nodes in lockstep can stall
SLICE_S = 0.2

# Its optimizer is not simulated. The last commit that could play its rows, whose means stay, is ef422601.
NOT_PLAYED = "qg-dsgdm"
# The rows of the tables in their order, with rates for (IID, Dirichlet 0.1), tuned on digits with seed 1: the best of
# three by the accuracy just after a mix.
RATES = {
    "d-psgd": (1.0, 1.0),
    "ad-psgd": (1.0, 1.0),
    "sgp": (1.0, 1.0),
    "osgp": (1.0, 1.0),
    "gosgd": (1.0, 0.3),
    "epidemic": (1.0, 0.3),
    "moshpit": (1.0, 0.3),
    "diloco": (0.3, 0.3),
    "diloco, H 8": (0.3, 0.3),
    "noloco": (0.3, 0.3),
    "noloco, H 8": (1.0, 0.3),
    "streaming-diloco": (0.3, 0.3),
    "streaming-diloco, H 8": (1.0, 0.3),
    "sparta": (0.3, 0.3),
    "qg-dsgdm": (0.1, 0.3),
    "proxskip": (1.0, 0.3),
    "moniqua": (1.0, 0.3),
    "clippedgossip": (1.0, 0.3),
    "balance": (0.3, 0.1),
    "local-sgd": (0.3, 0.3),
    "default": (1.0, 0.3),
    "default, every 8 steps": (1.0, 0.3),
    "default, no correction": (1.0, 0.3),
    "plain mean, every 8 steps": (1.0, 0.3),
    "quasi-global, every 8 steps": (0.3, 0.3),
    "one-way push": (1.0, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of every table: a published method, or one of ours."""

    name: str
    changes: dict


def rows(peers):
    """Return the rows: all of METHODS, and ours; methods that mix less often than every 8 steps also run at 8."""
    found = []
    for name in METHODS:
        if name == NOT_PLAYED:
            continue
        changes = dict(as_published(name))
        if name == "epidemic":
            changes["partners"] = math.ceil(math.log2(peers))
        found.append(Row(name, changes))
        kind, _, count = changes.get("part", "all").partition(" ")
        every, each = changes.get("mix_every_steps", 8), int(count) if kind == "fragments" else 1
        if 8 < every * each < 1000:
            found.append(Row(f"{name}, H 8", changes | {"mix_every_steps": max(1, 8 // each)}))
    found += [
        Row("default", {}),
        Row("default, every 8 steps", {"mix_every_steps": 8}),
        Row("default, no correction", {"correction": 0.0}),
        Row("plain mean, every 8 steps", {"outer_momentum": 0.0, "outer_rate": 1.0}),
        Row("one-way push", {"mixing": "row-stochastic", "filter": "none"}),
    ]
    # Drop a row if a later one has the same settings under another name.
    return [row for at, row in enumerate(found) if not any(alike(row, other) for other in found[at + 1 :])]


def alike(one, other):
    try:
        return Config(**one.changes) == Config(**other.changes)
    except ConfigError:
        return False


def rate_of(row, condition):
    return RATES[row.name][0 if condition.startswith("iid") else 1]


def scenario(job):
    """Return the scenario of a run as nested mappings; timeouts make a failed exchange cost about one interval."""
    dataset, condition, row, seed, rate = job
    changes = dict(row.changes)
    interval_s = STEP_S * min(changes.get("mix_every_steps", 8), 50)
    waits = {
        # A partner answers at its next step boundary, up to a step later.
        "stall_s": interval_s,
        "internal": Internal(reply_timeout_s=max(interval_s, 2.5 * STEP_S), bench_s=interval_s),
    }
    optimizer = {"lr": rate * RATE_SCALE[dataset]}
    steps, peers = JOBS[dataset]["steps"], JOBS[dataset]["peers"]
    partition = {"kind": "iid"} if condition.startswith("iid") else {"kind": "dirichlet", "alpha": 0.1}
    table = {
        "name": row.name, "seed": seed, "peers": peers, "duration_s": steps * STEP_S,
        "task": {"dataset": dataset, "model": "mlp", "partition": partition, "optimizer": optimizer},
        "network": dict(NETWORK), "membership": {"mode": "ideal"},
        "compute": {"step_s": {"kind": "uniform", "low_s": 0.95 * STEP_S, "high_s": 1.05 * STEP_S}},
        "gossip": waits | changes,
    }  # fmt: skip
    if condition == "loss":
        everybody = changes.get("group_size") == 0
        table["network"]["congestion"] = "none"  # TCP would retransmit what is lost
        table["network"]["loss"] = LOSS_ALL[dataset] if everybody else LOSS[changes.get("mixing", "pair")]
    if condition == "churn":
        table["churn"] = churn(steps)
    if condition.endswith("paces"):
        step_s = {"kind": "uniform", "low_s": 0.95 * SLOWDOWN * STEP_S, "high_s": 1.05 * SLOWDOWN * STEP_S}
        table["fleet"] = [{"number": 0, "to": round(SLOW * peers) - 1, "step_s": step_s}]
    return table


def play(job):
    """Simulate one run, and return its figures."""
    torch.set_num_threads(1)
    began_s = time.process_time()
    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    simulation = Simulation(Scenario.from_mapping(scenario(job)))
    learners, swarm = simulation.learners, simulation.swarm
    hosts, training = swarm.hosts, swarm.training
    mixed, had = after_mixes(learners, training)
    steps, peers = JOBS[job[0]]["steps"], JOBS[job[0]]["peers"]
    with np.errstate(all="ignore"):  # a diverging model is a result
        while training.steps < steps * peers and swarm.now < LONGEST * steps * STEP_S:
            swarm.events.run_until(swarm.now + SLICE_S)
            for host in hosts:
                if not host.gone:
                    training.count_steps(host, swarm.now)
        last = simulation.row()
        ready = [host.row for host in hosts if not host.gone and host.peer.view.ready]
        mixed[~had] = learners.matrix[~had]  # nodes that never mixed count as they are
        _, accuracies, _ = learners.evaluate(mixed[ready])
    signal.setitimer(signal.ITIMER_PROF, 0)
    failed = sum(host.peer.exchanges.failures for host in hosts)
    began = failed + sum(host.peer.exchanges.done_count for host in hosts)
    return {
        "mixed": float(accuracies.mean()), "mixed_worst": float(accuracies.min()), "now": last["accuracy_mean"],
        "average": last["accuracy_average_model"], "distance": last["consensus_distance"],
        "mb": last["bytes_sent"] / peers / 1e6, "virtual_s": swarm.now, "steps": training.steps / peers,
        "mixes": last["mixes"], "failed": failed / max(began, 1), "cpu_s": time.process_time() - began_s,
        "cut_off": sum(simulation.level.counts().refusals.values()) / max(simulation.level.mixes, 1),
    }  # fmt: skip


def too_long(number, frame):
    raise TimeoutError(f"more than {CPU_LIMIT_S} s of CPU")


def after_mixes(learners, training):
    """Record each model just after its last mix from now on.

    Returns:
        The recorded models (peers, elements), and True for each row that has mixed (peers,). Both are updated in place.
    """
    after, had = learners.matrix.copy(), np.zeros(len(learners.matrix), bool)
    plain_visit = training.visit_boundary

    def visit_boundary(host, takes_spare):
        visit = plain_visit(host, takes_spare)
        if visit.updates or visit.restored or visit.adopted:
            after[host.row], had[host.row] = learners.matrix[host.row], True
        return visit

    training.visit_boundary = visit_boundary
    return after, had


# -- runs ----------------------------------------------------------------------------------------------------------
def settings_of(job):
    """Return all that a finished run must share with this one: its world, and the Config with all defaults."""
    table = scenario(job)
    world = [{key: value for key, value in table.items() if key not in ("gossip", "name")}, JOBS[job[0]], LONGEST]
    try:
        config = Scenario.from_mapping(table).config
    except ConfigError as refused:
        return [*world, str(refused)]
    numbers = {} if config.measures_momentum else dict(zip(("outer_momentum", "outer_rate"), config.outer, strict=True))
    return [*world, dataclasses.asdict(config) | numbers]


# -- means over the seeds ----------------------------------------------------------------------------------------------
def mean_of(runs):
    """Return the mean of each figure over the seeds, the spread of two of them, and the day of the last run."""
    names = [name for name in runs[0] if name not in ("cpu_s", "played")]
    cell = {name: round(statistics.mean(run[name] for run in runs), 5) for name in names}
    for name in ("mixed", "now"):
        spread = statistics.stdev(run[name] for run in runs) if len(runs) > 1 else 0.0
        cell[f"{name}_spread"] = round(spread, 5)
    return cell | {"seeds": len(runs), "played": max(run["played"] for run in runs)}


def read_means():
    """Return the means that were kept, by (dataset, condition, row)."""
    lines = json.loads(MEANS.read_text(encoding="utf-8")) if MEANS.exists() else []
    return {tuple(key): cell for key, cell in lines}


def write_means(means):
    """Write the means, one line each, so that a difference of two versions shows what was played anew."""
    lines = [json.dumps([list(key), cell]) for key, cell in sorted(means.items())]
    MEANS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", action="append", choices=list(JOBS), help="one data set; may be repeated")
    parser.add_argument("--condition", action="append", choices=list(CONDITIONS), help="one condition; may be repeated")
    parser.add_argument("--method", action="append", help="one row by its name; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="play again what was played before")
    parser.add_argument("--page", action="store_true", help="play nothing: write the tables from what was played")
    args = parser.parse_args()
    runs = Runs("methods", args.fresh)
    found = {dataset: [row for row in rows(job["peers"]) if not args.method or row.name in args.method]
             for dataset, job in JOBS.items()}  # fmt: skip
    jobs = [
        (dataset, condition, row, seed, rate_of(row, condition))
        for seed in range(1, args.seeds + 1)  # the first seed of all rows comes first
        for dataset in args.dataset or JOBS
        for condition in args.condition or CONDITIONS
        if dataset == "digits" or condition not in DIGITS_ALONE
        for row in found[dataset]
    ]
    if not args.page:
        runs.play(jobs, play, settings_of)
    means, cells = read_means(), {}
    for job in jobs:
        figures = runs.get(settings_of(job))
        if figures:
            cells.setdefault((job[0], job[1], job[2].name), []).append(figures)
    for key, figures in cells.items():
        cell, before = mean_of(figures), means.get(key)
        if before is None or (cell["seeds"], cell["played"]) >= (before["seeds"], before["played"]):
            means[key] = cell
    write_means(means)
    columns = {
        (dataset, condition): f"{dataset}, {name}"
        for dataset in JOBS for condition, name in CONDITIONS.items()
        if dataset == "digits" or condition not in DIGITS_ALONE
    }  # fmt: skip
    methods_page.write(means, list(RATES), RATES, columns, list(JOBS))


if __name__ == "__main__":
    main()
