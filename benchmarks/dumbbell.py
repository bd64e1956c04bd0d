"""The dumbbell experiment of ClippedGossip: two cliques of ten, joined by one edge, with half of MNIST's classes each.

    python benchmarks/dumbbell.py [--rule gossip]... [--iterations 900] [--seed 1] [--curve]

The job of L. He, S. P. Karimireddy and M. Jaggi, "Byzantine-robust decentralized learning via self-centered clipping",
arXiv:2202.01545, without attackers, mixed by a swarm of the simulator. All nodes start from equal weights, and mix with
all neighbours after each step of SGD with momentum. Accuracy is that of the mean of all models, and of the mean over
each clique, on the whole test set. A run of 900 iterations takes 13 minutes of one core.

Twenty peers form a graph of ranks, whose every edge weighs 1/11. ``filter`` is "none", or "clip" of radius 1. The
membership is ideal and the network takes no time. Weights, samples and dropout masks are those of the authors' runs
(dumbbell_published.py): in each of 30 epochs a node sees the same 30 batches, and dropout draws the same mask in every
step of every node. Unlike theirs the swarm is asynchronous. Every peer has a clock of its own, every pair of neighbours
exchanges separately, and each side adds the result at its next step boundary, while both train on.
"""

import argparse
import tempfile
import time
from pathlib import Path

import dumbbell_published
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sim import Scenario
from sim.learning.corpora import mnist
from sim.simulation import Simulation

CLIQUE = 10
NODES = 2 * CLIQUE
BATCH, BATCHES = 32, 30  # samples a step, and steps until a node's batches come again
RATE, MOMENTUM = 0.01, 0.9
STEP_S = 0.1  # virtual time of a step
FILTERS = {"gossip": {"filter": "none"}, "clipped": {"filter": "clip", "filter_limit": 1.0}}  # the paper's tau
SHUFFLES = {"gossip": 1, "clipped": 2}  # how often the published runs shuffled the samples
SEED = 0  # seed of the initial weights, as in the published runs


def edges():
    """Return which nodes are neighbours: bool (nodes, nodes). The bridge joins the first node and the last."""
    joined = torch.zeros(NODES, NODES, dtype=torch.bool)
    joined[:CLIQUE, :CLIQUE] = joined[CLIQUE:, CLIQUE:] = True
    joined.fill_diagonal_(False)
    joined[0, -1] = joined[-1, 0] = True
    return joined


def network():
    """Create the job's model, 1,199,882 parameters; only its initial weights are used."""
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3), nn.Linear(9216, 128), nn.Linear(128, 10))


def views(row, shapes):
    """Return one row of the matrix of models as parameters that share its memory."""
    return [piece.view(shape) for piece, shape in zip(row.split([s.numel() for s in shapes]), shapes, strict=True)]


def logits(parameters, x, masks):
    """Compute logits: x (batch, 1, 28, 28) -> (batch, 10). ``masks`` are the dropout factors, or None.

    All layers but the last are computed in bfloat16. The channels are last, which makes pooling ten times faster.
    """
    *most, w4, b4 = parameters
    w1, b1, w2, b2, w3, b3 = (parameter.bfloat16() for parameter in most)
    h = F.conv2d(x.bfloat16(), w1, b1)  # (batch, 32, 26, 26)
    h = h.contiguous(memory_format=torch.channels_last).relu()
    # The authors' model has no ReLU here. With one, the loss after ten steps is 1.22 instead of 1.06.
    h = F.max_pool2d(F.conv2d(h, w2.contiguous(memory_format=torch.channels_last), b2), 2)  # (batch, 64, 12, 12)
    if masks:
        h = (h * masks[0]).bfloat16()  # the product is float32, as the masks are
    h = F.linear(h.flatten(1), w3, b3).float().relu()  # (batch, 128)
    return F.linear(h * masks[1] if masks else h, w4, b4)


def accuracy(row, shapes, x, y):
    """Return the accuracy of the model in ``row`` on the test set, in %."""
    parameters = views(row, shapes)
    with torch.no_grad():
        right = sum(
            int((logits(parameters, images, None).argmax(1) == labels).sum())
            for images, labels in zip(x.split(500), y.split(500), strict=True)
        )
    return 100 * right / len(y)


def accuracies(models, shapes, split):
    """Return the accuracies of the mean of all models, of clique 1 and of clique 2, in %."""
    parts = models, models[:CLIQUE], models[CLIQUE:]
    return [accuracy(part.mean(0), shapes, *split[2:]) for part in parts]


class OneByOne(torch.autograd.Function):
    """``logits`` for many models, computed one by one.

    A convolution of one model fills a core already. torch.func.vmap also does not support the channels-last tensors
    that make pooling fast.
    """

    @staticmethod
    def forward(x, masks, *parameters):
        return logits(parameters, x, masks)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Do nothing: autograd handles the operations in vmap below."""

    @staticmethod
    def vmap(info, in_dims, x, masks, *parameters):
        models = range(info.batch_size)
        return torch.stack([OneByOne.forward(x[i], masks, *(stacked[i] for stacked in parameters)) for i in models]), 0


class Network(nn.Module):
    """The job's model, (batch, 1, 28, 28) -> logits (batch, 10), with the published dropout masks."""

    def __init__(self):
        super().__init__()
        self.layers = network()
        self.masks = dumbbell_published.masks(BATCH)

    def forward(self, x):
        # The masks fit a training batch. Test batches have other sizes and no dropout.
        return OneByOne.apply(x, self.masks if len(x) == BATCH else None, *self.layers.parameters())


def model():
    """Create the scenario's model, with the initial weights of the published runs."""
    torch.manual_seed(SEED)
    return Network()


class SameBatches:
    """A replacement of sim.learning.batches.Batches: every epoch has the same batches in the same order.

    ``samples`` int64 (peers, samples).
    """

    def __init__(self, samples):
        self.samples = samples.numpy()

    def draw(self, peers, steps):
        """Return the samples of batch number ``steps[i]`` of peer ``peers[i]``: int64 (peers, batch)."""
        first = BATCH * (steps % BATCHES)
        return self.samples[peers[:, None], first[:, None] + np.arange(BATCH)]


def scenario(rule, iterations, seed, graph):
    """Return the job; its peers end their last step at the end of the run, and do not mix after it."""
    return Scenario.from_mapping({
        "name": f"dumbbell, {rule}", "seed": seed, "peers": NODES,
        "duration_s": (iterations - 1) * STEP_S + 1e-6,
        "task": {
            "dataset": "mnist", "model": "dumbbell:model", "batch_size": BATCH,
            "optimizer": {"name": "sgd", "lr": RATE, "momentum": MOMENTUM},
        },
        "gossip": {"selection": "graph", "graph": str(graph), "partners": 0, "mix_every_steps": 1} | FILTERS[rule],
        "compute": {"step_s": STEP_S},
        "network": {"latency": {"kind": "constant", "value_ms": 0}, "rate_mbit_s": "unlimited"},
        "membership": {"mode": "ideal"},
    })  # fmt: skip


def run(rule, split, args, graph):
    """Run the job once, print the mixes of an edge, and return the three accuracies."""
    simulation = Simulation(scenario(rule, args.iterations, args.seed, graph))
    swarm, learners = simulation.swarm, simulation.learners
    # Ranks order the members by id: node i of the dumbbell is the peer with the i-th smallest id.
    rows = sorted(range(NODES), key=lambda row: swarm.hosts[row].id)
    samples = torch.empty(NODES, BATCH * BATCHES, dtype=torch.int64)
    samples[rows] = dumbbell_published.samples(split[1], SHUFFLES[rule])[:, : samples.shape[1]]
    learners._batches = SameBatches(samples)
    shapes = [parameter.shape for parameter in network().parameters()]

    def figures():
        swarm.training.update_models(swarm.now)
        return accuracies(torch.from_numpy(learners.matrix)[rows], shapes, split)

    shown = 0
    for _ in simulation.slices():
        epoch = int(learners.steps_taken.min()) // BATCHES
        if args.curve and epoch // 5 > shown:
            shown = epoch // 5
            print(f"epoch {epoch}:", " / ".join(f"{figure:.1f}" for figure in figures()), flush=True)
    result = figures()
    count = int(edges().sum()) // 2
    steps = learners.steps_taken
    print(f"{steps.min()} to {steps.max()} steps, {swarm.sessions.mixes / 2 / count:.1f} mixes of an edge", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", action="append", choices=list(FILTERS), help="one rule; may be repeated")
    parser.add_argument("--iterations", type=int, default=900)
    parser.add_argument("--seed", type=int, default=1, help="of the peers' ids and clocks")
    parser.add_argument("--curve", action="store_true", help="the accuracies every five epochs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    split = mnist()
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "dumbbell.txt"
        graph.write_text("".join(f"{a} {b}\n" for a, b in torch.nonzero(edges().triu()).tolist()))
        for rule in args.rule or FILTERS:
            began_s = time.process_time()
            figures = " / ".join(f"{figure:.1f}" for figure in run(rule, split, args, graph))
            print(f"{rule}: {figures} ({time.process_time() - began_s:.0f} s of CPU)", flush=True)


if __name__ == "__main__":
    main()
