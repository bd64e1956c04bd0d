"""Quasi-global momentum on handwritten digits: SGD whose momentum follows the mixed weights, not the local gradients.

A node's own gradients follow its own data, so that their momentum carries nodes apart between two mixes. A node's
movement from one mix to the next, mixes included, is nearer to the swarm's direction (T. Lin, S. P. Karimireddy,
S. U. Stich, M. Jaggi, ICML 2021, arXiv:2102.04761, algorithm 1, QG-DSGDm). The lines that say `gossip` add the swarm,
and the lines that say `momentum` let the optimizer follow its mixes.

On one machine:                 gossip local -n 4 examples/quasi_global.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/quasi_global.py
"""

import argparse
import json
import threading
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

from gossip import Config, Node  # gossip 1: one import


class QuasiGlobal(torch.optim.Optimizer):
    """SGD with quasi-global momentum ``m``, in the place of ``torch.optim.SGD(..., momentum=0.9)``.

    For a parameter ``x`` with the gradient ``g``, and ``x_old`` as the last mix left it:

        step:   x <- x - lr (g + momentum m)        # g with weight decay, as in SGD
        mix:    m <- momentum m + (1 - momentum) (x_old - x_new) / (sum of lr over the steps since the last mix)

    Before its first mix, this is SGD without momentum, bit for bit. Under a constant gradient ``m`` tends to
    g / (1 - momentum), as SGD's does, but over 1 / (1 - momentum)^2 mixes. A parameter without a step since the last
    mix keeps its momentum.

    Its ``state`` is ``m``, which newcomers take over. ``x_old`` takes as much memory and is not saved: after a state
    was loaded, a new interval starts at the next step. Gradients must be dense.
    """

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        if not (0.0 <= lr < float("inf") and 0.0 <= momentum < 1.0 and 0.0 <= weight_decay < float("inf")):
            raise ValueError(f"lr {lr}, momentum {momentum}, weight_decay {weight_decay}: momentum must be below 1.")
        # These are SGD's names, so that schedulers that cycle the momentum find it.
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.joined()

    @torch.no_grad()
    def step(self, closure=None):
        """Take one local step; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if parameter not in self.x_old:
                    self.x_old[parameter] = parameter.detach().clone()
                # Not SGD's "momentum_buffer": newcomers with SGD must not take it for theirs.
                if "quasi_global" not in self.state[parameter]:
                    self.state[parameter]["quasi_global"] = torch.zeros_like(parameter)
                self.lr_sum[parameter] = self.lr_sum.get(parameter, 0.0) + group["lr"]
            gradients = [parameter.grad for parameter in parameters]
            if group["weight_decay"]:
                gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
            momenta = [self.state[parameter]["quasi_global"] for parameter in parameters]
            # Add one after the other: a sum first would need another copy of the model.
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"])
            torch._foreach_add_(parameters, momenta, alpha=-group["lr"] * group["momentum"])
        return loss

    @torch.no_grad()
    def mixed(self):
        """Update the momentum from the parameters' movement; call it after they were averaged with others."""
        for group in self.param_groups:
            for x in group["params"]:
                if self.lr_sum.get(x, 0.0) > 0.0:
                    moved = self.x_old[x].sub_(x).mul_((1.0 - group["momentum"]) / self.lr_sum[x])
                    self.state[x]["quasi_global"].mul_(group["momentum"]).add_(moved)
                    self.x_old[x].copy_(x)
                    self.lr_sum[x] = 0.0

    def joined(self):
        """Begin again without momentum; call it after weights of another run or a file took the place of these."""
        self.x_old, self.lr_sum = {}, {}  # By parameter.
        for state in self.state.values():
            if state:
                state["quasi_global"].zero_()

    def __setstate__(self, state):
        """Start a new interval in a copy and after a state was loaded; torch copies no other attributes."""
        super().__setstate__(state)
        self.x_old, self.lr_sum = {}, {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds to mix without training before evaluating")
    args = parser.parse_args()

    # 1,797 digits of 8 x 8 pixels with values 0..16, the same fifth of every class held out on every node.
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test = (torch.from_numpy(part).float() for part in parts[:2])  # (1437, 64), (360, 64)
    y_train, y_test = (torch.from_numpy(part).long() for part in parts[2:])  # (1437,), (360,)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # 4,810 parameters
    optimizer = QuasiGlobal(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=1e-3)
    has_mixed, has_joined = threading.Event(), threading.Event()
    mixes = 0

    # Plain means: a second momentum over the mixes, as the default's, costs accuracy.
    with Node(model, optimizer, config=Config(outer_momentum=0)) as node:  # gossip 2: joins the swarm, or starts one
        node.on("exchange.done", lambda event: has_mixed.set())  # momentum: callbacks run in a thread of their own
        for kind in ("joined", "merged"):
            node.on(kind, lambda event: has_joined.set())  # momentum: weights of another run took the place of these
        while not node.finished and node.swarm_samples < args.samples:  # gossip 3: all stop about the same time
            for x, y in node.shard((x_train, y_train), batch_size=args.batch_size):  # gossip 4: this node's share
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                is_mix_due = has_mixed.is_set()  # momentum: this mix lands in node.step(), or has landed before
                has_mixed.clear()
                node.step(loss=loss, samples=len(x))  # gossip 5: averaged weights land here; it never waits
                if has_joined.is_set():
                    has_joined.clear()
                    optimizer.joined()  # momentum: the old weights' one is of no use to the new ones
                elif is_mix_due:
                    optimizer.mixed()  # momentum: a mix that lands a step late counts in the next interval
                    mixes += 1
                time.sleep(args.step_delay)
                if node.finished or node.swarm_samples >= args.samples:
                    break
        node.settle(args.settle, wait_s=60)  # wait for the others, then mix without training until the nodes agree
        node.finish()  # a node that joins now gets these weights and trains nothing
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        result = {"node": node.id, "accuracy": accuracy, "steps": node.metrics().steps, "mixes": mixes}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
