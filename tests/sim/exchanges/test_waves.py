"""The order in which a batch of the tape is played."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.exchanges.tape import ADD, SNAPSHOT, Tape
from sim.exchanges.waves import Units

ROWS = 6


@st.composite
def tapes(draw):
    """Draw exchanges of a few rows that overlap in any way, some of them not finished."""
    tape, steps = Tape(), [0] * ROWS
    under_way: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(0, 40))):
        if under_way and draw(st.booleans()):
            number, row, side = under_way.pop(draw(st.integers(0, len(under_way) - 1)))
            steps[row] += 1  # an update comes before the boundary, so a snapshot at the boundary includes it
            tape.append(row, steps[row], ADD, number, side)
            continue
        first, second = draw(st.permutations(range(ROWS)))[:2]
        number = tape.new_exchange(first, second, 0.5)
        for side, row in enumerate((first, second)):
            steps[row] += draw(st.integers(0, 1))
            tape.append(row, steps[row], SNAPSHOT, number, side)
            under_way.append((number, row, side))
    return tape, np.array(steps)


@given(tapes(), st.integers(0, 3))
@settings(max_examples=2 * settings.default.max_examples)
def test_a_wave_moves_no_row_twice_and_each_row_keeps_its_order(case, behind):
    tape, steps = case
    batch = tape.take(steps - behind)
    plan = Units(batch)
    played: list[int] = []
    for wave in plan.waves():
        rows: list[int] = []
        for unit in wave.tolist():
            entries = [int(plan.first[unit])]
            if unit < plan.whole_units:
                entries = [entries[0], entries[0] + 1, int(plan.last[unit]), int(plan.last[unit]) + 1]
                rows += [int(batch.row[entries[0]]), int(batch.row[entries[2]])]
            else:
                rows.append(int(batch.row[entries[0]]))
            played += entries
        assert len(rows) == len(set(rows))
    assert sorted(played) == list(range(len(batch)))
    place = {entry: at for at, entry in enumerate(played)}
    for entry in range(1, len(batch)):
        if batch.row[entry] == batch.row[entry - 1]:
            assert place[entry - 1] < place[entry]


@given(tapes())
@settings(max_examples=2 * settings.default.max_examples)
def test_what_is_under_way_is_left_whole_with_what_follows_it(case):
    tape, steps = case
    entries = len(tape.rows)
    played = tape.take(steps, splits=False)
    if len(played) < entries:  # otherwise all exchanges are finished, or all are cut
        numbers = [np.sort(played.exchange[played.kind == kind]) for kind in (SNAPSHOT, ADD)]
        assert np.array_equal(*numbers)
    left = tape.take(steps)
    assert len(played) + len(left) == entries
    for row in range(ROWS):
        when = [(step, kind) for part in (played, left) for step, kind in zip(part.steps, part.kind, strict=True)]
        of = np.concatenate([played.row, left.row]) == row
        own = [each for each, here in zip(when, of.tolist(), strict=True) if here]
        assert own == sorted(own)


def test_where_nearly_all_is_under_way_it_is_cut():
    tape, steps = Tape(), np.array([2, 2])
    number = tape.new_exchange(0, 1, 0.5)
    for row in (0, 1):
        tape.append(row, 1, SNAPSHOT, number, row)
    assert len(tape.take(steps, splits=False)) == 2
    assert not tape.rows
