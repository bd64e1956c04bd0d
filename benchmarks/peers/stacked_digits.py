"""Bare arithmetic on one thread: all models in a stack, all nodes mixing at once, no events and no network.

    python benchmarks/peers/stacked_digits.py [--model linear|mlp] [--nodes 1000] [--rounds 30]

The job of gossipy_digits.py as bare arithmetic on digits: in a round every node takes the mean with one partner, then
two SGD steps on batches of 8 of its 16 samples. One update is one node's round. Gradients are written out and added
where they are made. It is the reference for the cost of a simulator's event handling, but not quite a limit. Each step
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
    """Return the same random layers for every node: (nodes, inputs, outputs) and (nodes, 1, outputs) for each layer."""
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        matrix = torch.randn(inputs, outputs, generator=generator) * (2 / inputs) ** 0.5
        layers.append((matrix.expand(nodes, -1, -1).clone(), torch.zeros(nodes, 1, outputs)))
    return layers


def forward(layers, x):
    """Return the input of each layer and then the logits: (nodes, batch, width) each."""
    activations = [x]
    for depth, (matrix, bias) in enumerate(layers, 1):
        x = torch.baddbmm(bias, x, matrix)
        activations.append(x.relu_() if depth < len(layers) else x)
    return activations


def step(layers, x, target):
    """Take one SGD step of every node. ``target`` is one-hot."""
    *inputs, logits = forward(layers, x)
    errors = torch.softmax(logits, -1).sub_(target)  # BATCH times the gradient of the mean cross-entropy
    for depth in reversed(range(len(layers))):
        matrix, bias = layers[depth]
        # With the weights before the step. The first layer needs no gradient of its inputs.
        errors_below = (errors @ matrix.mT).mul_(inputs[depth] > 0) if depth else None
        matrix.baddbmm_(inputs[depth].mT, errors, alpha=-RATE / BATCH)
        bias.sub_(errors.sum(1, keepdim=True), alpha=RATE / BATCH)
        errors = errors_below


def mix(layers, generator):
    """Let every node take the mean with one random partner; with an odd number one node is left out."""
    nodes = len(layers[0][0])
    nodes_a, nodes_b = torch.randperm(nodes, generator=generator)[: nodes // 2 * 2].view(2, -1)
    for tensor in (tensor for layer in layers for tensor in layer):
        mean = tensor[nodes_a].add_(tensor[nodes_b]).mul_(0.5)
        tensor[nodes_a] = mean
        tensor[nodes_b] = mean


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
    batches = [x[own[:, number]].contiguous() for number in range(2)]  # (nodes, BATCH, 64)
    targets = [torch.nn.functional.one_hot(y[own[:, number]], 10).float() for number in range(2)]
    layers = weights(args.nodes, generator, *((64, 10) if args.model == "linear" else (64, 64, 10)))
    setup_s = time.process_time() - begin

    begin = time.process_time()
    for _ in range(args.rounds):
        mix(layers, generator)
        for batch, target in zip(batches, targets, strict=True):
            step(layers, batch, target)
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
