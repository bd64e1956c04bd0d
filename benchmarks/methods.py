"""A comparison of all published methods on the same work: writes docs/results/methods.md and its picture.

    python benchmarks/methods.py [--dataset digits] [--condition iid]... [--method sgp]... [--seeds 3] [--fresh]
                                 [--tune] [--page]

Each method takes the same number of local steps with the same optimizer at its learning rate in RATES. The optimizer is
SGD without momentum, or with quasi-global momentum if that is the method. Each method mixes as often as its
configuration says, which its bytes show. Finished runs are cached in runs/methods.jsonl as long as their settings stay
the same. The cache does not notice changed code; then use --fresh. Means over the seeds are kept in
docs/results/methods.json, each with the day on which it was played, and the page is written from that file: so a part
can be played anew. --tune simulates digits at three rates a method and prints RATES.
"""

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import signal
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from methods_page import write_page

from gossip.config import Config, as_published
from gossip.config.internal import Internal
from gossip.config.methods import METHODS
from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "runs" / "methods.jsonl"
PAGE = ROOT / "docs" / "results" / "methods.md"
MEANS = PAGE.with_suffix(".json")
PROCESSES = 2  # each run takes one core

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
# Lifetimes are those of V100 spot machines in February 2023 (sim/worlds.toml), 14 times as fast in a run of 960 steps,
# so that one in three stops during a run. Downtimes are theirs 160 times as fast, so that most return during the run.
UP_SCALE, DOWN_SCALE = 444 / 960, 30 / 960  # seconds for each step of a run


def churn(steps):
    return {
        "up": {"kind": "weibull", "shape": 0.59, "scale_s": UP_SCALE * steps},
        "down": {"kind": "weibull", "shape": 0.71, "scale_s": DOWN_SCALE * steps},
    }


CPU_LIMIT_S = 180  # limit of one run, which takes 1 to 15 s
LONGEST = 8  # a run ends early after this multiple of its steps' duration, because nodes in lockstep can stall
SLICE_S = 0.2

QUASI_GLOBAL = 0.9
TUNED = ("iid", "dirichlet")  # conditions with tuned rates; the others use one of these
TUNED_OVER = {"sgd": (0.1, 0.3, 1.0), "quasi-global": (0.03, 0.1, 0.3)}
# Rates for (IID, Dirichlet 0.1), tuned on digits with seed 1: the best of three by the accuracy just after a mix.
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
    quasi_global: bool = False


def rows(peers):
    """Return the rows: all of METHODS, and ours; methods that mix less often than every 8 steps also run at 8."""
    found = []
    for name, method in METHODS.items():
        changes = dict(as_published(name))
        if name == "epidemic":
            changes["partners"] = math.ceil(math.log2(peers))
        quasi_global = "QuasiGlobal" in method.needs
        found.append(Row(name, changes, quasi_global))
        kind, _, count = changes.get("part", "all").partition(" ")
        every, each = changes.get("mix_every_steps", 8), int(count) if kind == "fragments" else 1
        if 8 < every * each < 1000:
            found.append(Row(f"{name}, H 8", changes | {"mix_every_steps": max(1, 8 // each)}, quasi_global))
    found += [
        Row("default", {}),
        Row("default, every 8 steps", {"mix_every_steps": 8}),
        Row("default, no correction", {"correction": 0.0}),
        Row("plain mean, every 8 steps", {"outer_momentum": 0.0, "outer_rate": 1.0}),
        Row("quasi-global, every 8 steps", {"mix_every_steps": 8}, True),
        Row("one-way push", {"mixing": "row-stochastic", "filter": "none"}),
    ]
    # Drop a row if a later one has the same settings under another name.
    return [row for at, row in enumerate(found) if not any(alike(row, other) for other in found[at + 1 :])]


def alike(one, other):
    try:
        same = Config(**one.changes) == Config(**other.changes)
    except ConfigError:
        return False
    return same and one.quasi_global == other.quasi_global


def rate_of(row, condition, cache, tuned=False):
    """Return the rate on digits: from RATES unless ``tuned``, else the best of the simulated ones, else the middle."""
    place = TUNED.index("iid" if condition.startswith("iid") else "dirichlet")
    if row.name in RATES and not tuned:
        return RATES[row.name][place]
    choices = TUNED_OVER["quasi-global" if row.quasi_global else "sgd"]
    figures = {rate: cache.get(("digits", TUNED[place], row.name, 1, rate)) for rate in choices}
    tried = {rate: line["figures"]["mixed"] for rate, line in figures.items() if line and "figures" in line}
    return max(tried, key=tried.get) if len(tried) == len(choices) else choices[1]


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
    optimizer = {"lr": rate * RATE_SCALE[dataset]} | ({"quasi_global": QUASI_GLOBAL} if row.quasi_global else {})
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
    """Simulate one run, and return its figures or the reason for which its settings are refused."""
    torch.set_num_threads(1)
    began_s = time.process_time()
    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        simulation = Simulation(Scenario.from_mapping(scenario(job)))
    except ConfigError as error:
        return {"refused": str(error)}
    learners, swarm = simulation.learners, simulation.swarm
    hosts, training = swarm.hosts, swarm.training
    mixed, had = after_mixes(learners)
    steps, peers = JOBS[job[0]]["steps"], JOBS[job[0]]["peers"]
    with np.errstate(all="ignore"):  # a diverging model is a result
        while training.steps < steps * peers and swarm.now < LONGEST * steps * STEP_S:
            swarm.events.run_until(swarm.now + SLICE_S)
            for host in hosts:
                if not host.gone:
                    training.count_steps(host, swarm.now)
        last = simulation.measures.row()
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
        "cut_off": sum(simulation.level.refusals().values()) / max(simulation.level.mixes, 1),
    }  # fmt: skip


def too_long(number, frame):
    raise TimeoutError(f"more than {CPU_LIMIT_S} s of CPU")


def after_mixes(learners):
    """Record each model just after its last mix from now on.

    Returns:
        The recorded models (peers, elements), and True for each row that has mixed (peers,). Both are updated in place.
    """
    after, had = learners.matrix.copy(), np.zeros(len(learners.matrix), bool)
    plain_mixed, plain_joined = learners.on_mixed, learners.on_weights_replaced

    def mixed(row):
        plain_mixed(row)
        after[row], had[row] = learners.matrix[row], True

    def joined(row):
        plain_joined(row)
        after[row], had[row] = learners.matrix[row], True

    learners.on_mixed, learners.on_weights_replaced = mixed, joined
    return after, had


# -- the cache -----------------------------------------------------------------------------------------------------
def world_of(job):
    """Return the settings outside the Config that a cached run must share."""
    table = scenario(job)
    del table["gossip"], table["name"]
    return json.dumps([table, JOBS[job[0]], LONGEST])


def key_of(job):
    return (*job[:2], job[2].name, *job[3:])


def config_of(job):
    """Return the Config of a peer, with the automatic outer step resolved."""
    config = Scenario.from_mapping(scenario(job)).config
    numbers = {} if config.measures_momentum else dict(zip(("outer_momentum", "outer_rate"), config.outer, strict=True))
    return json.loads(json.dumps(dataclasses.asdict(config) | numbers))


def read_cache():
    lines = CACHE.read_text(encoding="utf-8").splitlines() if CACHE.exists() else []
    return {tuple(line["key"]): line for line in map(json.loads, lines)}


def known(job, cache):
    """Return the cached run of a job if its settings are the current ones; settings that it lacks are ignored."""
    line = cache.get(key_of(job))
    if (
        line is None
        or "refused" in line
        or line["world"] != world_of(job)
        or line["quasi_global"] != job[2].quasi_global
    ):
        return None
    try:
        config = config_of(job)
    except ConfigError:
        return None
    same = all(config[key] == value for key, value in line["config"].items() if key in config and used(key, config))
    return line if same else None


def used(key, config):
    """Return True if a setting has an effect; settings of a filter that is off have none."""
    filter_, _, setting = key.partition("_")
    return filter_ not in ("clip", "balance") or not setting or config["filter"] == filter_


def play_all(jobs, cache, fresh=False):
    """Simulate the runs that are not cached, two at a time, and cache each as it ends."""
    left = [job for job in jobs if fresh or known(job, cache) is None]
    print(f"{len(jobs)} runs, {len(left)} to play", file=sys.stderr, flush=True)
    CACHE.parent.mkdir(exist_ok=True)
    with (
        CACHE.open("a", encoding="utf-8") as file,
        ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool,
    ):
        futures = {pool.submit(play, job): job for job in left}
        for number, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            try:
                figures = future.result()
            except Exception as error:  # one failing method must not end the whole benchmark
                figures = {"refused": f"{type(error).__name__}: {error}"}
            key = key_of(job)
            if "refused" in figures:
                print(f"{number}/{len(left)} {key}: {figures['refused']}", file=sys.stderr, flush=True)
                cache[key] = figures
                continue
            line = {
                "key": key, "world": world_of(job), "quasi_global": job[2].quasi_global, "config": config_of(job),
                "figures": figures, "played": datetime.date.today().isoformat(),
            }  # fmt: skip
            cache[key] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            shown = f"{100 * figures['mixed']:.1f} %, {figures['cpu_s']:.0f} s of CPU"
            print(f"{number}/{len(left)} {' '.join(map(str, key))}: {shown}", file=sys.stderr, flush=True)


# -- means over the seeds ----------------------------------------------------------------------------------------------
def found_runs(jobs, cache):
    """Return the cached runs of these jobs by (dataset, condition, row)."""
    found = {}
    for job in jobs:
        line = known(job, cache)
        if line:
            found.setdefault((job[0], job[1], job[2].name), []).append(line)
    return found


def mean_of(lines):
    """Return the mean of each figure over the seeds, the spread of two of them, and the day of the last run."""
    figures = [line["figures"] for line in lines]
    names = [name for name in figures[0] if all(name in run for run in figures)]
    cell = {name: round(statistics.mean(run[name] for run in figures), 5) for name in names if name != "cpu_s"}
    for name in ("mixed", "now"):
        spread = statistics.stdev(run[name] for run in figures) if len(figures) > 1 else 0.0
        cell[f"{name}_spread"] = round(spread, 5)
    return cell | {"seeds": len(lines), "played": max(line.get("played", "2026-11-25") for line in lines)}


def read_means():
    """Return the means that were kept, by (dataset, condition, row)."""
    lines = json.loads(MEANS.read_text(encoding="utf-8")) if MEANS.exists() else []
    return {tuple(key): cell for key, cell in lines}


def write_means(means):
    """Write the means, one line each, so that a difference of two versions shows what was played anew."""
    lines = [json.dumps([list(key), cell]) for key, cell in sorted(means.items())]
    MEANS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def tuning(found):
    return [
        ("digits", condition, row, 1, rate)
        for row in reversed(found)  # ours first, which are the fastest
        for condition in TUNED
        for rate in TUNED_OVER["quasi-global" if row.quasi_global else "sgd"]
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", action="append", choices=list(JOBS), help="one data set; may be repeated")
    parser.add_argument("--condition", action="append", choices=list(CONDITIONS), help="one condition; may be repeated")
    parser.add_argument("--method", action="append", help="one row by its name; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="play again what was played before")
    parser.add_argument("--tune", action="store_true", help="find the rates of all methods, and print them")
    parser.add_argument("--page", action="store_true", help="play nothing: write the page from what was played")
    args = parser.parse_args()
    cache = read_cache()
    found = {dataset: [row for row in rows(job["peers"]) if not args.method or row.name in args.method]
             for dataset, job in JOBS.items()}  # fmt: skip
    untuned = [row for row in found["digits"] if args.tune or row.name not in RATES]
    if untuned and not args.page:
        play_all(tuning(untuned), cache, args.fresh)
    if args.tune:
        for row in found["digits"]:
            best = tuple(rate_of(row, condition, cache, tuned=True) for condition in TUNED)
            print(f'    "{row.name}": {best},')
        return
    jobs = [
        (dataset, condition, row, seed, rate_of(row, condition, cache))
        for seed in range(1, args.seeds + 1)  # the first seed of all rows comes first
        for dataset in args.dataset or JOBS
        for condition in args.condition or CONDITIONS
        if dataset == "digits" or condition not in DIGITS_ALONE
        for row in found[dataset]
    ]
    if not args.page:
        play_all(jobs, cache, args.fresh)
    means = read_means()
    for (dataset, condition, name), lines in found_runs(jobs, cache).items():
        cell, before = mean_of(lines), means.get((dataset, condition, name))
        if before is None or (cell["seeds"], cell["played"]) >= (before["seeds"], before["played"]):
            means[dataset, condition, name] = cell
    write_means(means)
    every = rows(JOBS["digits"]["peers"])
    rates = {row.name: tuple(rate_of(row, condition, cache) for condition in TUNED) for row in every}
    world = {
        "jobs": JOBS, "conditions": CONDITIONS, "quasi_global": QUASI_GLOBAL, "seeds": args.seeds, "step_s": STEP_S,
    }  # fmt: skip
    write_page(PAGE, means, [row.name for row in every], rates, world)


if __name__ == "__main__":
    main()
