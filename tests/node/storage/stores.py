"""A store that fails as a test tells it to, and helpers for nodes that save there."""

import itertools
import threading
from pathlib import Path

import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from node.model import checkpoint
from tests.node.conftest import until
from tests.node.trainees import filled

names = itertools.count()


class Faulty(MemoryFileSystem):
    """A store in memory that fails as its class attributes say."""

    protocol = "faulty"
    store: dict = {}  # noqa: RUF012 (the base has one)
    pseudo_dirs = [""]  # noqa: RUF012
    errors: list = []  # noqa: RUF012  (the next puts and gets raise them)
    goes_on = threading.Event()
    half = False  # A put writes half of the file before it fails.
    calls: list = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def attempt(self, kind, path):
        self.calls.append((kind, path))
        self.goes_on.wait(20)
        if self.errors:
            error = self.errors.pop(0)
            if error is not None:
                raise error

    def put_file(self, lpath, rpath, **options):
        try:
            self.attempt("put", rpath)
        except OSError:
            if self.half:
                data = Path(lpath).read_bytes()
                self.pipe_file(rpath, data[: len(data) // 2])
            raise
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath, lpath, **options):
        self.attempt("get", rpath)
        super().get_file(rpath, lpath, **options)


def linear(value=0.0):
    return filled(nn.Linear(4, 2), value)


def fill(node, value):
    with torch.no_grad():
        node._training.live.model.weight.fill_(value)


def weight_of(node):
    return float(node._training.live.model.weight[0, 0].detach())


def drained(node):
    """Wait until the node has no upload left."""
    node._training.run.uploads.wait(url="faulty://b/none")
    until(lambda: node._training.run.uploads.thread is None)


def save_each(node, *values, **options):
    """Save the model with each of these weights at faulty://b/run, and wait for each upload to end."""
    for value in values:
        fill(node, value)
        node.save("faulty://b/run", **options)
        drained(node)


def notices(node, *kinds):
    node._training.network.sync()
    return [event.sentence for event in node.history() if event.kind in kinds]


def weight_at(path, tmp_path):
    """Return the weight in a checkpoint of the store."""
    local = tmp_path / f"copy{next(names)}.safetensors"
    local.write_bytes(Faulty().cat_file(path))
    return float(checkpoint.load(local).tensors["weight"][0, 0])
