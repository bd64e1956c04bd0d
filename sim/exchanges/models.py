"""The arithmetic of the fast level: batches of the tape are replayed in waves over the rows of one matrix."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.correction import credit
from gossip.arithmetic.mixing import outer_step, outer_step_beside
from gossip.codecs import Codec
from gossip.config import Config
from gossip.state_transfer.comparing import MIN_DONORS
from sim.exchanges.acceptance import Acceptance
from sim.exchanges.tape import ADD, DROP, GIVE, SNAP, TAKE, Batch, Tape
from sim.exchanges.waves import Units
from sim.learning.learners import Learners

__all__ = ["Models"]

# Rows in one pass: as many as fit into a core's L2 cache with their gradients, but enough for efficient gradients. With
# 4,810 elements, a pass over 32 rows took 0.4 us a row, and a pass over 103 rows 1.2 us.
BLOCK_BYTES, LEAST_ROWS = 1 << 20, 32
CACHED_BYTES = 1 << 19  # block size of each of the four arrays of an outer step
# Models of at least this many elements take their outer steps in place, one by one. That took 9 us each, and copying 27
# to 32 of them together 13 us each.
LONG = 4096
AT_ONCE = 2048  # exchanges whose training batches are drawn in one call

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]
I64 = NDArray[np.int64]


class Models:
    """Every peer's model and its outer step's state: ``phi`` and ``momentum``, float32, shape (peers, elements).

    A training step is computed lazily, when a later operation needs it. The division into waves changes no result.
    """

    def __init__(self, learners: Learners, config: Config, codec: Codec, tape: Tape, acceptance: Acceptance) -> None:
        self.learners, self.config, self.tape, self.acceptance = learners, config, tape, acceptance
        self.matrix = learners.matrix
        self.phi = self.momentum = self.expected = np.empty((0, 0), np.float32)
        if not config.plain:
            self.phi, self.momentum = self.matrix.copy(), np.zeros_like(self.matrix)
        self.watches = config.watches_movement
        if self.watches:  # the model without the local steps since the last mix; phi is exactly that
            self.expected = self.matrix.copy() if config.plain else self.phi
        fitting = BLOCK_BYTES // (4 * learners.elements)  # rows
        self.pairs_at_once = max(min(learners.copied_at_once or fitting, max(fitting, LEAST_ROWS)) // 2, 1)
        self.rows_in_cache = 1 if learners.elements >= LONG else CACHED_BYTES // (4 * learners.elements)
        self.memory = [np.empty((2 * self.pairs_at_once, learners.elements), np.float32) for _ in range(2)]
        self.codec = codec
        self.corrects = learners.corrections is not None
        self.every = config.interval_steps or 1  # as versions count
        self.chooses = config.auto_interval
        self.mixed_at = np.zeros(len(self.matrix), np.int64)  # step count of each row at its last mix's snapshot
        # By exchange and side: the step count of a kept snapshot, and the steps since the last mix before it.
        self.trained: dict[int, dict[int, tuple[int, int]]] = {}
        self.kept: dict[int, dict[int, F32]] = {}  # snapshots of exchanges in progress, by exchange and side
        # Bookkeeping of overlapping outer steps. `counted`: by row, the step count of the newest snapshot whose local
        # progress has entered the outer step. `flying`: by row and exchange, the step counts of snapshots in progress.
        # `since`: by row and exchange, the sum of the shifts that were added since that snapshot.
        self.counted = np.full(len(self.matrix), -1)
        self.flying: dict[int, dict[int, int]] = {}
        self.since: dict[tuple[int, int], F32] = {}
        self.left: dict[int, F64] = {}  # each side's weight after filtering, (2,), by exchange
        self.void = set[int]()  # exchanges dropped before a snapshot, which must then not be kept
        self.half = set[int]()  # exchanges that are over for one side

    def play(self, done: I64, cut: bool = True) -> None:
        """Replay the tape up to now.

        Args:
            done: Steps that each row has done, shape (rows,).
            cut: Whether to replay exchanges in progress in part. If False, they stay on the tape until the next call,
                and their snapshots take no memory.
        """
        batch = self.tape.take(done, cut)
        units = Units(batch)
        for wave in units.waves():
            wholes, singles = wave[wave < units.wholes], wave[wave >= units.wholes]
            for start in range(0, len(wholes), AT_ONCE):
                some = wholes[start : start + AT_ONCE]
                self.exchange(batch, units.first[some], units.last[some])
            if len(singles):
                self.apart(batch, units.first[singles])

    def train(self, rows: I64, steps: I64) -> None:
        """Train each row up to its total step count; both arrays have shape (n,)."""
        counts = steps - self.learners.taken[rows]
        going = counts > 0
        if going.any():
            self.learners.train(rows[going], counts[going])

    def exchange(self, batch: Batch, first: I64, second: I64) -> None:
        """Replay whole exchanges, whose rows have no other entries in between.

        A few at a time are copied, trained to their snapshots, mixed, trained to the boundary and written back while
        they are in cache.

        Args:
            batch: The batch of the tape.
            first: Entries of the initiators' snapshots, shape (exchanges,).
            second: Entries of the responders' snapshots, shape (exchanges,).
        """
        learners, copied = self.learners, self.learners.copied_at_once > 0
        steps = np.maximum(batch.steps[[first, second]], learners.taken[batch.row[[first, second]]])  # (2, exchanges)
        before = steps - learners.taken[batch.row[[first, second]]]
        after = batch.steps[[first + 1, second + 1]] - steps
        # Sort exchanges with equal step counts together. Within each block, put all first sides before all second ones.
        alike = np.lexsort((*after, *before))
        order = np.argsort(np.tile(np.arange(len(first)) // self.pairs_at_once, 2), kind="stable")
        sides = np.stack([first, second])[:, alike].reshape(-1)[order]
        rows = batch.row[sides]
        before, after = (counts[:, alike].reshape(-1)[order] for counts in (before, after))
        own = (steps / self.every)[:, alike].reshape(-1)[order]
        exchanges = batch.exchange[first]
        every, at_end = intervals(self.tape.every, exchanges), intervals(self.tape.every_at_end, exchanges)
        trained = self.since_mix(batch.row[[first, second]], steps, every)
        ours, theirs = (either[:, alike].reshape(-1)[order] for either in (trained, trained[::-1]))
        at_end = at_end[:, alike].reshape(-1)[order]
        numbers = batch.exchange[sides]
        agreed = np.frombuffer(self.tape.weight)[numbers]
        self.counted[batch.row[[first, second]]] = steps
        if copied:
            to_snapshot, to_boundary = learners.draw(rows, before), learners.draw(rows, after)
        for start in range(0, len(rows), 2 * self.pairs_at_once):
            part = slice(start, start + 2 * self.pairs_at_once)
            some = rows[part]
            if not copied:
                self.train(some, learners.taken[some] + before[part])
            models, difference = (memory[: len(some)] for memory in self.memory)
            self.matrix.take(some, axis=0, out=models, mode="clip")
            if copied:
                learners.train_copies(models, to_snapshot, start)
            taught, weights = self.mixed(some, models, numbers[part], agreed[part], own[part], difference)
            if copied:
                learners.train_copies(models, to_boundary, start)
                models += difference
                self.matrix[some] = models
            else:
                self.train(some, learners.taken[some] + after[part])
                self.matrix[some] += difference
            if taught is not None:
                counts = credit(ours[part], theirs[part], weights / agreed[part])
                learners.learn(some, taught[0], counts, taught[1], at_end[part] if self.chooses else None)

    def since_mix(self, rows: I64, steps: I64, every: I64) -> F64:
        """Return the intervals that the rows have trained between their last mixes and their snapshots.

        The snapshots then count as the last mixes. ``rows``, ``steps`` (at the snapshots), ``every`` (steps in an
        interval) and the result share a shape.
        """
        trained: F64 = (steps - self.mixed_at[rows]) / every
        self.mixed_at[rows] = steps
        return trained

    def mixed(
        self, rows: I64, ours: F32, numbers: I64, agreed: F64, own: F64, difference: F32
    ) -> tuple[tuple[F32, F64] | None, F64]:
        """Mix pairs of rows, and write what each row must add into ``difference``.

        Args:
            rows: All first sides, then all second sides, shape (rows,).
            ours: Snapshots, shape (rows, elements).
            numbers: The exchange of each row, shape (rows,).
            agreed: Weights that the sides agreed on, shape (rows,).
            own: Intervals that each row has trained, shape (rows,).
            difference: Output, shape (rows, elements).

        Returns:
            The result of :meth:`shift`, and the weights after filtering, shape (rows,).
        """
        half = len(rows) // 2
        self.watch(rows, ours)
        sent = self.decoded(ours, numbers)
        np.subtract(sent[half:], sent[:half], out=difference[:half])
        weights = self.weights(rows.reshape(2, -1), agreed[:half], own.reshape(2, -1), difference[:half], sent)
        shares = weights.astype(np.float32)[:, None]
        np.multiply(difference[:half], -shares[half:], out=difference[half:])
        difference[:half] *= shares[:half]
        return self.shift(rows, ours, difference, weights), weights

    def weights(self, rows: I64, agreed: F64, own: F64, difference: F32, sent: F32) -> F64:
        """Return each row's weight for its difference after filtering, shape (2 pairs,); 0 if either side refuses.

        ``rows`` and ``own`` have shape (2, pairs), ``agreed`` (pairs,), ``difference`` (pairs, elements), and ``sent``
        (2 pairs, elements).
        """
        acceptance, weights = self.acceptance, np.zeros(rows.shape)
        apart_sq, own_sq = squares(difference), squares(sent).reshape(2, -1)
        some = np.flatnonzero(acceptance.passes(rows, apart_sq, own_sq))
        sides, partners = rows[:, some].reshape(-1), rows[::-1, some].reshape(-1)
        offered, apart_sq = (np.tile(each[some], 2) for each in (agreed, apart_sq))
        left = acceptance.taken(sides, partners, offered, apart_sq, own[:, some].reshape(-1))
        weights[:, some] = left.reshape(2, -1)
        return weights.reshape(-1)

    def watch(self, rows: I64, ours: F32) -> None:
        """Tell the filters how far local steps moved these rows since their last mix."""
        if self.watches:
            moved = ours - self.expected[rows]
            self.acceptance.moved(rows, np.sqrt(squares(moved)))
            if self.config.plain:
                self.expected[rows] = ours

    def apart(self, batch: Batch, entries: I64) -> None:
        """Replay single entries, no two of which concern the same row."""
        rows = batch.row[entries]
        self.train(rows, batch.steps[entries])
        kinds = batch.kind[entries]
        snaps = entries[kinds == SNAP]  # without GIVE: a donor's snapshot measures no movement
        if len(snaps):
            self.watch(batch.row[snaps], self.matrix[batch.row[snaps]])
        for entry in entries[(kinds == SNAP) | (kinds == GIVE)].tolist():
            number = int(batch.exchange[entry])
            if number not in self.void:
                row, side = int(batch.row[entry]), int(batch.side[entry])
                self.kept.setdefault(number, {})[side] = self.matrix[row].copy()
                steps = int(self.learners.taken[row])
                if not self.config.plain and batch.kind[entry] == SNAP:
                    self.flying.setdefault(row, {})[number] = steps
                self.trained.setdefault(number, {})[side] = steps, steps - int(self.mixed_at[row])
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
        """Assemble a newcomer's weights from its donors' pieces, and reset its optimizer and filter."""
        ranges = self.tape.ranges.pop(number)
        kept = self.kept.pop(number)
        self.trained.pop(number, None)
        given = [kept[place] for place in range(len(ranges))]
        model = self.matrix[row]
        for (start, stop), values in zip(ranges, given, strict=True):
            model[start:stop] = values[start:stop]
        self.learners.reset(row)
        self.mixed_at[row] = self.learners.taken[row]
        if not self.config.plain:
            self.phi[row], self.momentum[row] = model, 0
            self.counted[row] = -1
        if self.watches:
            self.expected[row] = model
        apart = [
            float(np.mean(np.square(one[start:stop] - other[start:stop], dtype=np.float64)))
            for (start, stop), one, other in zip(ranges, given, [*given[1:], given[0]], strict=True)
        ]
        self.acceptance.joined(row, sorted(apart)[len(apart) // 4] if len(apart) >= MIN_DONORS else 0.0)

    def add(self, batch: Batch, adds: I64) -> None:
        """Add the results of exchanges to rows, no row twice."""
        numbers, sides, rows = batch.exchange[adds].tolist(), batch.side[adds].tolist(), batch.row[adds]
        new = [number for number in dict.fromkeys(numbers) if number not in self.left]
        if new:
            tape, some = self.tape, np.array(new)
            sent = self.decoded(np.stack([self.kept[number][side] for side in (0, 1) for number in new]), [*new, *new])
            both = np.stack([np.frombuffer(values, "l")[some] for values in (tape.first, tape.second)])
            agreed = np.frombuffer(tape.weight)[some]
            own = np.array([[self.trained[number][side][0] for number in new] for side in (0, 1)]) / self.every
            left = self.weights(both, agreed, own, sent[len(new) :] - sent[: len(new)], sent).reshape(2, -1)
            self.left.update(zip(new, left.T, strict=True))
        pairs = list(zip(numbers, sides, strict=True))
        ours = np.stack([self.kept[number][side] for number, side in pairs])
        difference = self.decoded(np.stack([self.kept[number][1 - side] for number, side in pairs]), numbers)
        difference = difference - self.decoded(ours, numbers)
        weights = np.array([self.left[number][side] for number, side in pairs])
        difference *= weights.astype(np.float32)[:, None]
        taught = self.shift(rows, ours, difference, weights, numbers)
        self.matrix[rows] += difference
        if taught is not None:
            every, at_end = intervals(self.tape.every, numbers), intervals(self.tape.every_at_end, numbers)
            since, theirs_since = self.trained_of(pairs, rows, np.where(sides, every[::-1], every))
            agreed = np.frombuffer(self.tape.weight)[numbers]
            own_every = np.where(sides, at_end[1], at_end[0]) if self.chooses else None
            self.learners.learn(rows, taught[0], credit(since, theirs_since, weights / agreed), taught[1], own_every)
        for number in numbers:
            self.over(number)

    def trained_of(self, pairs: list[tuple[int, int]], rows: I64, every: I64) -> F64:
        """Return the result of :meth:`since_mix` for kept snapshots: own and partners' intervals, shape (2, rows).

        ``every`` (2, rows) has the own and the partners' steps in an interval.
        """
        trained = [(self.trained[number][side], self.trained[number][1 - side]) for number, side in pairs]
        self.mixed_at[rows] = np.maximum(self.mixed_at[rows], [ours[0] for ours, _ in trained])
        return np.array([[ours[1] for ours, _ in trained], [theirs[1] for _, theirs in trained]]) / every

    def over(self, number: int) -> None:
        """Mark one side of an exchange as finished, and free the snapshots after both sides."""
        if number in self.half:
            self.half.discard(number)
            self.drop(number)
        else:
            self.half.add(number)

    def drop(self, number: int) -> None:
        """Free the snapshots of an exchange, and ensure that one still to be taken is not kept."""
        self.half.discard(number)
        self.left.pop(number, None)
        self.trained.pop(number, None)
        self.tape.ranges.pop(number, None)
        for row in (self.tape.first[number], self.tape.second[number]):
            self.flying.get(row, {}).pop(number, None)
            self.since.pop((row, number), None)
        if len(self.kept.pop(number, {})) < 2 and self.tape.second[number] >= 0:
            self.void.add(number)

    def shift(
        self, rows: I64, ours: F32, difference: F32, weights: F64, numbers: list[int] | None = None
    ) -> tuple[F32, F64] | None:
        """Replace each row's weighted difference, in place, by the shift that the row must add.

        Args:
            rows: The rows, shape (rows,).
            ours: Their snapshots, shape (rows, elements).
            difference: The weighted ``theirs - ours``, then the shift, shape (rows, elements).
            weights: The weights after filtering, shape (rows,).
            numbers: The exchanges, if other mixes may have happened during them.

        Returns:
            If drift corrections are in use: the original differences and the squared norms of ``ours``.
        """
        mixed = weights > 0
        if not mixed.all():
            difference[~mixed] = 0  # a refused difference may contain NaN
        taught = (difference.copy(), squares(ours)) if self.corrects else None
        if not self.config.plain:
            beside = np.zeros(len(rows), bool)
            for place, number in enumerate(numbers or ()):
                if mixed[place]:
                    row = int(rows[place])
                    beside[place] = self.shift_beside(row, number, ours[place], difference[place])
            alone = mixed & ~beside
            if alone.all():
                self.outer(rows, ours, difference)
            elif alone.any():
                mean = difference[alone]
                self.outer(rows[alone], ours[alone], mean)
                difference[alone] = mean
            for place, number in enumerate(numbers or ()):
                self.added(int(rows[place]), number, difference[place])
        elif self.watches:
            self.expected[rows] += difference
        return taught

    def shift_beside(self, row: int, number: int, ours: F32, difference: F32) -> bool:
        """Take the outer step of an exchange that overlapped other mixes; return False if none overlapped.

        The order of steps is that of :meth:`gossip.averaging.averager.Averager.order`.
        """
        steps, since = self.flying.get(row, {}).pop(number, -1), self.since.pop((row, number), None)
        late = steps < self.counted[row]
        self.counted[row] = max(self.counted[row], steps)
        if late:
            self.phi[row] += difference  # the local progress in the snapshot has entered an outer step already
        elif since is not None:
            outer_step_beside(difference, ours, since, self.phi[row], self.momentum[row], 1.0, *self.config.outer)
        return late or since is not None

    def added(self, row: int, number: int, difference: F32) -> None:
        """Record a shift for the row's snapshots in progress that were taken before it was added."""
        for other, steps in self.flying.get(row, {}).items():
            if other == number or steps < self.counted[row]:
                self.since.pop((row, other), None)
            elif (row, other) in self.since:
                self.since[row, other] += difference
            else:
                self.since[row, other] = difference.copy()

    def outer(self, rows: I64, ours: F32, difference: F32) -> None:
        """Take the outer step of these rows.

        It passes over four arrays nine times. Short models are therefore copied in blocks that fit into the cache. Long
        models are processed in place one by one, which saves the copies.
        """
        alpha, beta = self.config.outer
        if self.rows_in_cache == 1:
            for row, snapshot, apart in zip(rows.tolist(), ours, difference, strict=True):
                outer_step(apart, snapshot, self.phi[row], self.momentum[row], 1.0, alpha, beta)
            return
        for start in range(0, len(rows), self.rows_in_cache):
            part = slice(start, start + self.rows_in_cache)
            some = rows[part]
            phi, momentum = self.phi.take(some, axis=0), self.momentum.take(some, axis=0)
            outer_step(difference[part], ours[part], phi, momentum, 1.0, alpha, beta)
            self.phi[some], self.momentum[some] = phi, momentum

    def decoded(self, values: F32, numbers: Iterable[int]) -> F32:
        """Return the values (rows, elements) as the partners decode them in exchanges of these numbers, (rows,)."""
        if self.codec.raw:
            return values
        out = np.empty_like(values)
        if self.codec.block == 1:  # each element is encoded by itself
            self.codec.quantised(values.reshape(-1), out.reshape(-1), 0)
            return out
        for row, number in enumerate(numbers):
            self.codec.quantised(values[row], out[row], seed_of(int(number)))
        return out


def intervals(every: tuple[array[int], array[int]], exchanges: I64 | list[int]) -> I64:
    """Return the local steps in an interval of both sides of these exchanges, shape (2, exchanges)."""
    return np.stack([np.frombuffer(side, "l")[exchanges] for side in every])


def seed_of(number: int) -> int:
    """Return the seed of an exchange's dither. Sessions of real exchanges have random numbers of 63 bits."""
    return number * 0x9E3779B97F4A7C15 & (1 << 63) - 1  # Fibonacci hashing spreads successive numbers


def squares(rows: F32) -> F64:
    """Return the sum of squares of each row of an array (rows, elements), shape (rows,)."""
    found: F64 = np.matmul(rows[:, None], rows[:, :, None])[:, 0, 0].astype(np.float64)
    return found
