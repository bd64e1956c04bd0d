"""Random orders of what a node does to a model on the device, compared with the same on the host."""

import random

import numpy as np
import torch
from torch import nn

from node.model.snapshot import ModelState
from tests.device.cuda import simulated

CALLS = 20
KINDS = ("read", "read", "part", "piece", "add", "add", "at", "merge", "step", "step", "look", "scaled")


class Side:
    """A model with a buffer and its optimizer, on the device or on the host. Without a type it has three."""

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        for layer, own in zip(self.model, (torch.bfloat16, torch.float32, torch.float16), strict=True):
            layer.to(dtype or own)
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.copy_(torch.randint(0, 8, tensor.shape))
        self.model.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1.0)
        self.state = ModelState(self.model, self.optimizer)

    def step(self, amount: int) -> None:
        """Train a step of exact arithmetic; the forward pass changes the buffers."""
        with torch.no_grad():
            for buffer in self.model.buffers():
                buffer.add_(amount)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, amount)
        self.optimizer.step()


def wrong_values(seed: int, dtype: torch.dtype | None = torch.float32, own_stream: bool = False) -> int:
    """Return how many elements of all reads differ from the host's."""
    rng, wrong = random.Random(seed), 0
    with simulated(seed=seed) as on:
        there, here = Side("cuda", dtype), Side("cpu", dtype)
        torch.cuda.synchronize()
        on.queues.pace = rng.choice([0.4, 0.6])  # The device lags behind the host, as during a training loop.
        before = len(on.waits)
        free = [there.state.buffer(there.state.size()) for _ in range(8)]
        reading, adding = [], []
        pull, version = there.state.buffer(there.state.size()), 0
        pull += np.arange(pull.size) % 7  # Portions differ.
        if own_stream:
            on.here.stream = torch.cuda.Stream().queue
        for _ in range(CALLS):
            match rng.choice(KINDS):
                case "step":
                    amount = rng.randint(0, 2)
                    there.step(amount)
                    here.step(amount)
                case "look":
                    on.queues.drift()
                case "scaled":
                    pull += rng.randint(0, 1)
                    version += 1
                    here.state.add_scaled(pull, 2.0, version)
                    while not there.state.add_scaled(pull, 2.0, version):
                        on.queues.drift()
                case kind if free:
                    vector = free.pop()
                    if kind in ("read", "part", "piece"):
                        out, expected, copies = begun(kind, there, here, vector, rng)
                        reading.append((vector, out, expected, copies))
                    else:
                        adding.append((vector, changed(kind, there, here, vector, rng)))
            for row in [row for row in reading if row[-1].done()]:
                reading.remove(row)
                row[-1].widen()
                wrong += differing(row[1], row[2])
                free.append(row[0])
            for row in [row for row in adding if row[-1].done()]:
                adding.remove(row)
                row[0].fill(-100.0)  # The vector is reused.
                free.append(row[0])
        assert len(on.waits) == before, on.waits[before:]
        torch.cuda.synchronize()
        for _, out, expected, copies in reading:
            assert copies.done()
            copies.widen()
            wrong += differing(out, expected)
        for mine, theirs in zip(there.model.state_dict().values(), here.model.state_dict().values(), strict=True):
            wrong += differing(mine.float().cpu().numpy(), theirs.float().numpy())
    return wrong


def begun(kind, there, here, vector, rng):
    size = vector.size
    if kind == "read":
        expected = np.empty(size, np.float32)
        here.state.read(expected)
        return vector, expected, there.state.begin_read(vector)
    start = rng.randrange(size - 10)
    out, expected = vector[:10], np.empty(10, np.float32)
    if kind == "piece":
        here.state.begin_read_piece(expected, start)
        return out, expected, there.state.begin_read_piece(out, start)
    places = np.sort(np.array(rng.sample(range(size), 10)))
    here.state.begin_read_at(expected, places)
    return out, expected, there.state.begin_read_at(out, places)


def changed(kind, there, here, vector, rng):
    vector[:] = [rng.randint(0, 3) for _ in range(vector.size)]
    ahead = there.state.begin_upload(vector) if rng.random() < 0.5 else None
    if ahead is not None and rng.random() < 0.5:
        there.step(1)
        here.step(1)
    if kind == "add":
        here.state.add(vector.copy())
        return there.state.add(vector) if ahead is None else ahead.add()
    if kind == "merge":
        here.state.merge(vector.copy(), 0.5)
        return there.state.merge(vector, 0.5) if ahead is None else ahead.merge(0.5)
    places = np.sort(np.array(rng.sample(range(vector.size), 10)))
    here.state.add_at(vector[:10].copy(), places)
    return there.state.add_at(vector[:10], places)


def differing(found, expected) -> int:
    return int((np.asarray(found).ravel() != np.asarray(expected).ravel()).sum())
