"""The dumbbell of ClippedGossip as a scenario of the simulator: benchmarks/dumbbell.py's job, mixed by a swarm.

    python benchmarks/dumbbell_swarm.py [--rule gossip]... [--iterations 900] [--seed 3]

Twenty peers on a graph of ranks, whose every edge weighs 1/11, mix with all neighbours after each step. ``filter`` is
"none", or "clip" with a radius of 1. The membership is ideal and the network takes no time. The only difference from
dumbbell.py --draws published is the swarm's asynchronous mixing. Every peer has a clock of its own, and every pair of
neighbours exchanges separately. Each side adds the result at its next step boundary, while both train on. A run takes
13 minutes of one core.
"""

import argparse
import tempfile
import time
from pathlib import Path

import dumbbell
import dumbbell_published
import numpy as np
import torch
from torch import nn

from sim import Scenario
from sim.learning.corpora import mnist
from sim.simulation import Simulation

STEP_S = 0.1  # virtual time of a step
FILTERS = {"gossip": {"filter": "none"}, "clipped": {"filter": "clip", "filter_limit": dumbbell.RADIUS}}
SEED = 0  # seed of the initial weights, as in the published runs


class OneByOne(torch.autograd.Function):
    """dumbbell.logits for many models, computed one by one.

    A convolution of one model fills a core already. torch.func.vmap also does not support the channels-last tensors
    that make pooling fast.
    """

    @staticmethod
    def forward(x, masks, *parameters):
        return dumbbell.logits(parameters, x, masks, torch.bfloat16)

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
        self.layers = dumbbell.network()
        self.masks = dumbbell_published.masks(dumbbell.BATCH)

    def forward(self, x):
        # The masks fit a training batch. Test batches have other sizes and no dropout.
        return OneByOne.apply(x, self.masks if len(x) == dumbbell.BATCH else None, *self.layers.parameters())


def model():
    """Create the scenario's model, with the initial weights of the synchronous run."""
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
        first = dumbbell.BATCH * (steps % dumbbell.BATCHES)
        return self.samples[peers[:, None], first[:, None] + np.arange(dumbbell.BATCH)]


def scenario(rule, iterations, seed, graph):
    """Return the job; its peers end their last step at the end of the run, and do not mix after it."""
    return Scenario.from_mapping({
        "name": f"dumbbell, {rule}", "seed": seed, "peers": dumbbell.NODES,
        "duration_s": (iterations - 1) * STEP_S + 1e-6,
        "task": {
            "dataset": "mnist", "model": "dumbbell_swarm:model", "batch_size": dumbbell.BATCH,
            "optimizer": {"name": "sgd", "lr": dumbbell.RATE, "momentum": dumbbell.MOMENTUM},
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
    rows = sorted(range(dumbbell.NODES), key=lambda row: swarm.hosts[row].id)
    samples = torch.empty(dumbbell.NODES, dumbbell.BATCH * dumbbell.BATCHES, dtype=torch.int64)
    samples[rows] = dumbbell_published.samples(split[1], dumbbell.SHUFFLES[rule])[:, : samples.shape[1]]
    learners._batches = SameBatches(samples)
    shapes = [parameter.shape for parameter in dumbbell.network().parameters()]

    def figures():
        swarm.training.update_models(swarm.now)
        return dumbbell.accuracies(torch.from_numpy(learners.matrix)[rows], shapes, split, torch.bfloat16)

    shown = 0
    for _ in simulation.slices():
        epoch = int(learners.steps_taken.min()) // dumbbell.BATCHES
        if args.curve and epoch // 5 > shown:
            shown = epoch // 5
            print(f"epoch {epoch}:", " / ".join(f"{figure:.1f}" for figure in figures()), flush=True)
    result = figures()
    edges = int(dumbbell.edges().sum()) // 2
    steps = learners.steps_taken
    print(f"{steps.min()} to {steps.max()} steps, {swarm.sessions.mixes / 2 / edges:.1f} mixes of an edge", flush=True)
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
        graph.write_text("".join(f"{a} {b}\n" for a, b in torch.nonzero(dumbbell.edges().triu()).tolist()))
        for rule in args.rule or FILTERS:
            began_s = time.process_time()
            figures = " / ".join(f"{figure:.1f}" for figure in run(rule, split, args, graph))
            print(f"{rule}: {figures} ({time.process_time() - began_s:.0f} s of CPU)", flush=True)


if __name__ == "__main__":
    main()
