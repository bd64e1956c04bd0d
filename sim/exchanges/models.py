"""The arithmetic of a swarm: a batch of the tape played in waves over the rows of one matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import outer_step
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.state_transfer.comparing import FEWEST
from sim.exchanges.acceptance import Acceptance
from sim.exchanges.tape import ADD, DROP, GIVE, SNAP, TAKE, Batch, Tape
from sim.exchanges.waves import Units
from sim.learning.learners import Learners

__all__ = ["Models"]

# Rows of one pass: as many as keep half a dozen arrays of them in a core's caches, and as gradients need to be cheap.
BLOCK_BYTES, LEAST_ROWS = 1 << 21, 64
CACHED_BYTES = 1 << 19  # of an array of which four are passed over: 4,810 elements took 4 us a row so, and 8 in blocks

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
        fitting = BLOCK_BYTES // (4 * learners.elements)  # rows
        self.pairs_at_once = max(min(learners.copied_at_once or fitting, max(fitting, LEAST_ROWS)) // 2, 1)
        self.rows_in_cache = max(CACHED_BYTES // (4 * learners.elements), 1)
        self.codec = get_codec(config.codec)
        self.kept: dict[int, dict[int, F32]] = {}  # snapshots of exchanges under way, by exchange and side
        self.left: dict[int, F64] = {}  # of such, what of the difference each side takes, once that is known
        self.void = set[int]()  # exchanges that are over, of which a snapshot is still to come
        self.half = set[int]()  # of such, those of which one side is over

    def play(self, done: I64) -> None:
        """What happened up to now, ``done`` being the steps of each row."""
        batch = self.tape.take(done)
        units, pairs = Units(batch), self.pairs_at_once
        for wave in units.waves():
            wholes, singles = wave[wave < units.wholes], wave[wave >= units.wholes]
            for start in range(0, len(wholes), pairs):
                some = wholes[start : start + pairs]
                self.exchange(batch, units.first[some], units.last[some])
            if len(singles):
                self.apart(batch, units.first[singles])

    def train(self, rows: I64, steps: I64) -> None:
        """These rows, up to so many steps in all."""
        counts = steps - self.learners.taken[rows]
        going = counts > 0
        if going.any():
            self.learners.train(rows[going], counts[going])

    def exchange(self, batch: Batch, first: I64, second: I64) -> None:
        """Whole exchanges, between whose entries nothing happens to either row."""
        snaps, half = np.concatenate([first, second]), len(first)
        rows, exchanges = batch.row[snaps], batch.exchange[first]
        steps, until = batch.steps[snaps], batch.steps[snaps + 1]
        counts = steps - self.learners.taken[rows]
        more = until - np.maximum(steps, self.learners.taken[rows])
        together = self.learners.copied_at_once >= len(rows) and (more == more[0]).all() and (counts >= 0).all()
        if together:
            # Copies of all rows, those with most steps first; ``place`` is where each is among them.
            order = np.argsort(-counts, kind="stable")
            place = np.empty(len(rows), np.int64)
            place[order] = np.arange(len(rows))
            models = self.matrix.take(rows[order], axis=0)
            self.learners.train_copies(models, rows[order], counts[order])
            ours = models.take(place, axis=0)
        else:
            self.train(rows, steps)
            ours = self.matrix[rows]
        self.watch(rows, ours)
        sent = self.decoded(ours)
        difference = np.empty_like(ours)
        np.subtract(sent[half:], sent[:half], out=difference[:half])
        weights = self.weights(rows[:half], rows[half:], exchanges, difference[:half], sent)
        np.negative(difference[:half], out=difference[half:])
        self.shift(rows, ours, difference, weights, batch.late[snaps + 1])
        if together:
            self.learners.train_copies(models, rows[order], more[order])
            difference += models.take(place, axis=0, out=ours)
            self.matrix[rows] = difference
        else:
            self.train(rows, until)
            self.matrix[rows] += difference

    def weights(self, first: I64, second: I64, exchanges: I64, difference: F32, sent: F32) -> F64:
        """What of its difference each row takes, (2 pairs,): 0 where either refuses."""
        acceptance = self.acceptance
        apart_sq = np.einsum("ij,ij->i", difference, difference).astype(np.float64)
        own_sq = np.einsum("ij,ij->i", sent, sent).astype(np.float64).reshape(2, -1)
        passed = acceptance.passes(np.stack([first, second]), apart_sq, own_sq)
        agreed = np.frombuffer(self.tape.weight)[exchanges]
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
        kinds = batch.kind[entries]
        snaps = entries[kinds == SNAP]  # a donor's measures nothing
        if len(snaps):
            self.watch(batch.row[snaps], self.matrix[batch.row[snaps]])
        for entry in entries[(kinds == SNAP) | (kinds == GIVE)].tolist():
            number = int(batch.exchange[entry])
            if number not in self.void:
                self.kept.setdefault(number, {})[int(batch.side[entry])] = self.matrix[batch.row[entry]].copy()
        adds = entries[kinds == ADD]
        for start in range(0, len(adds), 2 * self.pairs_at_once):
            self.add(batch, adds[start : start + 2 * self.pairs_at_once])
        for entry in entries[(kinds == DROP) | (kinds == TAKE)].tolist():
            number = int(batch.exchange[entry])
            if batch.kind[entry] == DROP:
                self.drop(number)
            else:
                self.take_over(int(batch.row[entry]), number)

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

    def add(self, batch: Batch, adds: I64) -> None:
        """What sides of exchanges bring, no two of one row."""
        numbers, sides, rows = batch.exchange[adds].tolist(), batch.side[adds].tolist(), batch.row[adds]
        new = [number for number in dict.fromkeys(numbers) if number not in self.left]
        if new:
            tape, some = self.tape, np.array(new)
            sent = self.decoded(np.stack([self.kept[number][side] for side in (0, 1) for number in new]))
            first, second = (np.frombuffer(values, "l")[some] for values in (tape.first, tape.second))
            left = self.weights(first, second, some, sent[len(new) :] - sent[: len(new)], sent).reshape(2, -1)
            self.left.update(zip(new, left.T, strict=True))
        pairs = list(zip(numbers, sides, strict=True))
        ours = np.stack([self.kept[number][side] for number, side in pairs])
        difference = self.decoded(np.stack([self.kept[number][1 - side] for number, side in pairs]))
        difference = difference - self.decoded(ours)
        weights = np.array([self.left[number][side] for number, side in pairs])
        self.shift(rows, ours, difference, weights, batch.late[adds])
        self.matrix[rows] += difference
        for number in numbers:
            self.over(number)

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
        """The outer step of these rows, a few at a time: it passes over four arrays nine times."""
        alpha, beta = (np.float32(each) for each in self.config.outer)
        for start in range(0, len(rows), self.rows_in_cache):
            part = slice(start, start + self.rows_in_cache)
            some, mean = rows[part], difference[part]
            mean += ours[part]
            phi, momentum = self.phi.take(some, axis=0), self.momentum.take(some, axis=0)
            outer_step(mean, ours[part], phi, momentum, alpha, beta)
            self.phi[some], self.momentum[some] = phi, momentum

    def decoded(self, values: F32) -> F32:
        """As the partner decodes them."""
        if self.codec.raw:
            return values
        out = np.empty_like(values)
        self.codec.quantised(values.reshape(-1), out.reshape(-1), 0)
        return out
