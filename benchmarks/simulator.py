"""The cost of a simulated update, compared with gossipy and with bare arithmetic, and its growth.

    python benchmarks/simulator.py [--rounds 3] [--gossipy PYTHON] [--parts peers scale large membership churn] [--json]

peers       gossipy's job on digits, 100 and 1,000 peers, linear model and MLP: updates per CPU second. An update is one
            mix that a node applies and two local steps on batches of 8. gossipy, the stacked arithmetic of
            peers/stacked_digits.py, and ours with the whole membership protocol alternate; medians and their ratios.
scale       CPU seconds against peers x mixes, 100 to 10,000 peers; ``--picture FILE`` draws the curve.
large       10,000 peers with ideal membership, and 1,000 with the protocol, 100 mixes each: wall seconds and memory.
membership  only the membership protocol, without training and mixing: events per CPU second.
churn       the cost of churn: 300 peers with the protocol on spot machines for 900 s. They do not mix, or mix every
            8 s, or every 0.8 s, at which most exchanges over the internet cannot finish in time.

Every measurement runs in a process of its own with one thread, which measures its CPU seconds. Except in ``large``,
set-up is reported separately on both sides. The clock starts when all nodes are initialised, and with ours when all
know each other. ``--gossipy`` names the Python of an environment with gossipy.
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
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("peers", "scale", "large", "membership", "churn")
MODELS, SIZES = ("linear", "mlp"), (100, 1000)
GOSSIPY_ROUNDS = {100: 30, 1000: 3}  # 3,000 updates: seconds
STACKED_ROUNDS = {100: 1000, 1000: 100}
OUR_ROUNDS = {100: 400, 1000: 60}
NO_GOSSIPY = (
    "gossipy is left out: make it an environment (python3 -m venv DIR), install there what the first lines of "
    "benchmarks/peers/gossipy_digits.py name, and give --gossipy DIR/bin/python."
)

NEVER = 1_000_000_000
STEP_S = 0.1
ONCE = {"every_s": float(NEVER), "evaluate_peers": 1}  # measured only at the start and the end; needs a duration
SPOT = {"preset": "spot_v100_2023_02"}
INTERNET = {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": {"up": 100, "down": 100}}


# -- scenarios ---------------------------------------------------------------------------------------------------
def gossipy_job(model, peers, rounds):
    """Return gossipy_digits.py as a scenario: a mix every two steps, and a network without delays."""
    return {
        "name": f"gossipy's job, {model}", "peers": peers, "duration_s": 2 * STEP_S * rounds,
        "task": {"dataset": "digits", "model": model, "batch_size": 8, "samples_per_peer": 16,
                 "optimizer": {"name": "sgd", "lr": 0.1}},
        "gossip": {"mix_every_steps": 2, "filter": "none"},
        "compute": {"step_s": STEP_S},
        "network": {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": "unlimited"},
        "membership": {"mode": "protocol"}, "report": ONCE,
    }  # fmt: skip


def wide(peers, membership, **more):
    """Return the scenario of an MLP on digits with measured internet latencies and spot-machine churn."""
    return {
        "name": f"{peers} peers", "peers": peers,
        "task": {"dataset": "digits", "model": "mlp", "batch_size": 8, "samples_per_peer": 16},
        "gossip": {"mix_every_steps": 8}, "compute": {"step_s": STEP_S}, "network": INTERNET, "churn": SPOT,
        "membership": {"mode": membership}, "fidelity": "whole",
    } | more  # fmt: skip


def membership_alone(peers, duration_s):
    """Return a scenario whose peers count and gossip their steps but do not compute and never mix."""
    return {
        "name": "membership alone", "peers": peers, "duration_s": duration_s,
        "task": {"dataset": "averaging", "elements": 1}, "gossip": {"mix_every_steps": NEVER},
        "membership": {"mode": "protocol"}, "report": ONCE,
    }  # fmt: skip


def spot_swarms():
    """Return the scenarios of the part churn, by mixing interval."""
    trains = wide(300, "protocol", duration_s=900.0, report=ONCE)
    return {
        "nobody mixes": membership_alone(300, 900.0) | {"churn": SPOT},
        "a mix every 8 s": trains | {"compute": {"step_s": 1.0}},
        "a mix every 0.8 s": trains,
    }


# -- one measurement, in a process of its own --------------------------------------------------------------------
def measure(table, with_setup):
    """Measure one scenario: all of it, or without set-up, from the first event to the last row."""
    from sim import Scenario, simulate

    scenario = Scenario.from_mapping(table)
    simulate(scenario.replace(peers=8, duration_s=1.0), progress=False)  # loads libraries and data
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(scenario, progress=False)
    wall_s, cpu_s, setup_s = time.perf_counter() - wall, time.process_time() - cpu, 0.0
    if not with_setup:
        wall_s, cpu_s, setup_s = result.summary["wall_s"], result.summary["cpu_s"], cpu_s - result.summary["cpu_s"]
    last, peers = result.history[-1], scenario.peers
    mixes, steps = last["mixes"] * peers, last["steps"] * peers
    updates, events, accuracy = min(mixes, steps / 2), result.summary["events"], result.summary["accuracy"]["mean"]
    return {
        "peer": "ours", "name": scenario.name, "peers": peers, "updates": updates, "mixes": mixes, "steps": steps,
        "setup_cpu_s": setup_s, "cpu_s": cpu_s, "wall_s": wall_s, "updates_per_cpu_s": updates / cpu_s,
        "events": events, "events_per_cpu_s": events / cpu_s, "virtual_s": result.summary["virtual_s"],
        "accuracy": accuracy if accuracy == accuracy else None,  # None, as JSON has no NaN
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,  # Linux counts in KiB
        "digest": result.summary["digest"],
    }  # fmt: skip


def child(*command, threads=1):
    """Run a program, and return its last output line, decoded from JSON."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=os.environ | limits)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def ours(table, with_setup=False, threads=1):
    flags = ["--with-setup"] if with_setup else []
    return child(sys.executable, __file__, "--measure", json.dumps(table), *flags, threads=threads)


def script(python, name, model, nodes, rounds, *more):
    path = HERE / "peers" / name
    return child(python, path, "--model", model, "--nodes", nodes, "--rounds", rounds, *more)


# -- parts -------------------------------------------------------------------------------------------------------
def peers_part(args):
    """Measure each contestant by (model, peers), alternately, so that a slow minute of the machine slows them all."""
    if not args.gossipy:
        say(NO_GOSSIPY)
    found = {}
    for turn in range(args.rounds):
        for model in MODELS:
            for peers in SIZES:
                say(f"round {turn + 1} of {args.rounds}: {model}, {peers:,} peers")
                jobs = {}
                if args.gossipy:
                    jobs["gossipy"] = lambda m=model, n=peers: script(
                        args.gossipy, "gossipy_digits.py", m, n, GOSSIPY_ROUNDS[n]
                    )
                    jobs["gossipy, data divided"] = lambda m=model, n=peers: script(
                        args.gossipy, "gossipy_digits.py", m, n, GOSSIPY_ROUNDS[n], "--samples", 0
                    )
                jobs["stacked"] = lambda m=model, n=peers: script(
                    sys.executable, "stacked_digits.py", m, n, STACKED_ROUNDS[n]
                )
                jobs["ours"] = lambda m=model, n=peers: ours(gossipy_job(m, n, OUR_ROUNDS[n]))
                for name, job in jobs.items():
                    found.setdefault(name, {}).setdefault(f"{model}, {peers:,}", []).append(job())
    for rows in found["ours"].values():
        assert len({row["digest"] for row in rows}) == 1, "the same scenario gave different digests"
    return found


def scale_part(args):
    """Measure CPU seconds against peers, with time for 20 mixes each, and against mixes at 1,000 peers."""
    sizes = [(100, 20), (300, 20), (1000, 20), (3000, 20), (10_000, 20), (1000, 5), (1000, 10), (1000, 40), (1000, 80)]
    rows = []
    for peers, rounds in sizes:
        say(f"{peers:,} peers, time for {rounds} mixes each")
        table = wide(peers, "ideal", duration_s=8 * STEP_S * rounds, report=ONCE)
        turns = sorted((ours(table) for _ in range(args.rounds)), key=lambda row: row["cpu_s"])
        rows.append({"rounds": rounds} | turns[len(turns) // 2])
    return rows


def large_part(args):
    """Measure what a user waits for: set-up and the default report included."""
    rows = []
    for peers, membership in ((10_000, "ideal"), (1000, "protocol")):
        say(f"{peers:,} peers, {membership} membership, 100 mixes each: minutes")
        rows.append({"membership": membership} | ours(wide(peers, membership, rounds=100), True, args.threads))
    return rows


def membership_part(args):
    """Measure the membership protocol; keep the median run by events per CPU second."""
    rows = []
    for peers, duration_s in ((100, 120.0), (300, 60.0), (1000, 30.0)):
        say(f"membership of {peers:,} peers")
        turns = [ours(membership_alone(peers, duration_s)) for _ in range(args.rounds)]
        rows.append(sorted(turns, key=lambda row: row["events_per_cpu_s"])[len(turns) // 2])
    return rows


def churn_part(args):
    """Measure churn; keep the median run by CPU seconds."""
    rows = []
    for name, table in spot_swarms().items():
        say(f"300 peers on spot machines, {name}: a minute or more")
        turns = sorted((ours(table) for _ in range(args.rounds)), key=lambda row: row["cpu_s"])
        rows.append(turns[len(turns) // 2] | {"name": name})
    return rows


# -- tables ------------------------------------------------------------------------------------------------------
def line(name, cells):
    print(f"{name:34}" + "".join(f"{cell:>15}" for cell in cells))


def peers_table(found):
    columns = list(found["ours"])
    medians = {
        name: {case: statistics.median(row["updates_per_cpu_s"] for row in runs) for case, runs in cases.items()}
        for name, cases in found.items()
    }
    print("\nUpdates of nodes per CPU second, one thread (model, peers)\n")
    line("", columns)
    for name, cases in medians.items():
        line(name, [f"{cases[case]:,.0f}" for case in columns])
    print()
    for other, cases in medians.items():
        if other != "ours":
            line(f"ours: times {other}", [f"{medians['ours'][case] / cases[case]:.3g}" for case in columns])
    if "gossipy" in found:
        bare = {
            case: statistics.median(row["updates"] / (row["cpu_s"] - row["evaluation_cpu_s"]) for row in rows)
            for case, rows in found["gossipy"].items()
        }
        line("    gossipy without evaluation", [f"{medians['ours'][case] / bare[case]:.3g}" for case in columns])
        steps = [found["gossipy, data divided"][case][0]["steps_per_update"] for case in columns]
        line("gossipy, data divided: steps", [f"{value:.2f}" for value in steps])
    first = {case: rows[0] for case, rows in found["ours"].items()}
    line("ours: mixes for two steps", [f"{2 * first[case]['mixes'] / first[case]['steps']:.3f}" for case in columns])
    line("ours: events for an update", [f"{first[case]['events'] / first[case]['updates']:.1f}" for case in columns])
    for name in ("gossipy", "ours"):
        if name in found:
            seconds = [statistics.median(row["setup_cpu_s"] for row in found[name][case]) for case in columns]
            line(f"{name}: CPU s of set-up", [f"{value:.2f}" for value in seconds])


def exponent(rows):
    """Return the slope of log CPU seconds over log mixes, by least squares; 1 is linear growth."""
    x = [math.log(row["mixes"]) for row in rows]
    y = [math.log(row["cpu_s"]) for row in rows]
    return statistics.linear_regression(x, y).slope


def scale_table(rows):
    print("\nCost over peers x mixes: MLP, internet latency, spot churn, ideal membership, one thread\n")
    line("", ["mixes", "CPU s", "us a mix", "events a mix", "set-up CPU s"])
    for row in rows:
        mixes = row["mixes"]
        cells = [f"{mixes:,.0f}", f"{row['cpu_s']:.2f}", f"{1e6 * row['cpu_s'] / mixes:.1f}"]
        cells += [f"{row['events'] / mixes:.1f}", f"{row['setup_cpu_s']:.2f}"]
        line(f"{row['peers']:,} peers, {mixes / row['peers']:.1f} mixes each", cells)
    by_peers, by_mixes = [row for row in rows if row["rounds"] == 20], [row for row in rows if row["peers"] == 1000]
    print(f"\nCPU seconds grow with peers to the power {exponent(by_peers):.3f}, with mixes {exponent(by_mixes):.3f}.")


def large_table(rows):
    print("\nWhole runs of 100 mixes each, set-up counted: MLP, internet latency, spot churn\n")
    line("", ["wall s", "CPU s", "peak MB", "mixes", "mixes/CPU s", "accuracy"])
    for row in rows:
        mixes = row["mixes"]
        cells = [f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}", f"{row['peak_rss_mb']:,.0f}", f"{mixes:,.0f}"]
        cells += [f"{mixes / row['cpu_s']:,.0f}", f"{row['accuracy']:.4f}"]
        line(f"{row['peers']:,} peers, {row['membership']}", cells)


def membership_table(rows):
    print("\nMembership alone, steps told to others, no mixing, one thread\n")
    line("", ["events", "CPU s", "events/CPU s", "virtual s"])
    for row in rows:
        cells = [f"{row['events']:,}", f"{row['cpu_s']:.2f}", f"{row['events_per_cpu_s']:,.0f}"]
        line(f"{row['peers']:,} peers", [*cells, f"{row['virtual_s']:.0f}"])


def churn_table(rows):
    print("\n300 peers with the protocol on spot machines, 900 s, one thread\n")
    line("", ["events", "mixes", "CPU s", "us a peer-s"])
    for row in rows:
        cells = [f"{row['events']:,}", f"{row['mixes']:,.0f}", f"{row['cpu_s']:.1f}"]
        line(row["name"], [*cells, f"{1e6 * row['cpu_s'] / (row['peers'] * row['virtual_s']):.0f}"])


def picture(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for marker, name, drawn in (
        ("o", "100 to 10,000 peers, 20 rounds", [row for row in rows if row["rounds"] == 20]),
        ("s", "1,000 peers, 5 to 80 rounds", [row for row in rows if row["peers"] == 1000]),
    ):
        drawn.sort(key=lambda row: row["mixes"])
        axes.loglog([row["mixes"] for row in drawn], [row["cpu_s"] for row in drawn], marker=marker, label=name)
    most = max(rows, key=lambda row: row["mixes"])
    least = min(row["mixes"] for row in rows)
    straight = [most["cpu_s"] * mixes / most["mixes"] for mixes in (least, most["mixes"])]
    axes.loglog([least, most["mixes"]], straight, "k:", label="linear")
    axes.set(xlabel="peers x mixes", ylabel="CPU seconds")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; medians are printed")
    parser.add_argument("--gossipy", metavar="PYTHON", help="Python of an environment with gossipy")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=2, help="of arithmetic in the part large; elsewhere one")
    parser.add_argument("--picture", metavar="FILE", help="draw the cost curve there; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="every measurement as one object, no tables")
    parser.add_argument("--measure", metavar="SCENARIO", help=argparse.SUPPRESS)
    parser.add_argument("--with-setup", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure), args.with_setup)))
        return
    parts = {
        "peers": peers_part, "scale": scale_part, "large": large_part, "membership": membership_part,
        "churn": churn_part,
    }  # fmt: skip
    tables = {
        "peers": peers_table, "scale": scale_table, "large": large_table, "membership": membership_table,
        "churn": churn_table,
    }  # fmt: skip
    found = {}
    for name in (name for name in PARTS if name in args.parts):
        found[name] = parts[name](args)
        if not args.json:
            tables[name](found[name])
    if args.json:
        print(json.dumps(found))
    if args.picture and "scale" in found:
        picture(found["scale"], args.picture)


if __name__ == "__main__":
    main()
