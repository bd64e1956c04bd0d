"""The simulator's speed, compared with gossipy, and whether its two levels agree.

    python benchmarks/simulator.py [--parts gossipy agreement large churn] [--gossipy PYTHON] [--rounds 3] [--seeds 8]

gossipy    its job on digits, 100 and 1,000 peers, linear model and MLP: updates per CPU second. An update is one mix
           that a node applies and two local steps on batches of 8. gossipy, the whole level with the membership
           protocol, and the level of exchanges alternate; medians and their ratios. ``--gossipy`` names the Python of
           an environment with gossipy: benchmarks/peers/gossipy_digits.py says what that needs.
agreement  means of each level over some seeds, and their difference in standard errors.
large      100 mixes each of 10,000 peers with ideal membership, and of 1,000 with the protocol, over the internet with
           churn, set-up included; and swarms that only the level of exchanges can hold, without a network.
churn      300 peers with the protocol on spot machines for 900 s. They do not mix, or mix every 8 s, or every 0.8 s, at
           which most exchanges over the internet cannot finish in time.

Every measurement runs in a process of its own with one thread, which measures its CPU seconds. Except in the first rows
of ``large`` the clock starts when all nodes are initialised, and with the protocol when all know each other.
"""

import argparse
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEVELS = ("whole", "exchange")
GOSSIPY_ROUNDS, WHOLE_ROUNDS, EXCHANGE_ROUNDS = {100: 30, 1000: 4}, {100: 400, 1000: 60}, {100: 400, 1000: 60}
NEVER = 1_000_000_000
STEP_S = 0.1
ONCE = {"every_s": float(NEVER), "evaluate_peers": 1}  # measured only at the start and the end; needs a duration
SPOT = {"preset": "spot_v100_2023_02"}
NO_TIME = {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": "unlimited"}
INTERNET = {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": {"up": 100, "down": 100}}
CHURN = {"up": {"kind": "exponential", "mean": 40}, "down": {"kind": "exponential", "mean": 10}}
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0}
FIGURES = ("accuracy", "loss", "consensus_distance", "node_updates", "exchanges_failed", "bytes_sent")


# -- scenarios ---------------------------------------------------------------------------------------------------
def job(model, peers, rounds, every=2, network=None, **more):
    """Return gossipy_digits.py as a scenario; ``more`` may change ``[gossip]`` too."""
    gossip = {"mix_every_steps": every, "filter": "none"} | more.pop("gossip", {})
    return {
        "name": f"{model}, {peers:,}", "peers": peers, "duration_s": every * STEP_S * rounds,
        "task": {"dataset": "digits", "model": model, "batch_size": 8, "samples_per_peer": 16,
                 "optimizer": {"name": "sgd", "lr": 0.1}},
        "gossip": gossip, "compute": {"step_s": STEP_S}, "network": network or NO_TIME,
        "membership": {"mode": "ideal"}, "report": ONCE | {"evaluate_peers": 256},
    } | more  # fmt: skip


CASES = {
    "no latency": job("linear", 100, 30),
    "no latency, clipped": job("linear", 100, 30, gossip={"filter": "auto"}),
    "no latency, plain means": job("linear", 100, 30, gossip=PLAIN),
    "no latency, MLP": job("mlp", 100, 20),
    "internet": job("linear", 100, 30, 8, INTERNET),
    "internet, clipped": job("linear", 100, 30, 8, INTERNET, gossip={"filter": "auto"}),
    "internet, 2 % loss": job("linear", 100, 30, 8, INTERNET | {"loss": 0.02}),
    "internet, churn": job("linear", 100, 40, 8, INTERNET, churn=CHURN),
}


def wide(peers, membership, **more):
    """Return the scenario of an MLP on digits with measured internet latencies and spot-machine churn."""
    return {
        "name": f"{peers:,} peers, {membership} membership", "peers": peers,
        "task": {"dataset": "digits", "model": "mlp", "batch_size": 8, "samples_per_peer": 16},
        "gossip": {"mix_every_steps": 8}, "compute": {"step_s": STEP_S}, "network": INTERNET, "churn": SPOT,
        "membership": {"mode": membership}, "fidelity": "whole",
    } | more  # fmt: skip


def spot_swarms():
    """Return the scenarios of the part churn, by mixing interval."""
    trains = wide(300, "protocol", duration_s=900.0, report=ONCE)
    idle = {
        "name": "membership alone", "peers": 300, "duration_s": 900.0, "churn": SPOT, "report": ONCE,
        "task": {"dataset": "averaging", "elements": 1}, "gossip": {"mix_every_steps": NEVER},
        "membership": {"mode": "protocol"},
    }  # fmt: skip
    return {
        "nobody mixes": idle,
        "a mix every 8 s": trains | {"compute": {"step_s": 1.0}},
        "a mix every 0.8 s": trains,
    }


# -- one measurement, in a process of its own --------------------------------------------------------------------
def measure(table):
    """Simulate a scenario in this process, and return its figures."""
    from sim import Scenario, simulate

    scenario = Scenario.from_mapping(table)
    simulate(scenario.replace(peers=8, duration_s=1.0), progress=False)  # loads libraries and data
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = simulate(scenario, progress=False)
    after = resource.getrusage(resource.RUSAGE_SELF)
    summary, last = result.summary, result.history[-1]
    accuracy = summary["accuracy"]["mean"]
    found = {name: summary[name] for name in (*FIGURES, "cpu_s", "wall_s", "events", "virtual_s")}
    mixes, steps = (last[name] * scenario.peers for name in ("mixes", "steps"))
    return found | {
        "accuracy": accuracy if accuracy == accuracy else None,  # None, as JSON has no NaN
        "updates": min(mixes, steps / 2), "mixes": mixes, "peers": scenario.peers,
        "whole_cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,  # Includes the set-up.
        "peak_rss_mb": after.ru_maxrss * 1024 / 1e6,  # Linux counts in KiB
    }  # fmt: skip


def child(*command, python=sys.executable, threads=1):
    """Run a program, and return its last output line, decoded from JSON."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    done = subprocess.run([python, *map(str, command)], capture_output=True, text=True, env=os.environ | limits)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def played(table, threads=1, **changes):
    return child(__file__, "--measure", json.dumps(table | changes), threads=threads)


def line(name, cells):
    print(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


# -- parts -------------------------------------------------------------------------------------------------------
def gossipy(args):
    """Measure each contestant alternately, so that a slow minute of the machine slows them all."""
    if not args.gossipy:
        print("gossipy is left out: --gossipy names the Python of an environment with it.")
    names = [*["gossipy"] * bool(args.gossipy), *LEVELS]
    print("\nUpdates of nodes per CPU second, no latency, no filter, one thread\n")
    line("", [*names, *(f"times {name}" for name in LEVELS if args.gossipy)])
    for model in ("linear", "mlp"):
        for peers in (100, 1000):
            command = [HERE / "peers/gossipy_digits.py", "--model", model, "--nodes", peers]
            jobs = {
                "gossipy": lambda command=command, n=peers: child(
                    *command, "--rounds", GOSSIPY_ROUNDS[n], python=args.gossipy
                ),
                "whole": lambda m=model, n=peers: played(
                    job(m, n, WHOLE_ROUNDS[n], membership={"mode": "protocol"}, fidelity="whole", report=ONCE)
                ),
                "exchange": lambda m=model, n=peers: played(job(m, n, EXCHANGE_ROUNDS[n], fidelity="exchange")),
            }
            rates = {name: [] for name in names}
            for _ in range(args.rounds):
                for name in names:
                    row = jobs[name]()
                    rates[name].append(row["updates"] / row["cpu_s"])
            medians = {name: statistics.median(found) for name, found in rates.items()}
            times = [f"{medians[level] / medians['gossipy']:.3g}" for level in LEVELS if args.gossipy]
            line(f"{model}, {peers:,} peers", [*(f"{value:,.0f}" for value in medians.values()), *times])


def agreement(args):
    print(f"\nMeans over {args.seeds} seeds, 100 peers; in brackets by how many standard errors they differ\n")
    line("", FIGURES)
    for name, table in CASES.items():
        found = {level: [] for level in LEVELS}
        for seed in range(1, args.seeds + 1):
            for level in LEVELS:
                found[level].append(played(table, seed=seed, fidelity=level))
        whole, exchange = found.values()
        line(name, [f"{statistics.mean(row[key] for row in whole):.4g}" for key in FIGURES])
        cells = []
        for key in FIGURES:
            at_whole, at_exchange = ([row[key] for row in rows] for rows in (whole, exchange))
            error = math.sqrt((statistics.variance(at_whole) + statistics.variance(at_exchange)) / len(at_whole))
            apart = (statistics.mean(at_exchange) - statistics.mean(at_whole)) / error if error else 0.0
            cells.append(f"{statistics.mean(at_exchange):.4g} ({apart:+.1f})")
        line("  exchange", cells)


def large(args):
    print("\nWhole runs of 100 mixes each over the internet, then the level of exchanges without a network\n")
    line("", ["wall s", "CPU s", "with set-up", "peak MB", "mixes", "mixes/CPU s", "accuracy"])
    tables = [(wide(peers, mode, rounds=100), args.threads) for peers, mode in ((10_000, "ideal"), (1000, "protocol"))]
    for model, peers, rounds in (("mlp", 10_000, 100), ("linear", 10_000, 100), ("linear", 100_000, 20)):
        tables.append((job(model, peers, rounds, fidelity="exchange"), 1))
    for table, threads in tables:
        row = played(table, threads)
        cells = [
            f"{row['wall_s']:.1f}",
            f"{row['cpu_s']:.1f}",
            f"{row['whole_cpu_s']:.1f}",
            f"{row['peak_rss_mb']:,.0f}",
        ]
        cells += [f"{row['mixes']:,.0f}", f"{row['mixes'] / row['cpu_s']:,.0f}", f"{row['accuracy']:.4f}"]
        line(table["name"], cells)


def churn(args):
    print("\n300 peers with the protocol on spot machines, 900 s, one thread; the median by CPU seconds\n")
    line("", ["events", "mixes", "CPU s", "us a peer-s"])
    for name, table in spot_swarms().items():
        turns = sorted((played(table) for _ in range(args.rounds)), key=lambda row: row["cpu_s"])
        row = turns[len(turns) // 2]
        cells = [f"{row['events']:,}", f"{row['mixes']:,.0f}", f"{row['cpu_s']:.1f}"]
        line(name, [*cells, f"{1e6 * row['cpu_s'] / (row['peers'] * row['virtual_s']):.0f}"])


def main():
    parts = {"gossipy": gossipy, "agreement": agreement, "large": large, "churn": churn}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--gossipy", metavar="PYTHON", help="Python of an environment with gossipy")
    parser.add_argument("--seeds", type=int, default=8, help="of either level, for the agreement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each speed is measured; medians are printed")
    parser.add_argument(
        "--threads", type=int, default=2, help="of arithmetic in the first rows of large; elsewhere one"
    )
    parser.add_argument("--measure", metavar="SCENARIO", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return
    for name in args.parts:
        parts[name](args)


if __name__ == "__main__":
    main()
