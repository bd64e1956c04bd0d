"""The arithmetic of the fast level: entries of the tape are replayed in waves over the rows of one matrix.

A *wave* is a batch of entries of which no two concern the same row (:mod:`sim.exchanges.waves`). In a *whole* exchange
no other entry lies between a side's snapshot and its addition; it is replayed in one go, and other entries singly.

The sides of an exchange agree on a *weight*, the share of the difference between the snapshots that each side adds.
Filters may lower it. With an outer step the row adds more than the weighted difference, its *shift*. A *lesson* is what
an exchange teaches the drift correction (:mod:`sim.learning.corrections`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from gossip.arithmetic.correction import credit
from gossip.arithmetic.outer_step import closest_rate, measured_momentum, outer_step, outer_step_overlapping, sample_of
from gossip.codecs import Codec
from gossip.config import Config
from gossip.state_transfer.comparing import MIN_DONORS
from sim.arrays import F32, F64, I64
from sim.exchanges.acceptance import Acceptance
from sim.exchanges.tape import ADD, ADOPT, DROP, GIVE, SNAPSHOT, Entries, Tape
from sim.exchanges.waves import Units
from sim.learning.learners import Learners
from sim.learning.optimizer.moments import MomentMixer
from sim.seeds import GOLDEN

# Rows in one pass: as many as fit into a core's L2 cache with their gradients, but enough for efficient gradients. With
# 4,810 elements, a pass over 32 rows took 0.4 us a row, and a pass over 103 rows 1.2 us.
BLOCK_BYTES, MIN_ROWS = 1 << 20, 32


class Models:
    """Every peer's model and its outer step's state: ``phi`` and ``momentum``, float32, shape (peers, elements).

    :mod:`gossip.arithmetic.outer_step` states the equations of the outer step.

    A training step is computed lazily, when a later operation needs it. The division into waves changes no result.
    """

    def __init__(self, learners: Learners, config: Config, codec: Codec, tape: Tape, acceptance: Acceptance) -> None:
        self.learners, self.config, self.tape, self.acceptance = learners, config, tape, acceptance
        self.matrix = learners.matrix
        self.codec = codec
        self.phi = self.momentum = self.expected = np.empty((0, 0), np.float32)
        if not config.plain:
            self.phi, self.momentum = self.matrix.copy(), np.zeros_like(self.matrix)
        self.alpha = np.zeros(len(self.matrix))  # Each row's measured momentum.
        self.finds_radius = config.finds_radius
        if self.finds_radius:  # The model without the local steps since the last mix; phi is exactly that.
            self.expected = self.matrix.copy() if config.plain else self.phi
        rows_in_block = BLOCK_BYTES // (4 * learners.elements)
        rows_at_once = min(learners.models_at_once or rows_in_block, max(rows_in_block, MIN_ROWS))
        self.pairs_at_once = max(rows_at_once // 2, 1)
        self.work = [np.empty((2 * self.pairs_at_once, learners.elements), np.float32) for _ in range(2)]
        self.has_correction = learners.corrections is not None
        self.moments = None if learners.moment_plan is None else MomentMixer(learners.moment_plan, len(self.matrix))
        self.moment_copies: dict[int, dict[int, list[F32]]] = {}  # As ``snapshots``.
        self.interval_steps = config.interval_steps or 1  # Local steps in an interval, as versions count them.
        self.chooses_intervals = config.auto_interval
        self.mixed_at = np.zeros(len(self.matrix), np.int64)  # Step count of each row at its last mix's snapshot.
        # The exchanges in progress, by number; the first two also by side.
        self.snapshots: dict[int, dict[int, F32]] = {}
        self.trained: dict[int, dict[int, tuple[int, int]]] = {}  # Steps at the snapshot, and since the mix before.
        self.filtered: dict[int, F64] = {}  # Both sides' weights after filtering, shape (2,).
        self.dropped_early = set[int]()  # Exchanges dropped before one of their snapshots, which is then not kept.
        self.half_done = set[int]()  # Exchanges that are over for one side.
        # Bookkeeping of overlapping outer steps, each of which counts a row's local progress since the one before:
        # the step count of the newest snapshot whose progress was counted, by row; -1 if there is none.
        self.progress_at = np.full(len(self.matrix), -1)
        self.open_snapshots: dict[int, dict[int, int]] = {}  # By row and exchange: the snapshot's step count.
        self.shift_since: dict[tuple[int, int], F32] = {}  # By row and exchange: the sum of shifts since the snapshot.

    def replay(self, steps_done: I64, splits: bool = True) -> None:
        """Replay the tape up to now.

        Args:
            steps_done: Steps that each row has done, shape (rows,).
            splits: False to leave exchanges in progress on the tape until the next call, so that their snapshots take
                no memory.
        """
        entries = self.tape.take(steps_done, splits)
        units = Units(entries)
        for wave in units.waves():
            whole, single = wave[wave < units.whole_units], wave[wave >= units.whole_units]
            for start in range(0, len(whole), self.pairs_at_once):
                block = whole[start : start + self.pairs_at_once]
                self.replay_exchanges(entries, units.first[block], units.last[block])
            if len(single):
                self.replay_entries(entries, units.first[single])

    def train_until(self, rows: I64, steps: I64) -> None:
        """Train each row up to its total step count; both arrays have shape (n,)."""
        counts = steps - self.learners.steps_taken[rows]
        behind = counts > 0
        if behind.any():
            self.learners.train(rows[behind], counts[behind])

    # -- whole exchanges -----------------------------------------------------------------------------------------
    def replay_exchanges(self, entries: Entries, first: I64, second: I64) -> None:
        """Replay whole exchanges, at most ``pairs_at_once``, so that their rows stay in cache.

        Args:
            entries: The entries of the tape.
            first: Entries of the initiators' snapshots, shape (exchanges,); the entry after each is the addition.
            second: Entries of the responders' snapshots, shape (exchanges,), likewise.
        """
        learners, exchanges = self.learners, entries.exchange[first]
        # The two rows of each exchange, and their steps at the snapshots, of shape (2, exchanges).
        pairs = entries.row[[first, second]]
        steps = np.maximum(entries.steps[[first, second]], learners.steps_taken[pairs])
        intervals = intervals_of(exchanges, self.tape.intervals)
        trained: F64 = (steps - self.mixed_at[pairs]) / intervals  # Intervals since the last mixes.
        self.mixed_at[pairs] = steps
        self.progress_at[pairs] = steps
        # Below, arrays have an element for each row, all first sides before all second ones.
        rows, numbers = pairs.reshape(-1), np.tile(exchanges, 2)
        agreed = np.frombuffer(self.tape.weights)[numbers]
        self.train_until(rows, steps.reshape(-1))
        copies = [] if self.moments is None else self.moments.copies(rows)
        models, difference = (work[: len(rows)] for work in self.work)
        self.matrix.take(rows, axis=0, out=models, mode="clip")
        lesson, weights = self.mix_pairs(
            rows, models, numbers, agreed, steps.reshape(-1) / self.interval_steps, difference
        )
        self.train_until(rows, entries.steps[[first + 1, second + 1]].reshape(-1))
        self.matrix[rows] += difference
        if self.moments is not None:
            for place in np.flatnonzero(weights).tolist():
                partner = (place + len(first)) % len(rows)
                self.moments.mix(
                    int(rows[place]), [copy[partner] for copy in copies], seed_of(int(numbers[place])),
                    int(intervals.flat[place]),
                )  # fmt: skip
        if lesson is not None:
            shifts, own_sq = lesson
            credits = credit(trained.reshape(-1), trained[::-1].reshape(-1), weights / agreed)
            end_intervals = intervals_of(exchanges, self.tape.end_intervals).reshape(-1)
            new_intervals = end_intervals if self.chooses_intervals else None
            learners.learn_correction(rows, shifts, credits, own_sq, new_intervals)

    def mix_pairs(
        self, rows: I64, ours: F32, numbers: I64, agreed: F64, age: F64, difference: F32
    ) -> tuple[tuple[F32, F64] | None, F64]:
        """Mix pairs of rows, and write what each row must add into ``difference``.

        Args:
            rows: All first sides, then all second sides, shape (rows,).
            ours: Snapshots, shape (rows, elements).
            numbers: The exchange of each row, shape (rows,).
            agreed: Agreed weights, shape (rows,).
            age: Intervals that each row has trained in all, shape (rows,).
            difference: Output, shape (rows, elements).

        Returns:
            The result of :meth:`shift`, and the weights after filtering, shape (rows,).
        """
        half = len(rows) // 2
        self.note_movement(rows, ours)
        sent = self.decoded(ours, numbers)
        np.subtract(sent[half:], sent[:half], out=difference[:half])
        weights = self.filter_pairs(rows.reshape(2, -1), agreed[:half], age.reshape(2, -1), difference[:half], sent)
        shares = weights.astype(np.float32)[:, None]
        np.multiply(difference[:half], -shares[half:], out=difference[half:])
        difference[:half] *= shares[:half]
        return self.shift(rows, ours, difference, weights), weights

    # -- single entries ------------------------------------------------------------------------------------------
    def replay_entries(self, entries: Entries, chosen: I64) -> None:
        """Replay the chosen entries, no two of which concern the same row."""
        rows, kinds = entries.row[chosen], entries.kind[chosen]
        self.train_until(rows, entries.steps[chosen])
        moved = rows[kinds == SNAPSHOT]  # Without GIVE: a donor's snapshot measures no movement.
        if len(moved):
            self.note_movement(moved, self.matrix[moved])
        for entry in chosen[(kinds == SNAPSHOT) | (kinds == GIVE)].tolist():
            number = int(entries.exchange[entry])
            if number not in self.dropped_early:
                row, side = int(entries.row[entry]), int(entries.side[entry])
                self.snapshots.setdefault(number, {})[side] = self.matrix[row].copy()
                if self.moments is not None and entries.kind[entry] == SNAPSHOT:
                    copies = [copy[0] for copy in self.moments.copies(np.array([row]))]
                    self.moment_copies.setdefault(number, {})[side] = copies
                steps = int(self.learners.steps_taken[row])
                if not self.config.plain and entries.kind[entry] == SNAPSHOT:
                    self.open_snapshots.setdefault(row, {})[number] = steps
                self.trained.setdefault(number, {})[side] = steps, steps - int(self.mixed_at[row])
        adds = chosen[kinds == ADD]
        for start in range(0, len(adds), 2 * self.pairs_at_once):
            self.add_results(entries, adds[start : start + 2 * self.pairs_at_once])
        for entry in chosen[(kinds == DROP) | (kinds == ADOPT)].tolist():
            number = int(entries.exchange[entry])
            if entries.kind[entry] == DROP:
                self.drop(number)
            else:
                self.adopt(int(entries.row[entry]), number)

    def add_results(self, entries: Entries, adds: I64) -> None:
        """Add the results of exchanges to rows, no row twice; ``adds`` are entries."""
        numbers, sides, rows = entries.exchange[adds].tolist(), entries.side[adds].tolist(), entries.row[adds]
        unfiltered = [number for number in dict.fromkeys(numbers) if number not in self.filtered]
        if unfiltered:
            self.filter_exchanges(unfiltered)
        pairs = list(zip(numbers, sides, strict=True))
        ours = np.stack([self.snapshots[number][side] for number, side in pairs])
        theirs = np.stack([self.snapshots[number][1 - side] for number, side in pairs])
        difference = self.decoded(theirs, numbers) - self.decoded(ours, numbers)
        weights = np.array([self.filtered[number][side] for number, side in pairs])
        difference *= weights.astype(np.float32)[:, None]
        lesson = self.shift(rows, ours, difference, weights, numbers)
        self.matrix[rows] += difference
        if self.moments is not None:
            for place in np.flatnonzero(weights).tolist():
                number, side = pairs[place]
                interval_steps = self.tape.intervals[side][number]
                copies = self.moment_copies[number][1 - side]
                self.moments.mix(int(rows[place]), copies, seed_of(number), interval_steps)
        if lesson is not None:
            shifts, own_sq = lesson
            own = [self.trained[number][side] for number, side in pairs]
            partners = [self.trained[number][1 - side] for number, side in pairs]
            self.mixed_at[rows] = np.maximum(self.mixed_at[rows], [at_steps for at_steps, _ in own])
            # Both arrays have a row for each side of the exchanges, initiators first, shape (2, rows).
            intervals = intervals_of(numbers, self.tape.intervals)
            end_intervals = intervals_of(numbers, self.tape.end_intervals)
            steps = np.array([[since_mix for _, since_mix in trained] for trained in (own, partners)])
            own_trained, partner_trained = steps / np.where(sides, intervals[::-1], intervals)
            agreed = np.frombuffer(self.tape.weights)[numbers]
            credits = credit(own_trained, partner_trained, weights / agreed)
            new_intervals = np.where(sides, end_intervals[1], end_intervals[0]) if self.chooses_intervals else None
            self.learners.learn_correction(rows, shifts, credits, own_sq, new_intervals)
        for number in numbers:
            self.end_side(number)

    def filter_exchanges(self, numbers: list[int]) -> None:
        """Filter exchanges with both snapshots, and keep both sides' weights until they are added."""
        tape, count = self.tape, len(numbers)
        snapshots = np.stack([self.snapshots[number][side] for side in (0, 1) for number in numbers])
        sent = self.decoded(snapshots, [*numbers, *numbers])
        rows = np.stack([np.frombuffer(values, "l")[numbers] for values in (tape.initiators, tape.responders)])
        agreed = np.frombuffer(tape.weights)[numbers]
        steps = np.array([[self.trained[number][side][0] for number in numbers] for side in (0, 1)])
        age = steps / self.interval_steps
        weights = self.filter_pairs(rows, agreed, age, sent[count:] - sent[:count], sent).reshape(2, -1)
        self.filtered.update(zip(numbers, weights.T, strict=True))

    def adopt(self, row: int, number: int) -> None:
        """Assemble a newcomer's weights from its donors' pieces, and reset its optimizer and filter."""
        ranges, snapshots = self.tape.piece_ranges.pop(number), self.snapshots.pop(number)
        self.trained.pop(number, None)
        donated = [snapshots[place] for place in range(len(ranges))]
        model = self.matrix[row]
        for (start, stop), values in zip(ranges, donated, strict=True):
            model[start:stop] = values[start:stop]
        self.learners.reset(row)
        self.mixed_at[row] = self.learners.steps_taken[row]
        if not self.config.plain:
            self.phi[row], self.momentum[row], self.alpha[row] = model, 0, 0.0
            self.progress_at[row] = -1
        if self.finds_radius:
            self.expected[row] = model
        # Compare each donor with the next one on its own piece. The lower quartile tells the newcomer's filter how far
        # apart honest members are, even if some donors are not honest.
        next_donated = [*donated[1:], donated[0]]
        apart_sq = [
            float(np.mean(np.square(values[start:stop] - next_values[start:stop], dtype=np.float64)))
            for (start, stop), values, next_values in zip(ranges, donated, next_donated, strict=True)
        ]
        donors_sq = sorted(apart_sq)[len(apart_sq) // 4] if len(apart_sq) >= MIN_DONORS else 0.0
        self.acceptance.on_joined(row, donors_sq)

    def end_side(self, number: int) -> None:
        """End an exchange for one side, and free the snapshots after both sides."""
        if number in self.half_done:
            self.drop(number)
        else:
            self.half_done.add(number)

    def drop(self, number: int) -> None:
        """Free the snapshots of an exchange, and ensure that one still to be taken is not kept."""
        self.half_done.discard(number)
        self.filtered.pop(number, None)
        self.moment_copies.pop(number, None)
        self.trained.pop(number, None)
        self.tape.piece_ranges.pop(number, None)
        for row in (self.tape.initiators[number], self.tape.responders[number]):
            self.open_snapshots.get(row, {}).pop(number, None)
            self.shift_since.pop((row, number), None)
        if len(self.snapshots.pop(number, {})) < 2 and self.tape.responders[number] >= 0:
            self.dropped_early.add(number)

    # -- filters -------------------------------------------------------------------------------------------------
    def note_movement(self, rows: I64, ours: F32) -> None:
        """Tell the filters how far local steps moved these rows since their last mix; ``ours`` (rows, elements)."""
        if self.finds_radius:
            moved = ours - self.expected[rows]
            self.acceptance.note_movement(rows, np.sqrt(squares(moved)))
            if self.config.plain:
                self.expected[rows] = ours

    def filter_pairs(self, rows: I64, agreed: F64, age: F64, difference: F32, sent: F32) -> F64:
        """Return each row's weight for its difference after filtering, shape (2 pairs,); 0 if either side refuses.

        ``rows`` and ``age`` (:meth:`mix_pairs`) have shape (2, pairs), ``agreed`` (pairs,), ``difference`` (pairs,
        elements), and ``sent``, the decoded snapshots, (2 pairs, elements).
        """
        acceptance, weights = self.acceptance, np.zeros(rows.shape)
        apart_sq, own_sq = squares(difference), squares(sent).reshape(2, -1)
        passed = np.flatnonzero(acceptance.check_norms(rows, apart_sq, own_sq))
        sides, partners = rows[:, passed].reshape(-1), rows[::-1, passed].reshape(-1)
        offered, apart_sq = (np.tile(values[passed], 2) for values in (agreed, apart_sq))
        filtered = acceptance.filter(sides, partners, offered, apart_sq, age[:, passed].reshape(-1), difference[passed])
        weights[:, passed] = filtered.reshape(2, -1)
        return weights.reshape(-1)

    # -- outer steps ---------------------------------------------------------------------------------------------
    def shift(
        self, rows: I64, ours: F32, difference: F32, weights: F64, numbers: list[int] | None = None
    ) -> tuple[F32, F64] | None:
        """Replace each row's weighted difference, in place, by the shift that the row must add.

        Args:
            rows: The rows, shape (rows,).
            ours: Their snapshots, shape (rows, elements).
            difference: The weighted ``theirs - ours``, then the shift, shape (rows, elements).
            weights: The weights after filtering, shape (rows,).
            numbers: The exchanges if other mixes may have overlapped with them; None for whole exchanges.

        Returns:
            The lesson: the original differences and the squared norms of ``ours``; None without drift corrections.
        """
        mixed = weights > 0
        if not mixed.all():
            difference[~mixed] = 0  # A refused difference may contain NaN.
        lesson = (difference.copy(), squares(ours)) if self.has_correction else None
        if not self.config.plain:
            overlapped = np.zeros(len(rows), bool)
            for place, number in enumerate(numbers or ()):
                if mixed[place]:
                    overlapped[place] = self.shift_overlapped(int(rows[place]), number, ours[place], difference[place])
            alone = mixed & ~overlapped
            if alone.all():
                self.take_outer_steps(rows, ours, difference)
            elif alone.any():
                shifts = difference[alone]
                self.take_outer_steps(rows[alone], ours[alone], shifts)
                difference[alone] = shifts
            for place, number in enumerate(numbers or ()):
                self.note_shift(int(rows[place]), number, difference[place])
        elif self.finds_radius:
            self.expected[rows] += difference
        return lesson

    def shift_overlapped(self, row: int, number: int, ours: F32, difference: F32) -> bool:
        """Take the outer step of an exchange that overlapped other mixes; return False if none overlapped.

        The order of steps is that of :meth:`gossip.averaging.jobs.MixJob.count_local_steps_once`.
        """
        steps = self.open_snapshots.get(row, {}).pop(number, -1)
        shift_since = self.shift_since.pop((row, number), None)
        is_late = steps < self.progress_at[row]
        self.progress_at[row] = max(self.progress_at[row], steps)
        if is_late:
            self.phi[row] += difference  # The local progress in the snapshot has entered an outer step already.
        elif shift_since is not None:
            phi, momentum, before = self.phi[row], self.momentum[row], self.sample(row)
            outer_step_overlapping(difference, ours, shift_since, phi, momentum, 1.0, *self.outer_of(row))
            self.measure(row, before)
        return is_late or shift_since is not None

    def note_shift(self, row: int, number: int, difference: F32) -> None:
        """Record a shift for the row's open snapshots that were taken before it was added."""
        for other, steps in self.open_snapshots.get(row, {}).items():
            if other == number or steps < self.progress_at[row]:
                self.shift_since.pop((row, other), None)
            elif (row, other) in self.shift_since:
                self.shift_since[row, other] += difference
            else:
                self.shift_since[row, other] = difference.copy()

    def take_outer_steps(self, rows: I64, ours: F32, difference: F32) -> None:
        """Take the outer step of these rows; ``ours`` and ``difference`` as in :meth:`shift`."""
        for row, snapshot, apart in zip(rows.tolist(), ours, difference, strict=True):
            before = self.sample(row)
            outer_step(apart, snapshot, self.phi[row], self.momentum[row], 1.0, *self.outer_of(row))
            self.measure(row, before)

    def outer_of(self, row: int) -> tuple[float, float]:
        """Return momentum and rate of the row's next outer step."""
        if not self.config.measures_momentum:
            return self.config.outer
        alpha = float(self.alpha[row])
        return alpha, closest_rate(alpha)

    def sample(self, row: int) -> F32 | None:
        """Return what :meth:`measure` compares, as :meth:`gossip.arithmetic.outer_step.OuterStep.sample` does."""
        return sample_of(self.momentum[row]).copy() if self.config.measures_momentum else None

    def measure(self, row: int, before: F32 | None) -> None:
        """Set the momentum of the row's next step, from a sample before the last one."""
        if before is not None:
            self.alpha[row] = measured_momentum(float(self.alpha[row]), before, sample_of(self.momentum[row]))

    def decoded(self, values: F32, numbers: Iterable[int]) -> F32:
        """Return the values (rows, elements) as the partners decode them in exchanges of these numbers, (rows,)."""
        if self.codec.is_raw:
            return values
        out = np.empty_like(values)
        if self.codec.block == 1:  # Each element is encoded by itself.
            self.codec.quantised(values.reshape(-1), out.reshape(-1), 0)
            return out
        for row, number in enumerate(numbers):
            self.codec.quantised(values[row], out[row], seed_of(int(number)))
        return out


def intervals_of(exchanges: I64 | list[int], intervals: tuple[array[int], array[int]]) -> I64:
    """Return the local steps in an interval of both sides of these exchanges, shape (2, exchanges)."""
    return np.stack([np.frombuffer(side, "l")[exchanges] for side in intervals])


def seed_of(number: int) -> int:
    """Return the seed of an exchange's dither. Sessions of real exchanges have random numbers of 63 bits."""
    return number * GOLDEN & (1 << 63) - 1  # Fibonacci hashing spreads successive numbers.


def squares(rows: F32) -> F64:
    """Return the sum of squares of each row of an array (rows, elements), shape (rows,)."""
    sums: F64 = np.matmul(rows[:, None], rows[:, :, None])[:, 0, 0].astype(np.float64)
    return sums
