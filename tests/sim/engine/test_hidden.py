"""Peers behind routers meet by punches and through relays, which pass a bounded number of bytes on."""

import math

import pytest

from gossip.config import Config
from gossip.config.internal import Internal
from gossip.discovery.relay_rate import LEAST_RATE
from sim.engine.events import Events
from sim.engine.flows import Flows
from sim.engine.swarm import Swarm
from sim.scenario.conditions import NatSpec
from sim.scenario.scenario import MembershipSpec, Scenario
from sim.world.nat import Nat
from sim.world.network import NetworkModel
from tests.sim.engine.swarms import are_linked, run_while, vector
from tests.sim.scenarios import AVERAGING, digest, small

PUNCHABLE, HARD = NatSpec(public=0.5, punchable=0.5, punch_success=1.0), NatSpec(public=0.5, hard=0.5)


def homes(spec: NatSpec, max_tunnels: int = 2) -> Swarm:
    """Return two dialable peers, of which the second has left, and two behind routers that have joined."""
    config = Config(mix_every_steps=2, internal=Internal(max_tunnels=max_tunnels))
    swarm = Swarm(1, NetworkModel(congestion="cubic", nat=Nat(spec, 4, 1)), config)
    for index in range(4):
        swarm.add_peer(vector(index), seeds=[0] if index else [])
    swarm.kill(1)
    run_while(swarm, lambda: not all(host.peer.view.ready for host in swarm.alive()), slice_s=1.0)
    assert not are_linked(swarm, 2, 3)
    return swarm


def mixes_after(swarm: Swarm, seconds: float) -> int:
    before = swarm.mixes
    swarm.run_until(swarm.now + seconds)
    return swarm.mixes - before


def test_punchable_peers_mix_directly_and_go_on_without_their_contact():
    swarm = homes(PUNCHABLE)
    run_while(swarm, lambda: not are_linked(swarm, 2, 3), slice_s=0.1)
    assert not swarm.links.carrier.tunnels
    swarm.kill(0)
    assert mixes_after(swarm, 30.0) > 50
    assert swarm.counts().relayed_bytes == 0


def test_hard_peers_mix_through_a_relay_until_it_dies():
    swarm = homes(HARD)
    run_while(swarm, lambda: not are_linked(swarm, 2, 3), slice_s=0.1)
    carrier, relay = swarm.links.carrier, swarm.hosts[0].peer
    assert carrier.latency(2, 3) == 2 * carrier.network.latency(2, 3)
    swarm.run_until(swarm.now + 10.0)
    assert swarm.counts().relayed_bytes > 0
    assert [tunnel.is_joined for tunnel in relay.meetings.tunnels.values()] == [True]
    swarm.kill(0)
    swarm.run_until(swarm.now + 5.0)
    assert not carrier.tunnels
    assert mixes_after(swarm, 30.0) == 0


def test_a_tunnel_that_ends_makes_room_for_another():
    swarm = homes(HARD)
    run_while(swarm, lambda: not are_linked(swarm, 2, 3), slice_s=0.1)
    swarm.links.close(swarm.hosts[2], swarm.hosts[3].id)
    swarm.run_until(swarm.now + 0.5)
    assert not swarm.links.carrier.tunnels
    assert not swarm.hosts[0].peer.meetings.tunnels
    run_while(swarm, lambda: not are_linked(swarm, 2, 3), slice_s=0.1)


@pytest.mark.parametrize("spec", [NatSpec(public=0.5, punchable=0.5, punch_success=0.0), HARD], ids=["unlucky", "hard"])
def test_without_a_punch_and_a_relay_they_never_meet(spec):
    swarm = homes(spec, max_tunnels=0)
    swarm.run_until(swarm.now + 60.0)
    assert not are_linked(swarm, 2, 3)
    assert swarm.hosts[2].peer.meetings.failures
    swarm.kill(0)
    swarm.run_until(swarm.now + 5.0)
    assert mixes_after(swarm, 30.0) == 0


@pytest.mark.parametrize(
    ("network", "own_rate", "rate"),
    [
        (NetworkModel(rate_bytes_s=1e9), 0.0, LEAST_RATE),
        (NetworkModel(rate_bytes_s=math.inf), 0.0, LEAST_RATE),
        (NetworkModel(rate_bytes_s=2e6, down_rate_bytes_s=8e5), 0.0, 8e5),
        (NetworkModel(rate_bytes_s=5e7), 4e7, 1e7),
    ],
    ids=["the least rate", "unlimited peers", "the relay's own link", "a quarter of its own rate"],
)
def test_streams_in_tunnels_share_what_their_relay_may_pass_on(network, own_rate, rate):
    events, ended = Events(), []
    flows = Flows(events, network)
    if own_rate:
        flows.start(5, 0, 1e9, lambda: None, ceiling=own_rate)
    for second in (1.0, 2.0):  # The relay's own rate is measured between two streams.
        events.run_until(second)
        flows.start(1, 2, 1, lambda: None, relay=0)
    for sender, receiver in ((1, 2), (3, 4)):
        flows.start(sender, receiver, 2_500_000, lambda: ended.append(events.now), relay=0)
    for tenth in range(21, 100):
        events.run_until(tenth / 10)
        assert sum(flows.relayed_bytes().values()) <= rate * (events.now - 2.0) + 4
    assert ended == pytest.approx([2.0 + 5_000_000 / rate] * 2, abs=1e-3)
    assert flows.relayed_bytes() == {0: 5_000_002}
    own_bytes = round(own_rate * events.now)
    assert flows.sent_bytes == own_bytes + 2 * 5_000_002, "a relay sends the bytes a second time"


def behind_routers(**nat: float) -> Scenario:
    spec, start = NatSpec(public=0.2, punchable=0.6, hard=0.2, **nat), MembershipSpec(start="seed")
    return small(peers=10, duration_s=40.0, task=AVERAGING, network={"nat": spec}, membership=start)


def test_a_seed_gives_one_digest_and_a_pair_keeps_its_draw():
    assert Scenario.from_mapping(behind_routers().to_mapping()) == behind_routers()
    assert digest(behind_routers()) == digest(behind_routers())
    assert digest(behind_routers()) != digest(behind_routers(punch_success=0.0))
    nat = Nat(NatSpec(public=0.1, mapped=0.1, punchable=0.8), 1000, 1)
    punched = [nat.punches(str(low), str(low + 1)) for low in range(200, 999)]
    assert sum(punched) / len(punched) == pytest.approx(0.7, abs=0.05)
    assert punched == [nat.punches(str(low + 1), str(low)) for low in range(200, 999)]
    assert [nat.is_dialable(name) for name in ("0", "199", "200")] == [True, True, False]
