"""Training on a GPU reaches what training on the CPU reaches, also together with slower nodes on CPUs.

    python -m benchmarks.accelerator_equal [--simulated]

Swarms of three nodes learn handwritten digits: on the CPU, on the GPU, and one node on the GPU with two on the CPU
that are 8 and 20 times slower. Two nodes train a small GPT on Shakespeare's plays on the CPU and on the GPU. Swarms of
one task stop at the same total of samples. Accuracy, in percent, and loss, in nats, are those of held-out data after
``settle``, as means of all nodes and seeds.

Each node is a process, and trains on random batches. It first takes steps without a swarm, at the same time as the
others. A step ends with a pause of a fixed length, so a wait for others would show in a node's steps a second. A swarm
on the GPU and one on the CPU run at once. That of uneven nodes, whose pace counts, runs by itself. With fewer than 12
cores there is one seed instead of three.
``make accelerator`` runs this. Without a GPU, or with ``--simulated``, sizes are tiny and figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import children
from benchmarks.accelerator_device import accelerator, progress, say
from benchmarks.children import Child, visit_until_told
from gossip.config import Config
from node import Node
from sim.learning.corpora import digits, shakespeare
from sim.learning.models import ByteGPT, mlp

CONTEXT = 64  # Bytes of a GPT's window.
HELD_OUT = 256  # Windows in the test.
SAMPLES = {"digits": 40_000, "gpt": 24_000}  # Of a whole swarm.
RUN_S = 100.0  # The most that one swarm may take on a GPU; 10 times as long on a simulated one.
PAUSE_S = 0.005
BATCH = 16
WARM_STEPS = 5  # The first ones also load kernels.
SWARMS = {  # The task, and the device and the pause of each node.
    "digits, CPU": ("digits", [("cpu", PAUSE_S)] * 3),
    "digits, GPU": ("digits", [("cuda", PAUSE_S)] * 3),
    "digits, one GPU and two CPUs": ("digits", [("cuda", PAUSE_S), ("cpu", 8 * PAUSE_S), ("cpu", 20 * PAUSE_S)]),
    "GPT, CPU": ("gpt", [("cpu", PAUSE_S)] * 2),
    "GPT, GPU": ("gpt", [("cuda", PAUSE_S)] * 2),
}
TURNS = [("digits, CPU", "GPT, GPU"), ("digits, GPU", "GPT, CPU"), ("digits, one GPU and two CPUs",)]  # Run at once.
SEEDS = {"digits": 3, "gpt": 1}
CORES = 12  # For the eleven processes of a turn with all seeds, and this one.


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one node."""

    task: str
    device: str
    pause_s: float
    samples: int  # Of the whole swarm.
    alone_s: float
    seed: int
    rank: int
    simulated: bool


# -- one node ----------------------------------------------------------------------------------------------------------
class Trainer:
    """A model on its device, its data, and a training step."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, torch.device(job.device)
        torch.manual_seed(job.seed)
        if job.task == "digits":
            self.model: nn.Module = mlp(64, 64, 10)
            x, y, x_test, y_test = digits()
        else:
            self.model = ByteGPT(layers=2, heads=2, width=64, context=CONTEXT)
            x, y, x_test, y_test = windows()
        self.data, self.test = (x, y), (x_test.to(self.device), y_test.to(self.device))
        self.model.to(self.device)
        if job.task == "digits":
            self.rate = 0.1
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.model.parameters(), self.rate, momentum=0.9, weight_decay=1e-3
            )
        else:
            self.rate = 3e-3
            self.optimizer = torch.optim.AdamW(self.model.parameters(), self.rate)

    def step(self) -> Tensor:
        rows = torch.randint(len(self.data[0]), (BATCH,))
        x, y = (part[rows] for part in self.data)
        loss = F.cross_entropy(self.model(x.to(self.device)).flatten(0, -2), y.to(self.device).flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def score(self) -> float:
        """Return the accuracy in percent, or the loss of a GPT in nats."""
        x, y = self.test
        logits = self.model(x)
        if self.job.task == "digits":
            return 100 * float((logits.argmax(1) == y).float().mean())
        return float(F.cross_entropy(logits.flatten(0, -2), y.flatten()))


def windows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Shakespeare's plays as windows of bytes and of the bytes after them; the last windows are for the test."""
    text = torch.frombuffer(bytearray(b"\n".join(shakespeare().values())), dtype=torch.uint8)
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()  # (windows, context + 1)
    train, test = rows[:-HELD_OUT], rows[-HELD_OUT:]
    return train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]


def work(job: Job) -> None:
    """Train as one node. The first prints its address, the others read it."""
    torch.set_num_threads(1)
    trainer = Trainer(job)
    alone = steps_a_second(Trainer(job), job)
    address = [] if job.rank == 0 else [sys.stdin.readline().strip()]
    with Node(trainer.model, trainer.optimizer, seeds=address, config=Config(mix_every_steps=8)) as node:
        print(node.address, flush=True)
        visit_until_told(node)  # All begin together, for a fair comparison.
        torch.manual_seed(1000 * job.seed + job.rank)
        longest_s, steps, began = 0.0, 0, time.perf_counter()
        while node.swarm_samples < job.samples:
            loss = trainer.step()
            entered = time.perf_counter()
            node.step(loss=loss, samples=BATCH)
            longest_s, steps = max(longest_s, time.perf_counter() - entered), steps + 1
            time.sleep(job.pause_s)
            trainer.optimizer.param_groups[0]["lr"] = trainer.rate * max(0.0, 1 - node.swarm_samples / job.samples)
        together = steps / (time.perf_counter() - began)
        exchanges = node.metrics().exchanges_done
        node.settle(2.0, wait_s=10.0)
        row = {"device": job.device, "pause_s": job.pause_s, "steps": steps, "exchanges": exchanges}
        row |= {"alone_steps_s": alone, "together_steps_s": together, "longest_step_s": longest_s}
        children.say(row | {"score": trainer.score()})


def steps_a_second(trainer: Trainer, job: Job) -> float:
    """Return the steps a second without a swarm."""
    for _ in range(WARM_STEPS):
        trainer.step()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < job.alone_s:
        trainer.step()
        time.sleep(job.pause_s)
        steps += 1
    return steps / (time.perf_counter() - began)


# -- swarms ------------------------------------------------------------------------------------------------------------
def play(task: str, nodes: list[tuple[str, float]], simulated: bool, seed: int) -> list[dict[str, Any]]:
    """Run the processes of one swarm, and return their rows."""
    samples, alone_s, limit_s = (400, 0.1, 10 * RUN_S) if simulated else (SAMPLES[task], 2.0, RUN_S)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (device, pause_s) in enumerate(nodes):
            job = asdict(Job(task, device, pause_s, samples, alone_s, seed, rank, simulated))
            child = Child("-m", "benchmarks.accelerator_equal", "--job", json.dumps(job))
            processes.append(stack.enter_context(child))
        address = processes[0].line()
        for process in processes[1:]:
            process.tell(address)
        for process in processes[1:]:
            process.line()  # Its own address: it has joined.
        for process in processes:
            process.tell()
        outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a node of {task} has ended with {[process.returncode for process in processes]}")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def figures(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the mean score of all runs of a swarm, and for each of its nodes the worst pace and the longest step()."""
    nodes = []
    for rows in zip(*runs, strict=True):
        node = {"device": rows[0]["device"], "pause_s": rows[0]["pause_s"]}
        node["longest_step_s"] = max(row["longest_step_s"] for row in rows)
        for name in ("steps", "exchanges", "alone_steps_s", "together_steps_s"):
            node[name] = statistics.mean(row[name] for row in rows)
        nodes.append(node)
    scores = [statistics.mean(row["score"] for row in rows) for rows in runs]
    return {"score": statistics.mean(scores), "scores": scores, "nodes": nodes}


def measure(simulated: bool) -> None:
    max_seeds = 1 if simulated or (os.cpu_count() or 1) < CORES else max(SEEDS.values())
    for names in TURNS:
        progress(f"at once: {'; '.join(names)}")
        with ThreadPoolExecutor(len(names) * max_seeds) as pool:
            runs = {
                name: [
                    pool.submit(play, *SWARMS[name], simulated, seed) for seed in range(min(max_seeds, seeds_of(name)))
                ]
                for name in names
            }
            for name in names:
                rows = [run.result() for run in runs[name]]
                say("equal", swarm=name, task=SWARMS[name][0], **figures(rows))


def seeds_of(name: str) -> int:
    return SEEDS[SWARMS[name][0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="a simulated device, even where there is a real one")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.job:
        measure(arguments.simulated or not torch.cuda.is_available())
        return
    job = Job(**json.loads(arguments.job))
    with accelerator(job.simulated and job.device == "cuda", seed=job.seed):
        work(job)


if __name__ == "__main__":
    main()
