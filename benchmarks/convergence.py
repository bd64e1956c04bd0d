"""The accuracy of four nodes compared with one process, with the same optimizer and the same total of samples.

    python benchmarks/convergence.py [--seeds 5] [--only digits] [--case 'one process']... [--json]

The jobs are digits and Fashion-MNIST, IID and with private Dirichlet(0.1) data, with several seeds. The single process
is one node, so both run the same loop. Accuracy is each node's own on the whole test set after ``settle``; a row gives
the mean over nodes and seeds. Dirichlet parts are private: no node sees another's samples.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS = {
    "digits": {"samples": 60_000, "batch-size": 16, "lr": 0.1, "weight-decay": 1e-3, "step-s": 0.004},
    "fashion-mnist": {"samples": 240_000, "batch-size": 16, "lr": 0.02, "weight-decay": 0.0, "step-s": 0.0},
}
NODES = 4


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(dataset, nodes, seed, alpha, config):
    """Run all processes of one run, and return their JSON rows."""
    port, processes = free_port(), []
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("".join(f"{key} = {value}\n" for key, value in config.items()))
        file.flush()
        for part in range(nodes):
            environment = os.environ | {
                "OMP_NUM_THREADS": "1", "GOSSIP_CONFIG": file.name,
                "GOSSIP_LISTEN": f"127.0.0.1:{port if part == 0 else 0}",
                "GOSSIP_SEEDS": "" if part == 0 else f"127.0.0.1:{port}",
            }  # fmt: skip
            flags = [f"--{key}={value}" for key, value in TASKS[dataset].items()]
            flags += [f"--seed={seed}", f"--alpha={alpha}", f"--part={part}", f"--parts={nodes}"]
            command = [sys.executable, str(HERE / "convergence_job.py"), dataset, *flags]
            processes.append(subprocess.Popen(command, env=environment, stdout=-1, text=True))
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def summary(runs):
    """Summarise runs (lists of rows): mean accuracy of all nodes, its standard deviation over seeds, the worst node."""
    means = [100 * statistics.mean(row["accuracy"] for row in rows) for rows in runs]
    return {
        "mean": statistics.mean(means), "stdev": statistics.stdev(means) if len(means) > 1 else 0.0,
        "worst_node": 100 * min(row["accuracy"] for rows in runs for row in rows),
        "swarm_samples": statistics.mean(rows[0]["swarm_samples"] for rows in runs),
        "exchanges_a_node": statistics.mean(row["exchanges"] for rows in runs for row in rows),
        "per_seed": means,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=list(TASKS), help="one dataset")
    parser.add_argument("--case", action="append", help="one row by its name; may be repeated")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plain, momentum = {"outer_momentum": 0.0, "outer_rate": 1.0}, {"outer_momentum": 0.5, "outer_rate": 0.7}
    cases = [
        ("one process", 1, 0.0, {}),
        ("4 nodes, IID, plain mean", NODES, 0.0, plain),
        ("4 nodes, IID, outer momentum", NODES, 0.0, momentum),
        ("4 nodes, IID, default", NODES, 0.0, {}),
        ("4 nodes, Dirichlet 0.1, plain mean", NODES, 0.1, plain),
        ("4 nodes, Dirichlet 0.1, outer momentum", NODES, 0.1, momentum),
        ("4 nodes, Dirichlet 0.1, default", NODES, 0.1, {}),
    ]
    cases = [case for case in cases if not args.case or case[0] in args.case]
    results = {}
    for dataset in [args.only] if args.only else TASKS:
        print(f"\n{dataset}, {TASKS[dataset]['samples']:,} samples in all, {args.seeds} seeds", file=sys.stderr)
        print(f"{'':42}{'mean %':>8}{'stdev':>7}{'worst':>7}{'samples':>10}{'mixes':>7}", file=sys.stderr)
        for name, nodes, alpha, config in cases:
            row = summary([run(dataset, nodes, seed, alpha, config) for seed in range(args.seeds)])
            results[f"{dataset}: {name}"] = row
            print(
                f"{name:42}{row['mean']:8.2f}{row['stdev']:7.2f}{row['worst_node']:7.2f}"
                f"{row['swarm_samples']:10,.0f}{row['exchanges_a_node']:7.0f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
