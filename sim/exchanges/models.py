"""The arithmetic of a swarm: a batch of the tape played in waves over the rows of one matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import outer_step
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.state_transfer.comparing import FEWEST
from sim.exchanges.acceptance import Acceptance
from sim.exchanges.tape import ADD, DROP, GIVE, SNAP, Batch, Tape
from sim.exchanges.waves import Plan
from sim.learning.learners import Learners

__all__ = ["Models"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]
I64 = NDArray[np.int64]


class Models:
    """Every peer's model, with what the outer step keeps of each: ``phi`` and ``momentum`` float32 (peers, elements).

    A step of training is computed when something after it is; which waves it falls into changes no result.
    """

    def __init__(self, learners: Learners, config: Config, tape: Tape, acceptance: Acceptance) -> None:
        self.learners, self.config, self.tape, self.acceptance = learners, config, tape, acceptance
        self.matrix = learners.matrix
        self.phi = self.momentum = self.expected = np.empty((0, 0), np.float32)
        if not config.plain:
            self.phi, self.momentum = self.matrix.copy(), np.zeros_like(self.matrix)
        self.watches = config.watches_movement
        if self.watches:  # the model without the steps since the last mix; the outer step keeps that already
            self.expected = self.matrix.copy() if config.plain else self.phi
        self.codec = get_codec(config.codec)
        self.kept: dict[int, dict[int, F32]] = {}  # snapshots of exchanges under way, by exchange and side
        self.left: dict[int, F64] = {}  # of such, what of the difference each side takes, once that is known
        self.void = set[int]()  # exchanges that are over, of which a snapshot is still to come
        self.half = set[int]()  # of such, those of which one side is over

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
        snaps, half = np.concatenate([first, second]), len(first)
        rows = batch.row[snaps]
        self.train(rows, batch.steps[snaps])
        ours = self.matrix[rows]
        self.watch(rows, ours)
        sent = self.decoded(ours)
        difference = np.empty_like(ours)
        np.subtract(sent[half:], sent[:half], out=difference[:half])
        np.negative(difference[:half], out=difference[half:])
        weights = self.weights(rows[:half], rows[half:], batch.exchange[first], difference[:half], sent)
        self.shift(rows, ours, difference, weights, batch.late[snaps + 1])
        self.train(rows, batch.steps[snaps + 1])
        self.matrix[rows] += difference

    def weights(self, first: I64, second: I64, exchanges: I64, difference: F32, sent: F32) -> F64:
        """What of its difference each row takes, (2 pairs,): 0 where either refuses."""
        acceptance = self.acceptance
        apart_sq = np.einsum("ij,ij->i", difference, difference).astype(np.float64)
        own_sq = np.einsum("ij,ij->i", sent, sent).astype(np.float64).reshape(2, -1)
        passed = acceptance.passes(np.stack([first, second]), apart_sq, own_sq)
        agreed = np.array(self.tape.weight)[exchanges]
        if passed.all():
            rows, partners = np.concatenate([first, second]), np.concatenate([second, first])
            return acceptance.taken(rows, partners, np.tile(agreed, 2), np.tile(apart_sq, 2))
        some = np.flatnonzero(passed)
        rows, partners = np.concatenate([first[some], second[some]]), np.concatenate([second[some], first[some]])
        weights = np.zeros((2, len(first)))
        left = acceptance.taken(rows, partners, np.tile(agreed[some], 2), np.tile(apart_sq[some], 2))
        weights[:, some] = left.reshape(2, -1)
        return weights.reshape(-1)

    def watch(self, rows: I64, ours: F32) -> None:
        """How far local steps moved these since their last mix."""
        if self.watches:
            moved = ours - self.expected[rows]
            self.acceptance.moved(rows, np.sqrt(np.einsum("ij,ij->i", moved, moved, dtype=np.float64)))
            if self.config.plain:
                self.expected[rows] = ours

    def apart(self, batch: Batch, entries: I64) -> None:
        """Snapshots and additions by themselves, no two of one row."""
        rows = batch.row[entries]
        self.train(rows, batch.steps[entries])
        snaps = entries[batch.kind[entries] == SNAP]  # a donor's measures nothing
        if len(snaps):
            self.watch(batch.row[snaps], self.matrix[batch.row[snaps]])
        for entry, row in zip(entries.tolist(), rows.tolist(), strict=True):
            number, side = int(batch.exchange[entry]), int(batch.side[entry])
            match int(batch.kind[entry]):
                case k if k in (SNAP, GIVE):
                    if number not in self.void:
                        self.kept.setdefault(number, {})[side] = self.matrix[row].copy()
                case k if k == ADD:
                    self.add(row, number, side, batch.late[entry : entry + 1])
                    self.over(number)
                case k if k == DROP:
                    self.drop(number)
                case _:
                    self.take_over(row, number)

    def take_over(self, row: int, number: int) -> None:
        """A newcomer's weights, each part of them of another donor, and what it knows with them."""
        ranges = self.tape.ranges.pop(number)
        kept = self.kept.pop(number)
        given = [kept[place] for place in range(len(ranges))]
        model = self.matrix[row]
        for (start, stop), values in zip(ranges, given, strict=True):
            model[start:stop] = values[start:stop]
        self.learners.reset(row)
        if not self.config.plain:
            self.phi[row], self.momentum[row] = model, 0
        if self.watches:
            self.expected[row] = model
        apart = [
            float(np.mean(np.square(one[start:stop] - other[start:stop], dtype=np.float64)))
            for (start, stop), one, other in zip(ranges, given, [*given[1:], given[0]], strict=True)
        ]
        self.acceptance.joined(row, sorted(apart)[len(apart) // 4] if len(apart) >= FEWEST else 0.0)

    def add(self, row: int, number: int, side: int, late: Flags) -> None:
        """What one side of an exchange brings."""
        kept = self.kept[number]
        ours, theirs = kept[side], kept[1 - side]
        weights = self.left.pop(number, None)
        if weights is None:
            sent = self.decoded(np.stack([kept[0], kept[1]]))
            first, second = np.array([self.tape.first[number]]), np.array([self.tape.second[number]])
            weights = self.left[number] = self.weights(first, second, np.array([number]), sent[1:] - sent[:1], sent)
        difference = self.decoded(theirs[None]) - self.decoded(ours[None])
        self.shift(np.array([row]), ours[None], difference, weights[side : side + 1], late)
        self.matrix[row] += difference[0]

    def over(self, number: int) -> None:
        """One side of an exchange has what came of it; after the other its snapshots may go."""
        if number in self.half:
            self.half.discard(number)
            self.drop(number)
        else:
            self.half.add(number)

    def drop(self, number: int) -> None:
        """Nobody needs these snapshots; one that was not taken yet is not kept."""
        self.half.discard(number)
        self.left.pop(number, None)
        self.tape.ranges.pop(number, None)
        if len(self.kept.pop(number, {})) < 2 and self.tape.second[number] >= 0:
            self.void.add(number)

    def shift(self, rows: I64, ours: F32, difference: F32, weights: F64, late: Flags) -> None:
        """``difference``, theirs less ours, becomes what is to be added."""
        difference *= weights.astype(np.float32)[:, None]
        mixed = weights > 0
        if not mixed.all():
            difference[~mixed] = 0  # what was refused may be no number
        if not self.config.plain:
            later = late & mixed
            self.phi[rows[later]] += difference[later]  # the local progress that the snapshot holds is counted
            plainly = mixed & ~late
            if plainly.all():
                self.outer(rows, ours, difference)
            elif plainly.any():
                mean = difference[plainly]
                self.outer(rows[plainly], ours[plainly], mean)
                difference[plainly] = mean
        elif self.watches:
            self.expected[rows] += difference

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
