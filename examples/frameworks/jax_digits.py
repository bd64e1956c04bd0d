"""Handwritten digits with JAX and optax. The lines that say `gossip` are all that training in a swarm adds.

On one machine:                 gossip local -n 3 examples/frameworks/jax_digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/frameworks/jax_digits.py --folder here
Ended by anything, and started again with the same --folder, it goes on where its last checkpoint was.
"""

import argparse
import contextlib
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from gossip import Node  # gossip 1: two imports
from node.adapters.jax import Pytree

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--folder", type=Path, help="keep checkpoints here, and go on from the last one")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
parser.add_argument("--alone", action="store_true", help="the same loop without a swarm, to compare")
args = parser.parse_args()

# 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test = (part.astype("float32") for part in parts[:2])  # (1437, 64), (360, 64)
y_train, y_test = (part.astype("int32") for part in parts[2:])  # (1437,), (360,)

keys = jax.random.split(jax.random.key(0), 2)
params = {
    "hidden": {"w": jax.random.normal(keys[0], (64, 64)) * 0.1, "b": jnp.zeros(64)},
    "out": {"w": jax.random.normal(keys[1], (64, 10)) * 0.1, "b": jnp.zeros(10)},
}  # 4,810 parameters
optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.05, momentum=0.9))
moments = optimizer.init(params)


def logits(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, moments, x, y):
    """Take one step; the buffers of the arguments are reused for the results."""
    loss, gradients = jax.value_and_grad(
        lambda params: optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()
    )(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


random = np.random.default_rng(0)
seen = steps = 0
tree = Pytree(params)
with contextlib.nullcontext() if args.alone else Node(tree) as node:  # gossip 2: joins, or starts a swarm
    path = args.folder / "run.safetensors" if args.folder else None
    if node and path and path.exists():
        node.load(path)  # gossip 3: goes on with the run
    params = tree.value  # the swarm's weights, if there is one

    def done() -> bool:
        """Return True once the requested samples are trained on."""
        return node.finished or node.swarm_samples >= args.samples if node else seen >= args.samples

    while not done():
        # Batches of one shape: another one would be compiled anew.
        order = node.sampler(len(x_train), 16, drop_last=True) if node else random.permutation(1424).reshape(-1, 16)
        for rows in order:  # gossip 4: this node's share
            params, moments, loss = train_step(params, moments, x_train[rows], y_train[rows])
            seen, steps = seen + len(rows), steps + 1
            if node:
                tree.value = params
                node.step(loss=loss, samples=len(rows))  # gossip 5: weights that were averaged land in the tree
                params = tree.value
                if path and steps % 50 == 0:
                    node.save(path)
            time.sleep(args.step_delay)
            if done():
                break
    if node:
        node.settle(3.0)  # mix without training until the nodes agree
        node.finish()  # a node that joins now gets these weights and trains nothing
        params = tree.value
    accuracy = float((logits(params, x_test).argmax(1) == y_test).mean())
    result = {"accuracy": accuracy, "steps": steps}
    if node:
        result |= {"samples": node.metrics().samples, "swarm_samples": node.swarm_samples}
print(json.dumps(result), flush=True)
