"""Handwritten digits in a barrier stage of Spark, whose tasks start together and tell each other where they are. When
one fails Spark starts all of them again: each is the node that it was, and goes on from its checkpoint.

On one machine:     spark-submit examples/engines/spark_digits.py [--master local[4,10]] --states /var/gossip
On several:         spark-class org.apache.spark.deploy.master.Master --host HOST0 --port 7077    (on HOST0)
                    spark-class org.apache.spark.deploy.worker.Worker --host THIS_HOST spark://HOST0:7077    (on each)
                    SPARK_LOCAL_IP=HOST0 spark-submit --master spark://HOST0:7077 examples/engines/spark_digits.py \\
                        --nodes 4 --host 0.0.0.0 --secret /etc/gossip/swarm.secret --states /shared/gossip    (on HOST0)
"""

import argparse
import json
import os
import time

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession


def train(number, args):
    """Train one node, in a Python process of an executor."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.nn import functional as F

    from gossip import Node

    torch.set_num_threads(1)
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

    # Spark knows the address at which other machines reach this one; that of the default route may be another.
    context, addresses = BarrierTaskContext.get(), []
    this_host = context.getTaskInfos()[context.partitionId()].address.partition(":")[0]
    context.barrier()  # all have imported their packages: a node waits for others, but not for minutes
    node = Node(
        model, optimizer, state_dir=own, seeds=lambda: addresses, secret=args.secret, wait_for=2,
        listen=f"{args.host.replace('0.0.0.0', this_host)}:0",
    )  # fmt: skip
    node.on("listening", lambda event: addresses.extend(context.allGather(node.address)))
    checkpoint, saved_s = os.path.join(own, "run.safetensors"), time.monotonic()
    samples = args.samples
    with node:
        if os.path.exists(checkpoint) and not node.finished:
            node.load(checkpoint)
        while not node.finished and node.swarm_samples < samples:
            for x, y in node.shard((x_train, y_train), batch_size=16):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss=loss, samples=len(x))
                optimizer.param_groups[0]["lr"] = 0.1 * max(0.0, 1 - node.swarm_samples / samples)
                time.sleep(args.step_delay)
                if time.monotonic() - saved_s > 5:  # a barrier stage is ended without notice, so save often
                    node.save(checkpoint)
                    saved_s = time.monotonic()
                if node.finished or node.swarm_samples >= samples:
                    break
        node.settle(3)
        node.finish()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        return {"node": node.id, "accuracy": accuracy, "samples": node.metrics().samples}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--master", help="as spark-submit takes it; local[N,F] allows F failures")
# Paths are absolute because an executor has another working directory than this process.
parser.add_argument(
    "--states", type=os.path.abspath, required=True,
    help="each node keeps its identity in a directory here, on all machines",
)  # fmt: skip
parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 beyond one machine, with --secret")
parser.add_argument("--secret", type=os.path.abspath, help="the path of the swarm's secret, on every machine")
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")

if __name__ == "__main__":
    args = parser.parse_args()
    builder = SparkSession.builder.appName("swarm")
    spark = (builder.master(args.master) if args.master else builder).getOrCreate()
    parts = spark.sparkContext.parallelize(range(args.nodes), args.nodes).barrier()
    # Spark restarts a barrier stage only if a shuffle follows it, and repartition is one.
    results = parts.mapPartitions(lambda numbers: [train(next(iter(numbers)), args)]).repartition(1)
    for result in results.collect():
        print(json.dumps(result), flush=True)
    spark.stop()
