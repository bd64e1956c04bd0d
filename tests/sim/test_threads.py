"""Simulations compute in one thread, and restore the number of threads afterwards."""

import numpy  # noqa: F401  its BLAS is what is asked about
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from sim import simulation
from sim.threads import one_thread
from tests.sim.scenarios import small


def threads():
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"], torch.get_num_threads()


@pytest.fixture
def two_threads():
    with threadpool_limits(2, "blas"):
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(1)


def test_blas_and_torch_have_one_thread_inside_and_what_they_had_after_it(two_threads):
    before = threads()
    assert set(before[0]) == {2}, "numpy without a BLAS of its own: nothing is tested"
    with one_thread():
        assert threads() == ([1] * len(before[0]), 1)
    assert threads() == before
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert threads() == before


def test_a_simulation_is_played_in_one_thread(two_threads, monkeypatch):
    seen = []

    def play(*_):
        seen.append(threads())
        return "a result"

    monkeypatch.setattr(simulation, "play", play)
    assert simulation.simulate(small(), progress=False) == "a result"
    assert set(seen[0][0]) == {1}
    assert seen[0][1] == 1
