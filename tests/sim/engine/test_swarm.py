"""The simulator's driver: exact in an exchange's arithmetic, in joins, and where peers die, leave or diverge."""

from collections.abc import Callable

import numpy as np
import pytest

from gossip.config import Config
from gossip.effects import MemberState
from gossip.initiator import LAST_MIXES
from sim.engine.host import Host
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel
from tests.harness.configs import tuned
from tests.sim.engine.swarms import ELEMENTS, run_while, swarm_of, vector

Floats = np.ndarray


def kicked(at_step: int) -> Callable[[int, Floats, int], None]:
    """Return an ``on_step`` that moves each peer by a different step of size 1 at this step of its life."""

    def on_step(index: int, values: Floats, steps: int) -> None:
        if steps == at_step:
            values += vector(1_000 + index)

    return on_step


def spread(swarm: Swarm) -> float:
    return float(np.ptp([host.vector for host in swarm.alive()], axis=0).max())


# -- determinism -----------------------------------------------------------------------------------------------------
def test_another_peer_changes_nobodys_randomness() -> None:
    """The fourth peer cannot be reached, as if it did not exist for the others. Lost packets are drawn too."""
    few, many = (swarm_of(peers, latency_s=0.02, loss=0.05, congestion="cubic") for peers in (3, 4))
    many.partition([[0, 1, 2], [3]])
    for swarm in (few, many):
        swarm.run_until(10.0)
    for one, other in zip(few.hosts, many.hosts, strict=False):
        assert one.id == other.id
        assert one.rng.getstate() == other.rng.getstate()
        assert one.peer.rng.getstate() == other.peer.rng.getstate()
        assert np.array_equal(one.vector, other.vector)


def test_a_peers_name_and_not_its_place_makes_its_randomness() -> None:
    first, second = Swarm(1, NetworkModel(), Config()), Swarm(1, NetworkModel(), Config())
    a = first.add_peer(vector(0), name="a")
    second.add_peer(vector(0), name="b")
    moved = second.add_peer(vector(0), name="a")
    assert first.hosts[a].id == second.hosts[moved].id
    assert first.hosts[a].peer.rng.getstate() == second.hosts[moved].peer.rng.getstate()


# -- averaging -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_averaging_ends_at_the_mean(codec: str) -> None:
    swarm = swarm_of(8, config=Config(codec=codec), on_step=kicked(30))
    swarm.run_until(40.0)
    # All began with the weights of the first: the mean is these plus the mean of what each added.
    mean = vector(0) + np.mean([vector(1_000 + index) for index in range(8)], axis=0)
    # Exchanges conserve the mean to rounding, and contract all differences: by half each, hundreds of times.
    tolerance = 1e-5 if codec == "fp32" else 4 * 2.0**-11
    together = np.mean([host.vector + waiting(host) for host in swarm.hosts], axis=0)
    assert together == pytest.approx(mean, abs=1e-5)
    for host in swarm.hosts:
        assert host.vector == pytest.approx(mean, abs=tolerance)


def waiting(host: Host) -> Floats:
    """Return the updates that are agreed on and wait for the next boundary."""
    return sum((update.vector.array for update in host.boundary.arrived_updates), np.zeros(ELEMENTS))


def test_a_transfer_takes_latency_and_bytes_over_rate() -> None:
    seconds = ELEMENTS * 4 / 100.0  # each stream at 100 bytes a second
    swarm = swarm_of(2, latency_s=0.02, rate_bytes_s=100.0)
    swarm.run_until(30.0)
    durations = [d for host in swarm.hosts for past in host.peer.exchanges.durations.durations_s.values() for d in past]
    assert durations
    # Durations count from the agreed start. The partner's stream may precede ours then, or follow a latency later.
    assert min(durations) >= seconds + 0.02 - 1e-9
    assert max(durations) <= seconds + 4 * 0.02 + 1e-9


# -- joining ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ideal", [False, True], ids=["protocol", "ideal"])
def test_a_donor_that_dies_is_replaced(ideal: bool) -> None:
    swarm = swarm_of(4, ideal=ideal, rate_bytes_s=200.0)
    swarm.run_until(5.0)
    newcomer = swarm.hosts[swarm.add_peer(vector(99), seeds=[] if ideal else [0])]

    def awaited():
        return [transfer.awaited for transfer in newcomer.averager.transfers.values() if transfer.awaited]

    run_while(swarm, lambda: not awaited())
    donor = awaited()[0].partner
    swarm.kill(swarm.links.by_id[donor].index)
    run_while(swarm, lambda: not newcomer.peer.view.ready, limit_s=10.0)
    assert newcomer.peer.local.run_id == swarm.alive()[0].peer.local.run_id
    assert not np.array_equal(newcomer.vector, vector(99))
    assert ideal or np.array_equal(newcomer.vector, vector(0)), "all others hold the first one's weights"


# -- faults ----------------------------------------------------------------------------------------------------------
def test_a_crash_costs_each_other_peer_one_exchange_and_one_offer_and_is_known_to_all() -> None:
    swarm = swarm_of(8, on_step=kicked(20))
    swarm.run_until(10.0)
    dead = swarm.hosts[0]  # the seed
    swarm.kill(0)
    before = {host.index: host.peer.exchanges.done_count for host in swarm.alive()}
    swarm.run_until(40.0)
    for host in swarm.alive():
        assert host.peer.membership.state(dead.id) is MemberState.DEAD
        # The exchange in progress, and at most one offer before the death is known.
        failed = host.peer.exchanges.failures_by_reason
        assert sum(failed.values()) - failed.get("unreached", 0) <= 1
        assert failed.get("unreached", 0) <= 1
        assert host.peer.exchanges.done_count > before[host.index] + 10
        assert host.peer.exchanges.table.keys() == host.averager.transfers.keys()
    assert spread(swarm) < 1e-4


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_a_peer_that_leaves_hands_over_what_it_has_learned(grace_s: float) -> None:
    learned = vector(99)

    def on_step(index: int, values: Floats, steps: int) -> None:
        if (index, steps) == (2, 57):
            values += learned

    plain = {"outer_momentum": 0.0, "outer_rate": 1.0, "correction": 0.0, "codec": "fp32"}
    config = tuned(mix_every_steps=1_000, grace_s=grace_s, **plain)
    swarm = swarm_of(5, config=config, on_step=on_step)
    swarm.run_until(10.0)
    leaver = swarm.hosts[2]
    before = np.sum([host.vector for host in swarm.hosts], axis=0)
    swarm.leave(2)
    assert len(swarm.alive()) == 4
    swarm.run_until(swarm.now + 2.0)
    assert leaver.gone
    kept = np.sum([host.vector for host in swarm.hosts], axis=0) - before
    assert kept == pytest.approx(np.zeros(ELEMENTS), abs=1e-3), "mixes conserve the sum"
    taken = sum(host.peer.exchanges.done_count for host in swarm.alive())
    assert taken == (LAST_MIXES if grace_s else 0)


def test_a_peer_that_leaves_and_comes_again_at_once_is_ended_first() -> None:
    swarm = swarm_of(3)
    swarm.run_until(10.0)
    swarm.leave(2)
    assert not swarm.hosts[2].gone
    swarm.restart(2, [0])
    swarm.run_until(40.0)
    assert {len(host.peer.membership.alive()) for host in swarm.alive()} == {2}


def test_a_newcomer_need_not_wait_for_the_end_of_its_donors_long_steps() -> None:
    """It gets what its donors held at the boundary before."""

    def on_step(index: int, vector: Floats, step: int) -> None:
        vector += 1.0

    swarm = Swarm(3, NetworkModel(), Config(mix_every_steps=1000), on_step)
    for _ in range(3):
        swarm.add_peer(np.zeros(2048, np.float32), founder=True, step_s=600.0)
    swarm.introduce()
    swarm.run_until(700.0)
    newcomer = swarm.hosts[swarm.add_peer(np.full(2048, -5.0, np.float32), [0], step_s=0.1)]
    swarm.run_until(710.0)
    assert newcomer.peer.view.ready
    assert newcomer.peer.local.run_id == swarm.hosts[0].peer.local.run_id
    assert newcomer.steps > 0
    assert set(newcomer.vector - newcomer.steps) <= {float(host.vector[0]) for host in swarm.hosts[:3]}


# -- weights that are no numbers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("mixing", ["pair", "push-sum", "group"])
@pytest.mark.parametrize("ideal", [False, True], ids=["protocol", "ideal"])
def test_one_whose_weights_are_no_numbers_spoils_nobody_and_takes_the_swarms_again(mixing: str, ideal: bool) -> None:
    def on_step(index: int, values: Floats, steps: int) -> None:
        if index == 2 and steps == 50:
            values[3] = np.nan

    config = Config(mixing=mixing, mix_every_steps=4, filter="none")
    swarm = Swarm(5, NetworkModel(), config, on_step, ideal=ideal)
    for index in range(6):
        swarm.add_peer(np.ones(ELEMENTS, np.float32), founder=True, name=str(index))
    swarm.introduce()
    swarm.run_until(4.9)
    spoiled = swarm.hosts[2].peer
    assert spoiled.view.ready
    seen = False
    while swarm.now < 20.0:
        swarm.run_until(swarm.now + 0.1)
        seen = seen or not spoiled.local.sound
        assert all(np.isfinite(host.vector).all() for host in swarm.hosts if host.index != 2)
    assert seen
    assert spoiled.view.ready
    assert np.isfinite(swarm.hosts[2].vector).all()
    assert not any("not-finite" in str(host.peer.exchanges.refusals.counts) for host in swarm.hosts), "nobody saw it"
    done = spoiled.exchanges.done_count
    swarm.run_until(25.0)
    assert spoiled.exchanges.done_count > done


def test_a_loop_that_mends_its_weights_by_itself_mixes_on() -> None:
    def on_step(index: int, values: Floats, steps: int) -> None:
        if index == 0 and steps in (50, 60):
            values[3] = np.nan if steps == 50 else 1.0

    swarm = Swarm(5, NetworkModel(), Config(mix_every_steps=4, merge="never"), on_step)
    swarm.add_peer(np.ones(ELEMENTS, np.float32), founder=True)
    swarm.add_peer(np.ones(ELEMENTS, np.float32), founder=True)
    swarm.introduce()
    swarm.kill(1)
    newcomers = [swarm.add_peer(np.ones(ELEMENTS, np.float32), [0]) for _ in range(2)]
    first, seen = swarm.hosts[0].peer, False
    while swarm.now < 30.0:
        swarm.run_until(swarm.now + 0.1)
        seen = seen or not first.local.sound
    assert seen
    assert first.view.ready
    assert not first.joining.donors, "by itself, and not with the weights of others"
    assert all(np.isfinite(host.vector).all() for host in swarm.alive())
    assert all(swarm.hosts[index].peer.view.ready for index in newcomers)
