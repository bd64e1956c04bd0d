"""The arithmetic of a swarm: a batch of the tape played in waves over the rows of one matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import outer_step
from gossip.codecs import get_codec
from gossip.config import Config
from sim.exchanges.tape import ADD, SNAP, Batch, Tape
from sim.exchanges.waves import Plan
from sim.learning.learners import Learners

__all__ = ["Models"]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


class Models:
    """Every peer's model, with what the outer step keeps of each: ``phi`` and ``momentum`` float32 (peers, elements).

    A step of training is computed when something after it is; which waves it falls into changes no result.
    """

    def __init__(self, learners: Learners, config: Config, tape: Tape) -> None:
        self.learners, self.config, self.tape = learners, config, tape
        self.matrix = learners.matrix
        self.phi = self.momentum = np.empty((0, 0), np.float32)
        if not config.plain:
            self.phi, self.momentum = self.matrix.copy(), np.zeros_like(self.matrix)
        self.codec = get_codec(config.codec)
        self.kept: dict[tuple[int, int], F32] = {}  # snapshots of exchanges under way, by exchange and side

    def play(self, done: I64) -> None:
        """What happened up to now, ``done`` being the steps of each row."""
        batch = self.tape.take(done)
        plan = Plan(batch)
        for wave in plan.waves():
            wholes, singles = wave[wave < plan.wholes], wave[wave >= plan.wholes]
            if len(wholes):
                self.exchange(batch, plan.first[wholes], plan.last[wholes])
            if len(singles):
                self.apart(batch, plan.first[singles])

    def settle(self, rows: I64, steps: I64) -> None:
        """These rows have taken so many steps."""
        self.train(rows, steps)

    def train(self, rows: I64, steps: I64) -> None:
        """Up to so many steps in all."""
        counts = steps - self.learners.taken[rows]
        going = counts > 0
        if going.any():
            self.learners.train(rows[going], counts[going])

    def exchange(self, batch: Batch, first: I64, second: I64) -> None:
        """Whole exchanges, between whose entries nothing happens to either row."""
        snaps = np.concatenate([first, second])
        rows = batch.row[snaps]
        self.train(rows, batch.steps[snaps])
        ours = self.matrix[rows]
        sent = self.decoded(ours)
        half = len(first)
        difference = np.empty_like(ours)
        np.subtract(sent[half:], sent[:half], out=difference[:half])
        np.negative(difference[:half], out=difference[half:])
        weights = np.array(self.tape.weight)[batch.exchange[first]]
        self.shift(rows, ours, difference, np.concatenate([weights, weights]), batch.late[snaps + 1])
        self.train(rows, batch.steps[snaps + 1])
        self.matrix[rows] += difference

    def apart(self, batch: Batch, entries: I64) -> None:
        """Snapshots and additions by themselves, no two of one row."""
        rows = batch.row[entries]
        self.train(rows, batch.steps[entries])
        for entry, row in zip(entries.tolist(), rows.tolist(), strict=True):
            key = int(batch.exchange[entry]), int(batch.side[entry])
            if batch.kind[entry] == SNAP:
                self.kept[key] = self.matrix[row].copy()
            elif batch.kind[entry] == ADD:
                ours, theirs = self.kept[key], self.kept[key[0], 1 - key[1]]
                difference = (self.decoded(theirs) - self.decoded(ours))[None]
                weight = np.array([self.tape.weight[key[0]]])
                self.shift(np.array([row]), ours[None], difference, weight, batch.late[entry : entry + 1])
                self.matrix[row] += difference[0]
                self.over(key)
            else:
                self.over(key)

    def over(self, key: tuple[int, int]) -> None:
        """One side of an exchange is over; after the other its snapshots may go."""
        other = key[0], 1 - key[1]
        if (~key[0], other[1]) in self.kept:
            del self.kept[~key[0], other[1]], self.kept[key], self.kept[other]
        else:
            self.kept[~key[0], key[1]] = self.kept[key]

    def shift(
        self, rows: I64, ours: F32, difference: F32, weights: NDArray[np.float64], late: NDArray[np.bool_]
    ) -> None:
        """``difference``, theirs less ours, becomes what is to be added."""
        difference *= weights.astype(np.float32)[:, None]
        if self.config.plain:
            return
        if not late.any():
            self.outer(rows, ours, difference)
            return
        self.phi[rows[late]] += difference[late]  # the local progress that the snapshot holds is counted
        mean = difference[~late]
        self.outer(rows[~late], ours[~late], mean)
        difference[~late] = mean

    def outer(self, rows: I64, ours: F32, difference: F32) -> None:
        """The outer step of these rows."""
        difference += ours
        phi, momentum = self.phi[rows], self.momentum[rows]
        alpha, beta = self.config.outer
        outer_step(difference, ours, phi, momentum, np.float32(alpha), np.float32(beta))
        self.phi[rows], self.momentum[rows] = phi, momentum

    def decoded(self, values: F32) -> F32:
        """As the partner decodes them."""
        if self.codec.raw:
            return values
        out = np.empty_like(values)
        self.codec.quantised(values.reshape(-1), out.reshape(-1), 0)
        return out
