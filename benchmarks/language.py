"""A small GPT trained by gossip and synchronously, for the same samples: writes a table of docs/results/bytes.md.

    python benchmarks/language.py [--only "muon, sync"] [--known]

A row's learning rate is the best for seed 1 on tuning windows, among rates a factor sqrt(2) apart, with a worse one on
either side; or it is another row's. The reported loss is on other windows. Synchronous training is one model that takes
the whole batch of all nodes, with the same gradient clipping. A rate with a star is another row's, or has no worse one
on either side among the rates tried. "Fewer bytes" compares with an all-reduce of fp32 gradients. Finished runs are
kept in runs/language.jsonl.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pages
import torch
from torch import nn

from sim.learning.corpora import Split, shakespeare
from sim.learning.models import ByteGPT
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation, no_garbage_collection
from sim.threads import one_thread

PAGE = pages.RESULTS / "bytes.md"
CONTEXT = 32  # bytes in a window
WINDOWS_A_STEP = 32  # windows in a step of all nodes together
STEPS, STEP_S = 1120, 0.1
WARMUPS = {"adamw": 5, "muon": 20}  # Parts of the steps. In a twentieth AdamW leaves its course with one seed of three.
SEEDS = (1, 2, 3)
JUDGED = 1024  # windows for tuning, and as many for the test
FINER = math.sqrt(2)  # factor between two neighbouring rates
MOST_RATES = 7

INSIDE: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon", "adam_lr": 0.01},
}
GUESSES = {"adamw": 0.0113, "muon": 0.02}  # starting points of the search for a rate


@dataclass(frozen=True)
class Row:
    """A configuration of the table."""

    inside: str  # the optimizer
    said: str
    gossip: dict[str, Any] | None  # None: synchronous
    seeds: tuple[int, ...] = SEEDS
    rate_of: str = ""  # the row whose rate is used; "" searches for its own
    at: float = 0.0  # the rate; 0 searches
    peers: int = 4
    partition: str = "iid"
    model: str = "gpt"  # a function of this file
    slack: float = 1.0  # factor for the duration, because nodes in lockstep wait for each other

    @property
    def name(self) -> str:
        return f"{self.inside}, {self.said}"


SYNC, ALONE = "synchronous", "weights alone, without the moments"
DEFAULT, PLAIN, FIXED = "default", "plain means, int8 every 2", "outer 0.3/0.9 and correction, int8 every 2"
M28, M56 = "moniqua4 every 28", "moniqua4 every 56"
LOCKSTEP = "mean of all weights every step, in lockstep, fp32"  # The interval does not cause its gap to synchronous.
WHOLE_PLAYS, SIXTEEN = "each node whole plays", "16 nodes"
LARGER = {  # function of this file: name, and for each optimizer the rates of synchronous training and of the default
    "larger_gpt": ("1 M parameters", {"adamw": (0.00799, 0.00799), "muon": (0.0141, 0.02)}),
    "largest_gpt": ("10 M parameters", {"adamw": (0.000998, 0.000998)}),  # With Muon it takes hours.
}
FREE = {"filter": "none"}
EVERY_2 = {"codec": "int8", "mix_every_steps": 2}
EVERY_STEP = FREE | {"codec": "fp32", "mixing": "group", "group_size": 0, "mix_every_steps": 1, "max_version_gap": 0.0}


def moniqua(every: int) -> dict[str, Any]:
    return FREE | {"codec": "moniqua4", "mix_every_steps": every}


def rows_of(inside: str) -> list[Row]:
    """Return the rows of one inner optimizer in the order of the runs, the most important ones first."""
    return [
        Row(inside, SYNC, None),
        Row(inside, DEFAULT, {}),  # Nodes choose codec, interval and momentum.
        Row(inside, PLAIN, EVERY_2 | {"outer_momentum": 0.0, "outer_rate": 1.0}),
        Row(inside, FIXED, EVERY_2 | {"outer_momentum": 0.3, "outer_rate": 0.9, "correction": 0.2}),
        Row(inside, f"{DEFAULT}, {ALONE}", {"mix_state": "off"}),
        Row(inside, LOCKSTEP, EVERY_STEP, slack=1.8),
        Row(inside, M28, moniqua(28)),
        Row(inside, M56, moniqua(56), rate_of=M28),
        Row(inside, f"{DEFAULT}, {WHOLE_PLAYS}", {}, rate_of=DEFAULT, partition="natural"),
        Row(inside, f"{DEFAULT}, {SIXTEEN}", {}, peers=16),
        Row(inside, f"{LOCKSTEP}, {SIXTEEN}", EVERY_STEP, peers=16, slack=1.8),
        *(
            Row(inside, f"{said}, {size}", gossip, (1,), at=rate, model=model)
            for model, (size, rates) in LARGER.items()
            for said, gossip, rate in zip((SYNC, DEFAULT), (None, {}), rates.get(inside, ()), strict=False)
        ),
    ]


ROWS = [*rows_of("adamw"), *rows_of("muon")]


# -- the task ------------------------------------------------------------------------------------------------------
def windows(text: bytes) -> torch.Tensor:
    """Cut a text into windows plus one byte, uint8 (windows, CONTEXT + 1); an incomplete last one is dropped."""
    count = len(text) // (CONTEXT + 1)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens[: count * (CONTEXT + 1)].view(count, CONTEXT + 1)


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows for tuning and those for the test, uint8 (JUDGED, CONTEXT + 1) each."""
    every = windows(b"\n".join(text[len(text) * 9 // 10 :] for _, text in sorted(shakespeare().items())))
    some = every[torch.linspace(0, len(every) - 1, 2 * JUDGED).long()]
    return some[::2], some[1::2]


def plays() -> tuple[torch.Tensor, ...]:
    """Return the data set of the scenarios. Each play is a client, so a natural partition assigns whole plays."""
    roles = sorted(shakespeare().items())
    pieces = [windows(text[: len(text) * 9 // 10]) for _, text in roles]
    numbers = {play: number for number, play in enumerate(sorted({role.split("/")[0] for role, _ in roles}))}
    clients = torch.tensor([numbers[role.split("/")[0]] for role, _ in roles])
    train, test = torch.cat(pieces), held_out()[1]
    split: Split = train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]
    return *split, torch.repeat_interleave(clients, torch.tensor([len(piece) for piece in pieces]))


def gpt() -> nn.Module:
    """Return a model of 69,600 parameters."""
    return ByteGPT(layers=2, heads=2, width=48, context=CONTEXT)


def larger_gpt() -> nn.Module:
    """Return a model of 1,022,720 parameters."""
    return ByteGPT(context=CONTEXT)


def largest_gpt() -> nn.Module:
    """Return a model of 9,933,440 parameters."""
    return ByteGPT(layers=8, heads=5, width=320, context=CONTEXT)


def scenario(row: Row, rate: float, seed: int) -> dict[str, Any]:
    """Return the table of one run."""
    peers = 1 if row.gossip is None else row.peers
    falling = {"schedule": "cosine", "schedule_steps": STEPS, "warmup_steps": STEPS // WARMUPS[row.inside]}
    optimizer = INSIDE[row.inside] | {"lr": rate, "betas": [0.9, 0.95], "clip_norm": 1.0} | falling
    return {
        "name": row.name, "seed": seed, "peers": peers, "duration_s": STEPS * STEP_S * row.slack,
        "gossip": row.gossip or {}, "fidelity": "whole", "membership": {"mode": "ideal"},
        "compute": {"step_s": {"kind": "lognormal", "median": STEP_S, "sigma": 0.05}},
        "network": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
        "task": {
            "dataset": "language:plays", "model": f"language:{row.model}", "batch_size": WINDOWS_A_STEP // peers,
            "optimizer": optimizer, "partition": row.partition,
        },
    }  # fmt: skip


@torch.no_grad()
def loss(module: nn.Module, judged: torch.Tensor) -> float:
    """Return the mean loss in nats a byte."""
    losses = [
        nn.functional.cross_entropy(module(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())
        for some in judged.long().split(256)
    ]
    return float(torch.stack(losses).mean())


def play(row: Row, rate: float, seed: int) -> dict[str, float]:
    """Simulate one run to its end, and return its figures."""
    start, tuning_and_test = time.process_time(), held_out()
    table = scenario(row, rate, seed)
    with one_thread(), no_garbage_collection(), np.errstate(all="ignore"):  # a diverging model is a result
        simulation = Simulation(Scenario.from_mapping(table))
        learners, level = simulation.learners, simulation.level
        for _ in simulation.slices():
            pass
        level.update_models()
        rows, peers = learners.matrix, table["peers"]
        of_nodes = [[loss(learners.module(one), judged) for judged in tuning_and_test] for one in rows]
        average = loss(learners.module(rows.mean(0)), tuning_and_test[1])
        tuning, test = (statistics.fmean(column) for column in zip(*of_nodes, strict=True))
        counts = level.counts()
        sent = counts.sent_bytes / peers if peers > 1 else synchronous_bytes(learners.elements, counts.steps)
        return {
            "tuning": tuning, "test": test, "worst": max(one[1] for one in of_nodes), "average": average,
            "mb": sent / 1e6, "fewer": synchronous_bytes(learners.elements, counts.steps / peers) / sent,
            "steps": counts.steps / peers, "mixes": level.mixes / peers, "failed": counts.failures / peers,
            "cpu_s": time.process_time() - start,
        }  # fmt: skip


def synchronous_bytes(elements: int, steps: float) -> float:
    """Return the bytes that a node of a large ring all-reduce sends for fp32 gradients: two models a step."""
    return 2.0 * 4.0 * elements * steps


# -- runs ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rate:
    """A row's best learning rate among those tried; ``bracketed`` if a worse one was tried on either side."""

    best: float
    tried: list[float]
    bracketed: bool


class Runs:
    """The finished runs; missing ones are simulated unless ``play_missing`` is False."""

    def __init__(self, *, play_missing: bool = True) -> None:
        self.play_missing = play_missing
        self.finished = pages.Runs("language")

    def figures(self, row: Row, rate: float, seed: int) -> dict[str, float] | None:
        """Return the figures of one run, or None if it is missing and must not be simulated."""
        settings = {key: value for key, value in scenario(row, rate, seed).items() if key != "name"}
        figures = self.finished.get(settings)
        if figures is None and self.play_missing:
            figures = play(row, rate, seed)
            self.finished.add(settings, figures)
            said = {name: round(value, 4) for name, value in figures.items()}
            print(f"{time.strftime('%H:%M:%S')} {row.name}, rate {rate:.4g}, seed {seed}: {said}", flush=True)
        return figures

    def rate(self, row: Row) -> Rate:
        """Return the best rate by the tuning windows.

        Seed 1 searches. All seeds of the row then judge the rate that it finds and the next lower one, since another
        seed may diverge at a rate that is seed 1's best.
        """
        if row.at:
            return Rate(row.at, [row.at], False)
        if row.rate_of:
            return self.rate(next(one for one in ROWS if one.name == f"{row.inside}, {row.rate_of}"))
        places, tuning = [0, 1, -1], dict[int, float]()
        while True:
            missing = False
            for place in places:
                figures = self.figures(row, rate_at(row, place), 1)
                missing = missing or figures is None
                if figures is not None and math.isfinite(figures["tuning"]):
                    tuning[place] = figures["tuning"]
            if not tuning:
                return Rate(rate_at(row, 0), [], False)
            best = min(tuning, key=tuning.__getitem__)
            inside = min(tuning) < best < max(tuning)
            if inside or missing or len(places) >= MOST_RATES:
                rates = sorted(rate_at(row, place) for place in tuning)
                means = {place: self.mean_tuning(row, place) for place in (best, best - 1)}
                return Rate(rate_at(row, min(means, key=means.__getitem__)), rates, inside)
            places.append(max(places) + 1 if best == max(places) else min(places) - 1)

    def mean_tuning(self, row: Row, place: int) -> float:
        """Return the mean loss of all seeds on the tuning windows; infinite if a run is missing or not finite."""
        found = [self.figures(row, rate_at(row, place), seed) for seed in row.seeds]
        losses = [math.inf if figures is None else figures["tuning"] for figures in found]
        return statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf

    def seeds_of(self, row: Row) -> dict[int, dict[str, float]]:
        """Return the figures of each seed at the row's rate."""
        found = {seed: self.figures(row, self.rate(row).best, seed) for seed in row.seeds}
        return {seed: figures for seed, figures in found.items() if figures is not None}


def rate_at(row: Row, place: int) -> float:
    """Return the rate at a place of the search grid; place 0 is the starting point."""
    return float(f"{GUESSES[row.inside] * FINER**place:.3g}")


# -- the table -----------------------------------------------------------------------------------------------------
HEADS = [
    "inside", "exchange", "rate", "loss", "seeds", "spread", "loss more, %", "of the average model, %", "MB a node",
    "times fewer bytes",
]  # fmt: skip
SHOWN = {"muon": "Muon", "adamw": "AdamW"}


def table(runs: Runs) -> list[list[str]]:
    """Return the table, with the rows that were played."""
    found = [HEADS]
    base = {(row.inside, row.model): runs.seeds_of(row) for row in ROWS if row.gossip is None}
    for row in sorted(ROWS, key=lambda row: row.inside, reverse=True):
        seeds = runs.seeds_of(row)
        if not seeds:
            continue
        same = {seed: one["test"] for seed, one in base[row.inside, row.model].items() if seed in seeds}
        mean = {key: statistics.fmean(one[key] for one in seeds.values()) for key in ("test", "average", "mb", "fewer")}
        more = [
            f"{100 * (mean[key] / statistics.fmean(same.values()) - 1):+.1f}" if len(same) == len(seeds) else ""
            for key in ("test", "average")
        ]
        test, rate = [one["test"] for one in seeds.values()], runs.rate(row)
        starred = "" if rate.bracketed and not row.rate_of else "*"
        spread = f"{max(test) - min(test):.3f}" if len(test) > 1 else ""
        shown = [SHOWN[row.inside], row.said, f"{rate.best:g}{starred}", f"{mean['test']:.3f}", str(len(seeds)), spread]
        found.append([*shown, *more, f"{mean['mb']:.2f}", f"{mean['fewer']:.0f}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="play rows whose name holds this, and write nothing")
    parser.add_argument("--known", action="store_true", help="play nothing: write the table from what was played")
    given = parser.parse_args()
    runs = Runs(play_missing=not given.known)
    for row in () if given.known else ROWS:
        if given.only in row.name:
            runs.seeds_of(row)  # the rates with one seed, then the other seeds at the best rate
    if not given.only:
        pages.put(PAGE, "language", table(runs))


if __name__ == "__main__":
    main()
