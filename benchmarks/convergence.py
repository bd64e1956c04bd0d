"""The accuracy of four nodes compared with one process, with the same optimizer and the same total of samples.

    python benchmarks/convergence.py [--seeds 5] [--only digits] [--case 'SGD, one process']... [--json]

The jobs are digits and Fashion-MNIST, IID and with private Dirichlet(0.1) data, with several seeds. The single process
is one node, so both run the same loop. Accuracy is each node's own on the whole test set after ``settle``; a row gives
the mean over nodes and seeds. Dirichlet parts are private: no node sees another's samples.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time

from children import Child, say

TASKS = {
    "digits": {"samples": 60_000, "batch_size": 16, "step_s": 0.004},
    "fashion-mnist": {"samples": 240_000, "batch_size": 16, "step_s": 0.0},
}
SGD, ADAMW = "SGD", "AdamW"
OPTIMIZERS = {  # Keywords by the data set.
    ("digits", SGD): {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    ("digits", ADAMW): {"lr": 0.003},
    ("fashion-mnist", SGD): {"lr": 0.02, "momentum": 0.9},
    ("fashion-mnist", ADAMW): {"lr": 0.001},
}
NODES = 4
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0}
WHOLE = {"batch_size": 64}  # A step of a synchronous group of four, with as many steps as each node takes.
CASES = [  # name, optimizer, nodes, alpha of the Dirichlet parts or 0 for IID shares of the whole, settings
    ("SGD, one process", SGD, 1, 0.0, {}),
    ("SGD, one process, batches of 64", SGD, 1, 0.0, WHOLE),
    ("SGD, IID, plain mean", SGD, NODES, 0.0, PLAIN),
    ("SGD, IID, default", SGD, NODES, 0.0, {}),
    ("SGD, Dirichlet 0.1, plain mean", SGD, NODES, 0.1, PLAIN),
    ("SGD, Dirichlet 0.1, default", SGD, NODES, 0.1, {}),
    ("AdamW, one process", ADAMW, 1, 0.0, {}),
    ("AdamW, one process, batches of 64", ADAMW, 1, 0.0, WHOLE),
    ("AdamW, IID, default", ADAMW, NODES, 0.0, {}),
    ("AdamW, Dirichlet 0.1, default", ADAMW, NODES, 0.1, {}),
    ("AdamW, Dirichlet 0.1, weights alone", ADAMW, NODES, 0.1, {"mix_state": "off"}),
]


# -- a node ------------------------------------------------------------------------------------------------------
def train(dataset, kind, nodes, seed, alpha, settings, part, seeds):
    """Train until the swarm has seen its samples; print the address, and then what came of it."""
    import torch
    from torch.nn import functional as F

    from node import Config, Node
    from sim.learning.corpora import digits, dirichlet_split, fashion_mnist
    from sim.learning.models import cnn, mlp

    task = TASKS[dataset]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = digits() if dataset == "digits" else fashion_mnist()
    model = mlp(64, 64, 10) if dataset == "digits" else cnn((1, 28, 28), 10)
    keywords, batch_size = OPTIMIZERS[dataset, kind], settings.pop("batch_size", task["batch_size"])
    optimizer = getattr(torch.optim, kind)(model.parameters(), **keywords)
    mine = dirichlet_split(y_train, nodes, alpha, seed)[part] if alpha else None

    def batches(node):
        if mine is None:
            yield from node.shard((x_train, y_train), batch_size)
            return
        for rows in mine[torch.randperm(len(mine))].split(batch_size):
            yield x_train[rows], y_train[rows]

    with Node(model, optimizer, seeds=seeds, config=Config(**settings)) as node:
        print(node.address, flush=True)
        torch.manual_seed(1000 * seed + part)
        while len(node.members) < nodes:  # all nodes start together, for a fair comparison
            time.sleep(0.05)
            node._training.visit()
        while node.swarm_samples < task["samples"]:
            for x, y in batches(node):
                begin = time.perf_counter()
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss=loss, samples=len(x))
                optimizer.param_groups[0]["lr"] = keywords["lr"] * max(0.0, 1 - node.swarm_samples / task["samples"])
                # The least that a step takes, so that steps are comparable.
                time.sleep(max(0.0, task["step_s"] - (time.perf_counter() - begin)))
                if node.swarm_samples >= task["samples"]:
                    break
        node.settle(4.0)
        samples = node.swarm_samples
        with torch.no_grad():
            guesses = torch.cat([model(x).argmax(1) for x in x_test.split(500)])
        accuracy = (guesses == y_test).float().mean().item()
        exchanges = node.metrics().exchanges_done
        if nodes > 1:
            time.sleep(1.0)  # members that settle slightly later still find this node
    say({"accuracy": accuracy, "swarm_samples": samples, "exchanges": exchanges})


# -- all of them -------------------------------------------------------------------------------------------------
def run(dataset, kind, nodes, seed, alpha, settings):
    """Run all processes of one run, and return their rows."""
    with contextlib.ExitStack() as stack:
        processes, seeds = [], []
        for part in range(nodes):
            job = json.dumps([dataset, kind, nodes, seed, alpha, settings, part, seeds])
            processes.append(stack.enter_context(Child(__file__, "--job", job)))
            seeds = seeds or [processes[0].line()]
        for process in processes[1:]:
            process.line()  # The first line is its address.
        return [process.answer() for process in processes]


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
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        train(*args.job)
        return
    results = {}
    for dataset in [args.only] if args.only else TASKS:
        print(f"\n{dataset}, {TASKS[dataset]['samples']:,} samples in all, {args.seeds} seeds", file=sys.stderr)
        print(f"{'':42}{'mean %':>8}{'stdev':>7}{'worst':>7}{'samples':>10}{'mixes':>7}", file=sys.stderr)
        for name, *case in CASES:
            if args.case and name not in args.case:
                continue
            kind, nodes, alpha, settings = case
            row = summary([run(dataset, kind, nodes, seed, alpha, settings) for seed in range(args.seeds)])
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
