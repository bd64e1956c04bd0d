"""benchmarks/language.py: its search for a rate, the comparisons in its table, and that each row can be played."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from sim.scenario.scenario import Scenario

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def language():
    spec = importlib.util.spec_from_file_location("language", BENCHMARKS / "language.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["language"] = module  # a dataclass looks for its module there
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    spec.loader.exec_module(module)
    sys.path[:] = path
    yield module
    del sys.modules["language"]


def known(language, best: float, missing: tuple[float, ...] = ()):
    """Return runs whose loss is a parabola in the logarithm of the rate, lowest at ``best``.

    The ``missing`` rates were never played.
    """

    class Known(language.Runs):
        def figures(self, row, rate, seed):
            if rate in missing:
                return None
            tuning = 2.0 + (0.0 if row.at else math.log(rate / best) ** 2)  # A given rate was the best before.
            test = tuning if row.gossip is None else 1.1 * tuning
            return {"tuning": tuning, "test": test, "average": test, "mb": 1.0, "fewer": 7.0}

    return Known()


def test_the_search_goes_on_until_a_worse_rate_lies_on_either_side(language):
    row = language.Row("muon", "plain", {})
    for best in (0.005, 0.02, 0.05):
        runs = known(language, best)
        rate = runs.rate(row)
        assert rate.bracketed
        assert abs(math.log(rate.best / best)) <= math.log(language.FINER) / 2 + 0.01
        assert min(rate.tried) < rate.best < max(rate.tried)


def test_a_rate_at_the_edge_of_what_was_played_is_not_called_the_best(language):
    runs = known(language, 0.02, missing=(language.rate_at(language.Row("muon", "plain", {}), 1),))
    assert not runs.rate(language.Row("muon", "plain", {})).bracketed


def test_a_row_is_compared_with_synchronous_training_of_the_same_optimizer(language):
    _, *rows = language.table(known(language, 0.01))
    assert len(rows) == len(language.ROWS)
    for cells in rows:
        assert cells[6] == ("+0.0" if cells[1].startswith(language.SYNC) else "+10.0")


@pytest.mark.parametrize("seed", [1, 2])
def test_each_row_is_a_scenario_and_takes_the_same_samples(language, seed):
    for row in language.ROWS:
        scenario = Scenario.from_mapping(language.scenario(row, 0.01, seed))
        assert scenario.peers * scenario.task.batch_size == language.WINDOWS_A_STEP
        assert scenario.task.optimizer.clip_norm == 1.0
    assert len({row.name for row in language.ROWS}) == len(language.ROWS)
