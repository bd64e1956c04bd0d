"""Handwritten digits as tasks of Dask. If a worker dies, another takes its task, as the same node if it finds the
node's directory, and no other task stops.

On one machine:     python examples/engines/dask_digits.py [--nodes 4] --states /var/gossip
On several:         DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=100 dask scheduler --port 8786    (on HOST0)
                    dask worker HOST0:8786 --nthreads 1 --memory-limit 0    (on every machine)
                    python examples/engines/dask_digits.py --scheduler HOST0:8786 --nodes 4 --listen 0.0.0.0:0 \\
                        --secret /etc/gossip/swarm.secret --states /shared/gossip
"""

import argparse
import json
import os
import time
from urllib.parse import urlsplit

import dask
from distributed import Client, LocalCluster, get_client, get_worker


def train(number, args):
    """Train one node, in a worker process that has one thread."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.nn import functional as F

    from gossip import Node

    torch.set_num_threads(1)
    client = get_client()  # the scheduler keeps where the nodes are, for as long as it lives
    # Dask knows the address at which other machines reach this one; that of the default route may be another.
    listen = args.listen.replace("0.0.0.0", urlsplit(get_worker().address).hostname)
    own = os.path.join(args.states, f"node-{number}")
    os.makedirs(own, exist_ok=True)
    os.environ["GOSSIP_LOG"] = os.path.join(own, "log.jsonl")
    # 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
    y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    node = Node(
        model, optimizer, state_dir=own, seeds=lambda: client.get_metadata(["swarm"], {}).values(),
        listen=listen, secret=args.secret, wait_for=2,
    )  # fmt: skip
    node.on("listening", lambda event: client.set_metadata(["swarm", str(number)], node.address))
    samples = args.samples
    with node:
        while not node.finished and node.swarm_samples < samples:
            for x, y in node.shard((x_train, y_train), batch_size=16):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss=loss, samples=len(x))
                optimizer.param_groups[0]["lr"] = 0.1 * max(0.0, 1 - node.swarm_samples / samples)
                time.sleep(args.step_delay)
                if node.finished or node.swarm_samples >= samples:
                    break
        node.settle(3)
        node.finish()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        return {"node": node.id, "accuracy": accuracy, "samples": node.metrics().samples}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--scheduler", help="of a Dask that runs; none starts one on this machine")
# Paths are absolute because a worker has another working directory than this process.
parser.add_argument(
    "--states", type=os.path.abspath, required=True,
    help="each node keeps its identity in a directory here, on all machines",
)  # fmt: skip
parser.add_argument("--listen", default="127.0.0.1:0", help="beyond one machine 0.0.0.0:0, with --secret")
parser.add_argument("--secret", type=os.path.abspath, help="the path of the swarm's secret, on every machine")
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")

if __name__ == "__main__":
    args = parser.parse_args()
    # Dask gives a task up once so many workers have died under it; a scheduler elsewhere has its own configuration.
    dask.config.set({"distributed.scheduler.allowed-failures": 100})
    cluster = args.scheduler or LocalCluster(
        n_workers=args.nodes, threads_per_worker=1, memory_limit=None, dashboard_address=None, host="127.0.0.1"
    )
    with Client(cluster) as client:
        tasks = [client.submit(train, number, args, pure=False) for number in range(args.nodes)]
        for result in client.gather(tasks):
            print(json.dumps(result), flush=True)
