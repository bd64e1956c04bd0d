"""The job that every library of ``benchmarks/wan.py`` trains: digits, steps at a fixed pace, a diary of accuracies.

The model is a perceptron (64, 64, 10) and a vector of padding, whose gradients are zeros and which travels like any
parameter. Learning per step and the arithmetic of a step are therefore the same at 1 MB and at 10. Each rank has a
quarter of the training images, in batches that (rank, epoch) decide. Needs torch and scikit-learn, nothing else, since
each peer runs in an environment of its own.

A diary is lines of JSON; times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

import argparse
import ctypes
import json
import signal
import time
from pathlib import Path

import torch
from torch import nn

HIDDEN, BATCH = 64, 8
LOOK_S = 0.25  # interval at which accuracy is measured, at most once a step
PR_SET_PDEATHSIG = 1


class Padded(nn.Module):
    """A perceptron with padding up to a size in MB."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        torch.manual_seed(0)  # all nodes begin with the same weights
        self.learned = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
        rest = int(megabytes * 1e6) // 4 - sum(parameter.numel() for parameter in self.learned.parameters())
        self.padding = nn.Parameter(torch.randn(max(1, rest)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.learned(images) + 0.0 * self.padding.sum()


class Job:
    """``job.train(model, optimizer, after)``: trains until the process is killed; ``after(loss)`` follows each step."""

    def __init__(self, name: str) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the benchmark
        parser = argparse.ArgumentParser(description=f"One node of benchmarks/wan.py, by {name}.")
        parser.add_argument("--rank", type=int, required=True)
        parser.add_argument("--ranks", type=int, required=True)
        parser.add_argument("--address", required=True, help="of this node; the first one's is --first")
        parser.add_argument("--first", required=True)
        parser.add_argument("--folder", type=Path, required=True, help="of all nodes of the run")
        parser.add_argument("--megabytes", type=float, required=True)
        parser.add_argument("--rate", type=float, required=True)
        parser.add_argument("--step-s", type=float, required=True)
        parser.add_argument("--every", type=int, required=True, help="steps between two averages, where there are any")
        self.options = parser.parse_args()
        self.diary = (self.options.folder / f"{self.options.rank}.jsonl").open("w", buffering=1, encoding="utf-8")
        torch.set_num_threads(1)
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images, labels = torch.from_numpy(pixels / 16).float()[order], torch.from_numpy(labels)[order]
        own = slice(self.options.rank, 1437, self.options.ranks)
        self.images, self.labels = images[own], labels[own]  # (359 or 360, 64)
        self.test = images[1437:], labels[1437:]  # (360, 64)
        self.model = Padded(self.options.megabytes)

    def note(self, kind: str, **fields: object) -> None:
        self.diary.write(json.dumps({"kind": kind, "at": time.monotonic()} | fields) + "\n")

    def batches(self):
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(self.options.rank + self.options.ranks * epoch)
            order = torch.randperm(len(self.labels), generator=generator)
            for rows in order[: len(order) // BATCH * BATCH].view(-1, BATCH):
                yield self.images[rows], self.labels[rows]
            epoch += 1

    def train(self, model, optimizer, after=lambda loss: None) -> None:
        """Train until the process is killed.

        Each step takes ``--step-s`` by sleeping, or as long as its communication if that is longer, as though the two
        overlapped. Lost time is not made up for.
        """
        due = look_at = time.monotonic()
        self.note("begins")
        for steps, (images, labels) in enumerate(self.batches(), 1):
            due = max(due + self.options.step_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            after(loss)
            if time.monotonic() >= look_at:
                self.note("look", steps=steps, accuracy=self.accuracy())
                look_at = max(look_at + LOOK_S, time.monotonic())

    @torch.no_grad()
    def accuracy(self) -> float:
        images, labels = self.test
        return float((self.model(images).argmax(1) == labels).float().mean())
