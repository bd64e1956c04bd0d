"""Group means of simulated peers: the bytes they send, and the effect of lost streams."""

import gc
import math

import numpy as np
import pytest

from gossip.arithmetic.group_mean import member_slices
from gossip.codecs import get_codec
from gossip.config import Config
from sim.engine.carrier import StreamCallbacks
from sim.engine.swarm import Swarm
from sim.scenario.adversaries import Attacker, AttackersSpec
from sim.simulation import no_garbage_collection
from sim.world.network import NetworkModel
from tests.sim.oracles import STEP_S, begin_mix, exchange, told_to_mix
from tests.sim.scenarios import played, small

ELEMENTS = 5_000  # 20 blocks, the last one short


def whole_numbers(n: int, seed: int = 1) -> np.ndarray:
    return (240 * np.random.default_rng(seed).integers(-50, 51, (n, ELEMENTS))).astype(np.float32)


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_each_member_sends_its_vector_about_twice_however_large_the_group(size: int) -> None:
    matrix = whole_numbers(size)
    swarm = told_to_mix(matrix, 1, mixing="group", group_size=size)
    exchange(swarm, 0)
    assert swarm.mixes == size
    assert swarm.links.carrier.flows.sent_bytes == 2 * (size - 1) * 4 * ELEMENTS  # 2 (g-1)/g of a vector each


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_with_a_codec_it_is_as_many_fewer_bytes_and_all_come_to_one_vector(codec: str) -> None:
    matrix = np.random.default_rng(1).normal(size=(4, ELEMENTS)).astype(np.float32)
    mean, before = matrix.mean(0, dtype=np.float64), matrix.copy()
    swarm = told_to_mix(matrix, 1, mixing="group", codec=codec)
    exchange(swarm, 0)
    code = get_codec(codec)
    assert swarm.links.carrier.flows.sent_bytes == 6 * sum(
        code.encoded_bytes(c.stop - c.start) for c in member_slices(ELEMENTS, 4)
    )
    # x + (Q(mean) - Q(x)) equals one vector up to what x lost, and the mean errs by the losses of five.
    error = code.error_bound(before[0]).max() * 1.5
    assert np.ptp(matrix, axis=0).max() <= 2 * error
    assert np.abs(matrix.mean(0) - mean).max() <= 2 * error


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.6])
def test_a_member_that_dies_in_the_middle_leaves_the_others_as_they_were_or_all_mixed(after_s: float) -> None:
    matrix = whole_numbers(4)
    swarm = told_to_mix(matrix, 1, NetworkModel(latency_s=0.01, rate_bytes_s=1e5), mixing="group")
    begin_mix(swarm, swarm.hosts[0])
    before = matrix.copy()
    swarm.run_until(swarm.now + after_s)
    swarm.kill(2)
    swarm.run_until(swarm.now + 60.0)
    moved = [not np.array_equal(matrix[k], before[k]) for k in (0, 1, 3)]
    assert len(set(moved)) == 1
    assert all(not one.peer.exchanges.table for one in swarm.alive())


@pytest.mark.parametrize("kind", ["nan", "scaled"])
def test_values_that_no_peer_may_take_are_left_out_and_counted(kind: str) -> None:
    matrix = np.random.default_rng(1).normal(size=(3, ELEMENTS)).astype(np.float32)
    swarm = told_to_mix(matrix, 1, mixing="group")
    liar = Attacker(AttackersSpec(share=0.25, kind=kind, scale=None if kind == "nan" else 1e6), 1, "liar", 4)
    swarm.add_peer(np.zeros(ELEMENTS, np.float32) + 0.5, founder=True, step_s=STEP_S, attacker=liar)
    before = matrix.copy()
    exchange(swarm, 0)
    swarm.run_until(swarm.now + 5.0)
    owned = member_slices(ELEMENTS, 4)[sorted(host.id for host in swarm.hosts).index(swarm.hosts[3].id)]
    rest = np.delete(np.arange(ELEMENTS), np.r_[owned])
    assert np.array_equal(matrix[:, owned], before[:, owned]), "its mean is no better than its values"
    assert np.allclose(matrix[:, rest], before[:, rest].mean(0), atol=1e-5), "without its values the others mix"
    counted = swarm.hosts[0].peer.exchanges.refusals.counts
    assert {(partner, code) for partner, code in counted} == {
        (swarm.hosts[3].id, "not-finite" if kind == "nan" else "norm")
    }
    assert swarm.hosts[0].peer.partners.back_off.is_in_back_off(swarm.hosts[3].id, swarm.now)
    exchange(swarm, 0)
    assert np.allclose(matrix[:, owned], before[:, owned].mean(0), atol=1e-5), "nor do they ask it again"


@pytest.mark.parametrize(
    ("latency_s", "rate_bytes_s"),
    [(0.01, math.inf), (0.4, math.inf), (0.4, 125_000.0)],
    ids=["near", "far", "far at 1 Mbit/s"],
)
def test_members_that_were_strangers_have_the_time_to_dial_each_other_and_to_stream(
    latency_s: float, rate_bytes_s: float
) -> None:
    """Before, streams had one second more than their bytes take, and 0.4 s of latency ended every third group."""
    swarm = Swarm(1, NetworkModel(latency_s=latency_s, rate_bytes_s=rate_bytes_s), Config(mixing="group"))
    for row in whole_numbers(6):
        swarm.add_peer(row[:300].copy(), founder=True, step_s=STEP_S)
    swarm.introduce()
    swarm.run_until(60.0)
    assert sum(host.peer.exchanges.done_count for host in swarm.hosts) > 30
    assert [host.peer.exchanges.failures_by_reason.get("deadline", 0) for host in swarm.hosts] == [0] * 6


@pytest.mark.parametrize("mixing", ["pair", "group", "push-sum"])
def test_streams_that_have_ended_leave_nothing_in_memory(mixing):
    """Sixteen peers in groups kept 14 MB a step, since nothing collects cycles while a simulation runs."""
    gc.collect()
    with no_garbage_collection():
        run = played(small(peers=8, gossip=Config(mix_every_steps=1, mixing=mixing), duration_s=20.0))
        assert run.swarm.mixes > 100
        left = sum(isinstance(kept, StreamCallbacks) for kept in gc.get_objects())
    assert left <= 8 * 7 * 4, "the streams in progress at the end"
