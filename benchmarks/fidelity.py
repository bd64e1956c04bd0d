"""A comparison of the simulator's two levels: their speed, and whether their results agree.

    python benchmarks/fidelity.py [--parts speed agreement large] [--seeds 8] [--rounds 3]
    python benchmarks/fidelity.py --parts gossipy --gossipy PYTHON

speed      node updates per CPU second at each level, and of all models stacked in lock-step without a network.
agreement  means of each level over some seeds, and their difference in standard errors.
large      swarms that are too large for the whole level, with their memory: 100 mixes each of 10,000 peers.
gossipy    the fast level against gossipy (peers/gossipy_digits.py): a mix and two steps of batch 8 a round.

Every measurement runs in a process of its own with one thread. Compared measurements alternate, so that a slow minute
of the machine slows all of them. Medians are printed.
"""

import argparse
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
STEP_S = 0.1
ONCE = {"every_s": 1e9, "evaluate_peers": 256}
NO_TIME = {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": "unlimited"}
INTERNET = {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": {"up": 100, "down": 100}}
CHURN = {"up": {"kind": "exponential", "mean": 40}, "down": {"kind": "exponential", "mean": 10}}
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0}


def job(model, peers, rounds, every=2, network=None, **more):
    """Return gossipy's job (benchmarks/simulator.py) as a scenario; ``more`` may change ``[gossip]`` too."""
    gossip = {"mix_every_steps": every, "filter": "none"} | more.pop("gossip", {})
    return {
        "name": f"{model}, {peers:,}", "peers": peers, "duration_s": every * STEP_S * rounds,
        "task": {"dataset": "digits", "model": model, "batch_size": 8, "samples_per_peer": 16,
                 "optimizer": {"name": "sgd", "lr": 0.1}},
        "gossip": gossip, "compute": {"step_s": STEP_S}, "network": network or NO_TIME,
        "membership": {"mode": "ideal"}, "report": ONCE,
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
FIGURES = ("accuracy", "loss", "consensus_distance", "node_updates", "exchanges_failed", "bytes_sent")


def measure(table):
    """Simulate a scenario in this process, and return the figures to compare."""
    from sim import Scenario, simulate

    scenario = Scenario.from_mapping(table)
    simulate(scenario.replace(peers=8, duration_s=1.0), progress=False)  # loads libraries and data
    summary = simulate(scenario, progress=False).summary
    found = {name: summary[name] for name in (*FIGURES, "cpu_s", "events")} | {"accuracy": summary["accuracy"]["mean"]}
    found["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB
    return found | {"updates_per_cpu_s": summary["node_updates"] / summary["cpu_s"]}


def child(*command, python=sys.executable):
    """Run a program, and return its last output line, decoded from JSON."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run([python, *map(str, command)], capture_output=True, text=True, env=os.environ | one_thread)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def played(table, **changes):
    return child(__file__, "--measure", json.dumps(table | changes))


def line(name, cells):
    print(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def speed(args):
    print("\nUpdates of nodes per CPU second, 1,000 peers, no latency, one thread\n")
    line("", [*LEVELS, "times", "stacked", "of stacked"])
    for model in ("linear", "mlp"):
        for name, gossip in (("no filter", {}), ("default filter", {"filter": "auto"})):
            found = {name: [] for name in (*LEVELS, "stacked")}
            for _ in range(args.rounds):
                for level in LEVELS:
                    rounds = 60 if level == "exchange" else 10
                    table = job(model, 1000, rounds, gossip=gossip, fidelity=level)
                    found[level].append(played(table)["updates_per_cpu_s"])
                stacked = child(HERE / "peers/stacked_digits.py", "--model", model, "--nodes", 1000, "--rounds", 60)
                found["stacked"].append(stacked["updates_per_cpu_s"])
            whole, exchange, stacked = (statistics.median(rows) for rows in found.values())
            cells = [f"{whole:,.0f}", f"{exchange:,.0f}", f"{exchange / whole:.1f}", f"{stacked:,.0f}"]
            line(f"{model}, {name}", [*cells, f"{exchange / stacked:.2f}"])


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
    print("\nAt the level of exchanges, no latency, no filter, a mix every two steps\n")
    line("", ["updates", "CPU s", "updates/CPU s", "peak MB"])
    for model, peers, rounds in (("mlp", 10_000, 100), ("linear", 10_000, 100), ("linear", 100_000, 20)):
        row = played(job(model, peers, rounds, fidelity="exchange"))
        cells = [f"{row['node_updates']:,}", f"{row['cpu_s']:.1f}", f"{row['updates_per_cpu_s']:,.0f}"]
        line(f"{model}, {peers:,} peers", [*cells, f"{row['peak_rss_mb']:,.0f}"])


def gossipy(args):
    """Compare the speed with gossipy, which is slower and so runs fewer rounds."""
    if not args.gossipy:
        raise SystemExit("--parts gossipy needs --gossipy PYTHON, that of an environment with gossipy-dfl.")
    print("\nUpdates of nodes per CPU second, 1,000 peers, no latency, no filter, one thread\n")
    line("", ["gossipy", "exchange", "times"])
    for model in ("linear", "mlp"):
        command = [HERE / "peers/gossipy_digits.py", "--model", model, "--nodes", 1000, "--rounds", 4]
        found = {"gossipy": [], "exchange": []}
        for _ in range(args.rounds):
            found["gossipy"].append(child(*command, python=args.gossipy)["updates_per_cpu_s"])
            found["exchange"].append(played(job(model, 1000, 60, fidelity="exchange"))["updates_per_cpu_s"])
        gossipy_speed, our_speed = (statistics.median(rows) for rows in found.values())
        line(model, [f"{gossipy_speed:,.0f}", f"{our_speed:,.0f}", f"{our_speed / gossipy_speed:.1f}"])


def main():
    parts = {"speed": speed, "agreement": agreement, "large": large, "gossipy": gossipy}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=["speed", "agreement", "large"])
    parser.add_argument("--gossipy", metavar="PYTHON", help="Python of an environment with gossipy")
    parser.add_argument("--seeds", type=int, default=8, help="of either level, for the agreement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each speed is measured; medians are printed")
    parser.add_argument("--measure", metavar="SCENARIO", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return
    for name in args.parts:
        parts[name](args)


if __name__ == "__main__":
    main()
