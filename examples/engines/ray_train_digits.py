"""Handwritten digits with Ray Train: a TorchTrainer of one worker for each node. If a worker dies, Ray Train restarts
it, as the same node if it finds the node's directory, and no other worker stops.

On one machine:     python examples/engines/ray_train_digits.py [--nodes 4] --states /var/gossip
On several:         start Ray as for ray_digits.py; a folder for checkpoints is on all machines, or a store; on HOST0:
                    python examples/engines/ray_train_digits.py --address auto --nodes 4 --listen 0.0.0.0:0 \\
                        --secret /etc/gossip/swarm.secret --states /var/gossip --storage /shared/ray
"""

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0, max_restarts=-1)
class Addresses:
    """The nodes' addresses. It may die: members tell each other, and a node that returns has them in its directory."""

    def __init__(self):
        self.known = set()

    def add(self, address):
        self.known.add(address)

    def all(self):
        return sorted(self.known)


def train(config):
    """Train one node, in a thread of Ray Train's worker."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.nn import functional as F

    from gossip import Node

    torch.set_num_threads(1)
    args, addresses = config["args"], config["addresses"]
    # Ray knows the address at which other machines reach this one; that of the default route may be another.
    listen = args.listen.replace("0.0.0.0", ray.util.get_node_ip_address())
    own = os.path.join(args.states, f"node-{config['number']}")
    os.makedirs(own, exist_ok=True)
    os.environ["GOSSIP_LOG"] = os.path.join(own, "log.jsonl")
    # 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
    y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
    model = prepare_model(model)  # One worker: it moves the model to the worker's device, and wraps nothing.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    node = Node(
        model, optimizer, state_dir=own, seeds=lambda: ray.get(addresses.all.remote(), timeout=5),
        listen=listen, secret=args.secret, wait_for=2,
    )  # fmt: skip
    node.on("listening", lambda event: addresses.add.remote(node.address))

    def report():
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            node.save(os.path.join(folder, "run.safetensors"))
            metrics = {"node": node.id, "accuracy": accuracy, "swarm_samples": node.swarm_samples}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))

    samples, reported_s = args.samples, time.monotonic()
    with node:
        if (checkpoint := ray.train.get_checkpoint()) and not node.finished:
            with checkpoint.as_directory() as folder:  # It counts if no other node lives: a swarm is ahead of it.
                node.load(os.path.join(folder, "run.safetensors"))
        while not node.finished and node.swarm_samples < samples:
            for x, y in node.shard((x_train, y_train), batch_size=16):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss=loss, samples=len(x))
                optimizer.param_groups[0]["lr"] = 0.1 * max(0.0, 1 - node.swarm_samples / samples)
                time.sleep(args.step_delay)
                if time.monotonic() - reported_s > 5:
                    report()
                    reported_s = time.monotonic()
                if node.finished or node.swarm_samples >= samples:
                    break
        node.settle(3)
        node.finish()
        report()


def fit(number):
    """Run one node until it ends; restart its worker as often as that dies."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"number": number, "args": args, "addresses": addresses},
        scaling_config=ScalingConfig(num_workers=1, placement_strategy="SPREAD"),  # More would all restart together.
        run_config=RunConfig(
            name=f"node-{number}",
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    return trainer.fit().metrics


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--address", help="of a Ray cluster that runs, or auto; none starts one on this machine")
# Paths are absolute because a worker has another working directory than the driver.
parser.add_argument(
    "--states", type=os.path.abspath, required=True,
    help="each node keeps its identity in a directory here, on its machine",
)  # fmt: skip
parser.add_argument("--storage", help="where Ray Train keeps checkpoints; ~/ray_results if left out")
parser.add_argument("--listen", default="127.0.0.1:0", help="beyond one machine 0.0.0.0:0, with --secret")
parser.add_argument("--secret", type=os.path.abspath, help="the path of the swarm's secret, on every machine")
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")

if __name__ == "__main__":
    args = parser.parse_args()
    ray.init(args.address, namespace="swarm", log_to_driver=False)
    # On the driver's machine: lost with another one, it would start again without addresses for a while.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    addresses = Addresses.options(scheduling_strategy=here).remote()
    pool = ThreadPoolExecutor(args.nodes)
    try:
        for metrics in pool.map(fit, range(args.nodes)):
            print(json.dumps(metrics), flush=True)
    finally:
        ray.shutdown()  # After ^C too: the threads of the pool then end.
