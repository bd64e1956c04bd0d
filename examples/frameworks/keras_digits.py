"""Handwritten digits with Keras 3 on torch or jax. The lines that say `gossip` are all that training in a swarm adds.

On one machine:                 KERAS_BACKEND=torch gossip local -n 3 examples/frameworks/keras_digits.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/frameworks/keras_digits.py --folder runs/here
Ended by anything, and started again with the same --folder, it goes on where its last checkpoint was.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from node.adapters.keras import KerasGossip  # gossip 1: one import

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
y_train, y_test = parts[2:]  # (1437,), (360,)
train = TensorDataset(torch.from_numpy(x_train), torch.from_numpy(y_train))

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
)  # 4,810 parameters
model.compile(
    keras.optimizers.SGD(0.05, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
# gossip 2: joins the swarm and takes its weights, or starts one; leaves it at the block's end
swarm_context = contextlib.nullcontext() if args.alone else KerasGossip(model, batch_size=16, samples=args.samples)
with swarm_context as gossip:
    order = gossip.sampler(train) if gossip else RandomSampler(train)  # gossip 3: this node's share
    loader = DataLoader(train, batch_size=16, sampler=order, drop_last=True)
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: time.sleep(args.step_delay))]
    if gossip:
        callbacks.append(gossip)  # gossip 4: weights that were averaged land after each step; all stop together
        if args.folder:
            path = args.folder / "run.safetensors"
            if path.exists():
                gossip.node.load(path)  # gossip 5: goes on with the run
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda *_, **__: gossip.node.save(path)))
    history = model.fit(loader, epochs=-(-args.samples // (16 * len(loader))), callbacks=callbacks, verbose=0)
    _, accuracy = model.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0)
    result = {"accuracy": accuracy, "steps": len(loader) * len(history.epoch)}
    if gossip:
        metrics = gossip.node.metrics()
        result |= {"steps": metrics.steps, "samples": metrics.samples, "swarm_samples": gossip.node.swarm_samples}
print(json.dumps(result), flush=True)
