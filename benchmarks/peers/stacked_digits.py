"""Bare arithmetic on one thread: all models in a stack, everybody mixing at once, no events and no network.

    python benchmarks/peers/stacked_digits.py [--model linear|mlp] [--nodes 1000] [--rounds 30]

The job of gossipy_digits.py as bare arithmetic on digits: in a round every node takes the mean with one partner, then
two SGD steps on batches of 8 of its 16 samples. One update is one node's round. Gradients are written out and added
where they are made. It is what a simulator's event handling is to be measured against, not quite a limit: each step
goes over the whole stack, so 1,000 MLPs (19 MB) fall out of the cache that 100 fit in.

Needs torch and scikit-learn. Prints one JSON line.
"""

import argparse
import itertools
import json
import time

import torch
from sklearn.datasets import load_digits

BATCH, RATE = 8, 0.1


def weights(nodes, generator, *sizes):
    """The same random layers for every node: (nodes, inputs, outputs) and (nodes, 1, outputs) for each layer."""
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        matrix = torch.randn(inputs, outputs, generator=generator) * (2 / inputs) ** 0.5
        layers.append((matrix.expand(nodes, -1, -1).clone(), torch.zeros(nodes, 1, outputs)))
    return layers


def forward(layers, x):
    """What enters each layer, and at last the logits: (nodes, batch, width) each."""
    reached = [x]
    for depth, (matrix, bias) in enumerate(layers, 1):
        x = torch.baddbmm(bias, x, matrix)
        reached.append(x.relu_() if depth < len(layers) else x)
    return reached


def step(layers, x, target):
    """One SGD step of every node. ``target`` is one-hot."""
    *inputs, logits = forward(layers, x)
    back = torch.softmax(logits, -1).sub_(target)  # BATCH times the gradient of the mean cross-entropy
    for depth in reversed(range(len(layers))):
        matrix, bias = layers[depth]
        before = (back @ matrix.mT).mul_(inputs[depth] > 0) if depth else None  # with the weights before the step
        matrix.baddbmm_(inputs[depth].mT, back, alpha=-RATE / BATCH)
        bias.sub_(back.sum(1, keepdim=True), alpha=RATE / BATCH)
        back = before


def mix(layers, generator):
    """Everybody takes the mean with one random partner; with an odd number one sits out."""
    nodes = len(layers[0][0])
    one, other = torch.randperm(nodes, generator=generator)[: nodes // 2 * 2].view(2, -1)
    for tensor in (tensor for layer in layers for tensor in layer):
        mean = tensor[one].add_(tensor[other]).mul_(0.5)
        tensor[one] = mean
        tensor[other] = mean


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["linear", "mlp"], default="linear")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    begin = time.process_time()
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels / 16).float(), torch.from_numpy(labels)
    shuffled = torch.randperm(len(x), generator=generator)
    train, test = shuffled[:1437], shuffled[1437:]
    own = train[torch.randint(len(train), (args.nodes, 2, BATCH), generator=generator)]  # two batches of each node
    batches = [x[own[:, at]].contiguous() for at in range(2)]  # (nodes, BATCH, 64)
    targets = [torch.nn.functional.one_hot(y[own[:, at]], 10).float() for at in range(2)]
    layers = weights(args.nodes, generator, *((64, 10) if args.model == "linear" else (64, 64, 10)))
    setup_s = time.process_time() - begin

    begin = time.process_time()
    for _ in range(args.rounds):
        mix(layers, generator)
        for at in range(2):
            step(layers, batches[at], targets[at])
    cpu_s = time.process_time() - begin
    guesses = forward(
        [(matrix[:20], bias[:20]) for matrix, bias in layers], x[test].expand(min(20, args.nodes), -1, -1)
    )
    updates = args.nodes // 2 * 2 * args.rounds
    print(json.dumps({
        "peer": "stacked", "model": args.model, "peers": args.nodes, "rounds": args.rounds, "updates": updates,
        "setup_cpu_s": round(setup_s, 3), "cpu_s": round(cpu_s, 3), "updates_per_cpu_s": round(updates / cpu_s, 1),
        "accuracy": round((guesses[-1].argmax(-1) == y[test]).float().mean().item(), 4),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
