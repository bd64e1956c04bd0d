"""The duration of each peer's steps follows the scenario, and depends on its name alone."""

import math

import numpy as np
import pytest

from sim.scenario.scenario import Compute, Distribution, Stragglers
from sim.world.step_times import StepTimes

LOGNORMAL = Distribution.lognormal(0.1, 0.3)


def test_asking_in_pieces_changes_no_duration():
    times = StepTimes(Compute(step_s=LOGNORMAL), 1)
    whole, pieces = times.durations("a")(500), times.durations("a")
    parts = [pieces(count) for count in (1, 2, 0, 63, 64, 65, 200, 105)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_names_and_seeds_give_durations_of_their_own():
    first = StepTimes(Compute(step_s=LOGNORMAL), 1).durations("a")(50)
    assert not np.isin(first, StepTimes(Compute(step_s=LOGNORMAL), 1).durations("b")(50)).any()
    assert not np.isin(first, StepTimes(Compute(step_s=LOGNORMAL), 2).durations("a")(50)).any()


def test_the_steps_of_a_peer_have_the_stated_distribution():
    drawn = StepTimes(Compute(step_s=LOGNORMAL), 1).durations("a")(20_000)
    assert abs(np.log(drawn / 0.1).mean()) < 5 * 0.3 / math.sqrt(20_000)
    assert np.log(drawn).std() == pytest.approx(0.3, rel=0.03)


def test_a_duration_drawn_once_for_a_peer_stays():
    times = StepTimes(Compute(step_s=LOGNORMAL, per="peer"), 1)
    each = [times.durations(str(peer))(3) for peer in range(2_000)]
    assert all(np.ptp(drawn) == 0 for drawn in each)
    assert np.log([drawn[0] for drawn in each]).std() == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("step_s", [Distribution.constant(0.1), LOGNORMAL], ids=str)
def test_the_stated_share_is_slower_in_all_its_steps(step_s):
    plain = StepTimes(Compute(step_s=step_s), 1)
    slow = StepTimes(Compute(step_s=step_s, stragglers=Stragglers(share=0.3, slowdown=4)), 1)
    ratios = np.array([slow.durations(str(peer))(20) / plain.durations(str(peer))(20) for peer in range(2_000)])
    assert np.ptp(ratios, axis=1).max() < 1e-9
    share = (ratios[:, 0] > 2).mean()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 2_000)
    assert np.unique(ratios[:, 0].round(9)).tolist() == [1.0, 4.0]


def test_time_passes_in_every_step():
    drawn = StepTimes(Compute(step_s=Distribution.weibull(0.1, 1e-3)), 1).durations("a")(10_000)
    assert drawn.min() > 0
