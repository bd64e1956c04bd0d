"""Idle links are closed as nodes close them, and messages sent into a long cut do not delay later ones."""

import pytest

from gossip.effects import MemberState
from gossip.wire.messages import Busy
from sim.engine.links import IDLE_CHECK_S
from tests.harness.configs import tuned
from tests.sim.engine.swarms import are_linked, run_while, swarm_of, vector

LATENCY_S = 0.025
NEVER_S = 100_000.0
SILENT = dict.fromkeys(
    ("probe_period_s", "probe_timeout_max_s", "heal_period_s", "push_pull_period_s"), NEVER_S
)  # no other messages go over a link


def linked_swarm(peers, congestion="cubic", **config):
    config = tuned(**{"mix_every_steps": 1_000_000} | config)
    swarm = swarm_of(peers, config=config, latency_s=LATENCY_S, congestion=congestion)
    swarm.run_until(5.0)
    assert all(are_linked(swarm, 0, index) for index in range(1, peers))
    return swarm


def heard(swarm):
    """Record (when, receiver, session) of each Busy from now on."""
    seen, deliver = [], swarm.links.deliver

    def delivered(host, sender, message):
        if isinstance(message, Busy):
            seen.append((swarm.now, host.index, message.session))
        else:
            deliver(host, sender, message)

    swarm.links.deliver = delivered
    return seen


def states(swarm):
    return {host.peer.membership.state(other.id) for host in swarm.hosts for other in swarm.hosts if other is not host}


def test_a_link_that_nothing_used_for_idle_s_is_closed_on_both_sides_and_nobody_is_doubted():
    swarm = linked_swarm(2, **SILENT, idle_s=60.0)
    used = max(line.last_at for host in swarm.hosts for line in host.lines.values())
    swarm.run_until(used + 60.0)
    assert are_linked(swarm)
    run_while(swarm, lambda: any(host.links for host in swarm.hosts), IDLE_CHECK_S + LATENCY_S)
    assert not any(host.peer.linked_peers or host.lines for host in swarm.hosts)
    assert states(swarm) == {MemberState.ALIVE}


def test_a_link_that_either_side_uses_stays():
    """One side only sends and the other only receives: the link is in use for both."""
    swarm = linked_swarm(2, **SILENT, idle_s=10.0)
    seen, (host, to) = heard(swarm), swarm.hosts
    for number in range(20):
        swarm.links.post(host, to, Busy(number))
        swarm.run_until(swarm.now + 8.0)
        assert are_linked(swarm)
    assert len(seen) == 20


def test_after_a_cut_of_minutes_a_message_goes_over_a_new_link_and_waits_for_nothing():
    """Before, it waited behind what the cut had kept, for TCP's next try: 13 s after this cut of 4 minutes."""
    swarm = linked_swarm(2, **SILENT, idle_s=60.0)
    seen, (host, to) = heard(swarm), swarm.hosts
    swarm.partition([[0], [1]])
    for sender, receiver in ((host, to), (to, host)):
        swarm.links.post(sender, receiver, Busy(1))
    swarm.run_until(swarm.now + 240.0)
    assert not are_linked(swarm)
    swarm.heal()
    healed = swarm.now
    record = host.peer.membership.record(to.id)
    assert record is not None
    assert record.address is not None
    swarm.links.dials.open(host, record.address, to.id)
    swarm.run_until(healed + 0.2)
    assert are_linked(swarm)
    for sender, receiver in ((host, to), (to, host)):
        swarm.links.post(sender, receiver, Busy(2))
    swarm.run_until(healed + 300.0)
    # Messages that the cut had kept are refused on arrival, and end no newer link.
    assert [(receiver, session) for _, receiver, session in seen] == [(1, 2), (0, 2)]
    assert [when - healed for when, *_ in seen] == pytest.approx([0.2 + LATENCY_S] * 2)


def test_who_has_max_links_closes_the_one_that_rested_longest_for_another():
    swarm = linked_swarm(4, **SILENT, idle_s=NEVER_S, max_links=3)
    seen = heard(swarm)
    first = swarm.hosts[0]
    for index in (3, 1, 2):
        swarm.links.post(first, swarm.hosts[index], Busy(index))
        swarm.run_until(swarm.now + 1.0)
    assert len(seen) == 3
    closed, retire = [], swarm.links.close_idle
    swarm.links.close_idle = lambda host, partner: (
        closed.append(swarm.links.by_id[partner].index),
        retire(host, partner),
    )
    swarm.add_peer(vector(4), seeds=[0])
    run_while(swarm, lambda: not are_linked(swarm, 0, 4))
    assert closed == [3]
    assert len(first.links) == 3
    swarm.run_until(swarm.now + 1.0)
    assert states(swarm) == {MemberState.ALIVE}


def test_where_there_is_no_tcp_links_last():
    swarm = linked_swarm(2, congestion=None, **SILENT, idle_s=10.0)
    swarm.run_until(300.0)
    assert are_linked(swarm)


@pytest.mark.slow
def test_a_swarm_that_was_cut_for_minutes_is_whole_within_ten_seconds_and_its_exchanges_succeed():
    """Before, 102 sides of exchanges of these 24 peers failed in the half minute after the cut, against 370 mixes."""
    swarm = linked_swarm(24, mix_every_steps=20)
    swarm.run_until(90.0)
    swarm.partition([list(range(12))])
    swarm.run_until(330.0)
    assert MemberState.DEAD in states(swarm)
    failed, mixes = sum(host.peer.exchanges.failures for host in swarm.hosts), swarm.mixes
    swarm.heal()
    swarm.run_until(340.0)
    assert states(swarm) == {MemberState.ALIVE}
    swarm.run_until(360.0)
    assert sum(host.peer.exchanges.failures for host in swarm.hosts) - failed < 0.02 * (swarm.mixes - mixes)
