"""Handwritten digits in actors of Ray. If an actor dies, Ray starts it again, as the same node if it finds the
node's directory, and no other actor stops.

On one machine:     python examples/engines/ray_digits.py [--nodes 4] --states /var/gossip
On several:         ray start --head --node-ip-address HOST0 --port 6379    (on HOST0)
                    ray start --address HOST0:6379                          (on every other machine)
                    python examples/engines/ray_digits.py --address auto --nodes 4 --listen 0.0.0.0:0 \\
                        --secret /etc/gossip/swarm.secret --states /var/gossip    (on HOST0)
"""

import argparse
import json
import os
import time

import ray
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


# Ray restarts an actor that dies, and calls `train` again. The node uses Ray only to find the others' addresses.
# Without SPREAD Ray fills half of one machine before the next, and the machine's end would take several nodes.
@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Trainer:
    def __init__(self, number, args, addresses):
        self.number, self.args, self.addresses = number, args, addresses

    def train(self):
        import torch
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
        from torch import nn
        from torch.nn import functional as F

        from gossip import Node

        torch.set_num_threads(1)
        # Ray knows the address at which other machines reach this one; that of the default route may be another.
        listen = self.args.listen.replace("0.0.0.0", ray.util.get_node_ip_address())
        own = os.path.join(self.args.states, f"node-{self.number}")
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
            model, optimizer, state_dir=own, seeds=lambda: ray.get(self.addresses.all.remote(), timeout=5),
            listen=listen, secret=self.args.secret, wait_for=2,
        )  # fmt: skip
        node.on("listening", lambda event: self.addresses.add.remote(node.address))
        samples = self.args.samples
        with node:
            while not node.finished and node.swarm_samples < samples:
                for x, y in node.shard((x_train, y_train), batch_size=16):
                    loss = F.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    node.step(loss=loss, samples=len(x))
                    optimizer.param_groups[0]["lr"] = 0.1 * max(0.0, 1 - node.swarm_samples / samples)
                    time.sleep(self.args.step_delay)
                    if node.finished or node.swarm_samples >= samples:
                        break
            node.settle(3)
            node.finish()
            with torch.no_grad():
                accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
            return {"node": node.id, "accuracy": accuracy, "samples": node.metrics().samples}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--address", help="of a Ray cluster that runs, or auto; none starts one on this machine")
# Paths are absolute because an actor has another working directory than the driver.
parser.add_argument(
    "--states", type=os.path.abspath, required=True,
    help="each node keeps its identity in a directory here, on its machine",
)  # fmt: skip
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
    trainers = [
        Trainer.options(name=f"node-{number}").remote(number, args, addresses)  # ray.kill(ray.get_actor("node-0"))
        for number in range(args.nodes)
    ]
    for result in ray.get([trainer.train.remote() for trainer in trainers]):
        print(json.dumps(result), flush=True)
