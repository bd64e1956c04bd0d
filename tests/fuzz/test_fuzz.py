"""A few inputs of every fuzz target (`make fuzz` plays ten million), and tests of the engine on a faulty target."""

import time
import warnings

import pytest

from tests.fuzz.engine import LIMIT_S, Figures, Target, play, play_life
from tests.fuzz.run import TARGETS, inputs_of, table
from tests.harness.marks import slow

SLOW = {"handshakes": 10, "scenarios": 60, "checkpoints": 120, "messages": 600}
INPUTS = 300


@pytest.mark.parametrize("times", [1, slow(5)])
@pytest.mark.parametrize("name", list(TARGETS))
def test_every_input_raises_only_declared_errors(name, times):
    inputs = times * SLOW.get(name, INPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The certificate parser warns of odd certificates.
        figures = play(TARGETS[name], seed=7, lives=range(10_000), limit=inputs)
    said = "\n".join(f"{find.what}\n{find.detail}\nreplay: {find.replay}" for find in figures.finds.values())
    assert not figures.finds, said
    assert figures.inputs == inputs
    assert 0 < figures.refused < figures.inputs or not TARGETS[name].declared, (
        "samples all good or all bad find nothing"
    )


class Wrong(Target):
    """A target that allocates too much, raises and is slow, each at one input of a life."""

    name, share, life, declared = "wrong", 1.0, 61, (ValueError,)

    def __init__(self, rng):
        super().__init__(rng)
        self.place = -1

    def prepare(self, rng):
        self.place += 1
        return (self.place, rng.random()), self.act

    def act(self):
        if self.place == 0:
            bytearray(20 << 20)
        if self.place == 3:
            raise ValueError("declared")
        if self.place == 5:
            until = time.thread_time() + 1.5 * LIMIT_S
            while time.thread_time() < until:
                pass
        if self.place == 60:
            raise KeyError("not declared")


def test_an_undeclared_error_a_slow_input_and_a_large_one_are_found_and_played_again():
    figures = play(Wrong, seed=1, lives=[2])
    kinds = {find.what.split()[0]: find for find in figures.finds.values()}
    assert set(kinds) == {"raised", "took", "allocated"}
    assert figures.refused == 1
    assert [kinds[kind].number % 61 for kind in ("allocated", "took", "raised")] == [0, 5, 60]
    find = kinds["raised"]
    once_more = Figures(inputs=1)
    play_life(Wrong, find.seed, find.number // 61, find.number % 61 + 1, once_more)
    again = [one for one in once_more.finds.values() if one.what == find.what]
    assert [one.detail for one in again] == [find.detail]
    assert find.replay.endswith(f"--target wrong --seed 1 --input {find.number}")


def test_every_input_asked_for_is_played_and_the_table_says_how_many():
    names = list(TARGETS)
    assert sum(inputs_of(name, names, 1_000_003) for name in names) == 1_000_003
    rows = table({"frames": Figures(inputs=3, refused=2), "parts": Figures(inputs=4)}, 1.0, 7)
    assert "| frames | 3 | 2 |" in rows
    assert "| all | 7 | 2 |" in rows
