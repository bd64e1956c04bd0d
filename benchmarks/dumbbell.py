"""The dumbbell experiment of ClippedGossip: two cliques of ten, joined by one edge, with half of MNIST's classes each.

    python benchmarks/dumbbell.py [--rule gossip]... [--draws own] [--seeds 3] [--curve] [--fp32] [--fresh]

The job of L. He, S. P. Karimireddy and M. Jaggi, "Byzantine-robust decentralized learning via self-centered clipping",
arXiv:2202.01545, without attackers, as their code runs it. All nodes start from equal weights. 900 times every node
takes a step of SGD with momentum, and then mixes with its neighbours. Accuracy is that of the mean of all models, and
of the mean over each clique, on the whole test set. A run takes eight minutes of one core.

Their published seed is 0, which decides the initial weights. Its other random draws are in dumbbell_published.py, and
--draws selects the draws. Two properties of their code are kept, because the figures depend on them. In each of 30
epochs a node sees the same 30 batches, 960 samples in all. Dropout draws the same mask in every step of every node.
--fresh has neither property.
"""

import argparse
import statistics
import time

import dumbbell_published
import torch
from torch import nn
from torch.nn import functional as F

from gossip.filters.clip import clip_factor
from sim.learning.corpora import mnist

CLIQUE = 10
NODES = 2 * CLIQUE
BATCH, BATCHES = 32, 30  # samples a step, and steps until a node's batches come again
RATE, MOMENTUM = 0.01, 0.9
RADIUS = 1.0  # clipping radius, the paper's tau
# Smoothed Weiszfeld: K. Pillutla, S. M. Kakade and Z. Harchaoui, arXiv:1912.13445.
WEISZFELD_STEPS, SMOOTHING = 8, 0.1
# Accuracy in % of the mean of all models, of clique 1 and of clique 2. The paper shows one run. The authors' code
# includes the log of another run with the same seed, made after their sampler had changed to two shuffles.
PUBLISHED = {"gossip": (93.6, 69.0, 75.6), "clipped": (93.8, 71.4, 72.6), "median": (88.6, 50.7, 47.2)}
SHUFFLES = {"gossip": 1, "clipped": 2, "median": 1}  # how often the published runs shuffled the samples
PUBLISHED_AGAIN = {"gossip": (93.2, 70.2, 72.0), "clipped": (93.7, 70.7, 71.5), "median": (89.4, 50.7, 47.2)}


def edges():
    """Return which nodes are neighbours: bool (nodes, nodes). The bridge joins the first node and the last."""
    joined = torch.zeros(NODES, NODES, dtype=torch.bool)
    joined[:CLIQUE, :CLIQUE] = joined[CLIQUE:, CLIQUE:] = True
    joined.fill_diagonal_(False)
    joined[0, -1] = joined[-1, 0] = True
    return joined


# A rule's mix is linear once the distances are known. Each rule is therefore a function from the Gram matrix of all
# models (nodes, nodes) to a mixing matrix (nodes, nodes), whose row i makes node i's next model. This takes two passes
# over the models.


def gossip(gram):
    """Mix with weight 1/11 for every edge, as the ends of the bridge need; a node's own weight is the rest to 1."""
    weights = edges() / (CLIQUE + 1)
    return weights + torch.diag(1 - weights.sum(1))


def clipped(gram):
    """Mix with self-centred clipping, x_i + sum_j w_ij clip(x_j - x_i, tau): arXiv:2202.01545."""
    squares = gram.diag()
    differences = squares[:, None] + squares - 2 * gram  # |x_i - x_j|^2
    weights = edges() / (CLIQUE + 1)
    for i, j in torch.nonzero(edges()).tolist():
        weights[i, j] *= clip_factor(float(differences[i, j]), RADIUS)
    return weights + torch.diag(1 - weights.sum(1))


def median(gram):
    """Mix by the geometric median of a node's own model and its neighbours' models, with equal weights."""
    present = edges() | torch.eye(NODES, dtype=torch.bool)
    mix = torch.zeros(NODES, NODES)  # their Weiszfeld begins at the zero vector
    for _ in range(WEISZFELD_STEPS):
        inner = mix @ gram
        squares = (inner * mix).sum(1, keepdim=True) - 2 * inner + gram.diag()  # |z_i - x_k|^2
        mix = present / squares.clamp(min=SMOOTHING**2).sqrt()
        mix /= mix.sum(1, keepdim=True)
    return mix


RULES = {"gossip": gossip, "clipped": clipped, "median": median}


def network():
    """Create the job's model, 1,199,882 parameters; only its initial weights are used."""
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3), nn.Linear(9216, 128), nn.Linear(128, 10))


def views(row, shapes):
    """Return one row of the matrix of models as parameters that share its memory."""
    return [piece.view(shape) for piece, shape in zip(row.split([s.numel() for s in shapes]), shapes, strict=True)]


def logits(parameters, x, masks, precision):
    """Compute logits: x (batch, 1, 28, 28) -> (batch, 10). ``masks`` are the dropout factors, or None.

    All layers but the last are computed in ``precision``. The channels are last, which makes pooling ten times faster.
    """
    *most, w4, b4 = parameters
    w1, b1, w2, b2, w3, b3 = (parameter.to(precision) for parameter in most)
    h = F.conv2d(x.to(precision), w1, b1)  # (batch, 32, 26, 26)
    h = h.contiguous(memory_format=torch.channels_last).relu()
    # The authors' model has no ReLU here. With one, the loss after ten steps is 1.22 instead of 1.06.
    h = F.max_pool2d(F.conv2d(h, w2.contiguous(memory_format=torch.channels_last), b2), 2)  # (batch, 64, 12, 12)
    if masks:
        h = (h * masks[0]).to(precision)  # the product is float32, as the masks are
    h = F.linear(h.flatten(1), w3, b3).float().relu()  # (batch, 128)
    return F.linear(h * masks[1] if masks else h, w4, b4)


def draw_masks(generator):
    """Draw dropout masks for a quarter of the channels and half of the hidden units.

    Returns:
        The factors, (batch, 64, 1, 1) and (batch, 128).
    """
    channels = (torch.rand(BATCH, 64, 1, 1, generator=generator) < 0.75) / 0.75
    return channels, (torch.rand(BATCH, 128, generator=generator) < 0.5) / 0.5


def deal(labels, generator):
    """Divide the classes 0 to 4 among the nodes of clique 1, and the others among clique 2: int64 (nodes, samples).

    The distribution is that of the authors' sampler, with other random draws.
    """
    halves = [torch.nonzero(half).flatten() for half in (labels < 5, labels >= 5)]
    share = min(map(len, halves)) // CLIQUE
    dealt = [half[torch.randperm(len(half), generator=generator)][: share * CLIQUE] for half in halves]
    return torch.cat([half.view(CLIQUE, share) for half in dealt])


def draws(args, rule, labels, generator):
    """Return the samples of every node, int64 (nodes, samples), and the dropout masks."""
    if args.draws == "own":
        return deal(labels, generator), draw_masks(generator)
    shuffles = 2 if args.draws == "again" else SHUFFLES[rule]
    masks = draw_masks(generator) if args.draws == "samples" else dumbbell_published.masks(BATCH)
    return dumbbell_published.samples(labels, shuffles), masks


def accuracy(row, shapes, x, y, precision):
    """Return the accuracy of the model in ``row`` on the test set, in %."""
    parameters = views(row, shapes)
    with torch.no_grad():
        right = sum(
            int((logits(parameters, images, None, precision).argmax(1) == labels).sum())
            for images, labels in zip(x.split(500), y.split(500), strict=True)
        )
    return 100 * right / len(y)


def accuracies(models, shapes, split, precision):
    """Return the accuracies of the mean of all models, of clique 1 and of clique 2, in %."""
    parts = models, models[:CLIQUE], models[CLIQUE:]
    return [accuracy(part.mean(0), shapes, *split[2:], precision) for part in parts]


def train(rule, seed, split, args):
    """Run the job once, and return the three accuracies after the last iteration."""
    x, y, *_ = split
    precision = torch.float32 if args.fp32 else torch.bfloat16
    torch.manual_seed(seed)
    initial = list(network().parameters())
    shapes = [parameter.shape for parameter in initial]
    models = torch.cat([parameter.detach().flatten() for parameter in initial]).repeat(NODES, 1)  # (nodes, elements)
    mixed, momenta = torch.empty_like(models), torch.zeros_like(models)
    generator = torch.Generator().manual_seed(seed)
    samples, masks = draws(args, rule, y, generator)
    losses = []
    for iteration in range(args.iterations):
        batches = samples[:, BATCH * (iteration % BATCHES) :][:, :BATCH]
        if args.fresh:
            batches = samples.gather(1, torch.randint(samples.shape[1], (NODES, BATCH), generator=generator))
        # Autograd adds gradients into .grad, which is the momentum itself: m <- 0.9 m + g without a copy of g.
        momenta *= MOMENTUM
        total = 0.0
        for model, momentum, batch in zip(models, momenta, batches, strict=True):
            parameters = [view.requires_grad_() for view in views(model.detach(), shapes)]
            for parameter, slope in zip(parameters, views(momentum, shapes), strict=True):
                parameter.grad = slope
            if args.fresh:
                masks = draw_masks(generator)
            loss = F.cross_entropy(logits(parameters, x[batch], masks, precision), y[batch])
            loss.backward()
            total += float(loss.detach())
        losses.append(total / NODES)
        models.sub_(momenta, alpha=RATE)
        torch.mm(RULES[rule](models @ models.T), models, out=mixed)
        models, mixed = mixed, models
        if args.curve and (iteration + 1) % BATCHES == 0:
            epoch = (iteration + 1) // BATCHES
            figures = accuracies(models, shapes, split, precision) if epoch % 5 == 0 else []
            shown = " / ".join(f"{figure:.1f}" for figure in figures)
            print(f"epoch {epoch}: loss", *(f"{loss:.5f}" for loss in losses[-BATCHES::10]), shown, flush=True)
    return accuracies(models, shapes, split, precision)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rule", action="append", choices=list(RULES), help="one rule; may be repeated")
    parser.add_argument("--iterations", type=int, default=900)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fp32", action="store_true", help="float32 throughout, in half as much time again")
    parser.add_argument(
        "--draws",
        choices=("published", "again", "samples", "own"),
        default="published",
        help="whose samples and dropout masks: the very ones of the published runs, or of the authors' second log; the "
        "published samples alone; or all drawn anew for each seed",
    )
    parser.add_argument("--curve", action="store_true", help="the losses that the authors log, and accuracies")
    parser.add_argument("--fresh", action="store_true", help="new samples and new masks in every step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    split, runs = mnist(), {rule: [] for rule in args.rule or RULES}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for rule in runs:
            began_s = time.process_time()
            runs[rule].append(train(rule, seed, split, args))
            figures = " / ".join(f"{figure:.1f}" for figure in runs[rule][-1])
            print(f"seed {seed}, {rule}: {figures} ({time.process_time() - began_s:.0f} s of CPU)", flush=True)
    print("\nAccuracy in %, all / clique 1 / clique 2:\n")
    print("| rule | here, mean (spread over seeds) | published | their other run |\n| --- | --- | --- | --- |")
    for rule, rows in runs.items():
        here = " / ".join(
            f"{statistics.mean(each):.1f} ({statistics.pstdev(each):.1f})" for each in zip(*rows, strict=True)
        )
        theirs = " | ".join(" / ".join(map(str, run[rule])) for run in (PUBLISHED, PUBLISHED_AGAIN))
        print(f"| {rule} | {here} | {theirs} |")


if __name__ == "__main__":
    main()
