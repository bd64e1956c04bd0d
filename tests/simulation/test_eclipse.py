"""Members that lie about members become hardly more of the partners than they are of the members."""

import pytest

from tests.simulation.eclipse import INTERVAL_S, Eclipse

LIARS, HONEST = 12, 28
SHARE = LIARS / (LIARS + HONEST)


def played(ask_every_s, calm_s, seconds):
    """Return the lying shares of the partners of old members and newcomers, and the old ones' exchanges.

    The newcomers come after ``calm_s``.
    """
    swarm = Eclipse(1, HONEST, LIARS, ask_every_s)
    world, old = swarm.world, list(swarm.world.honest)
    world.run(calm_s)
    numbers = {is_liar: [host.number for host in world.running if host.liar is is_liar] for is_liar in (False, True)}
    new = [
        swarm.enter(seeds=seeds)
        for one, other in zip(numbers[False][:4], numbers[True][:4], strict=True) for seeds in ((one,), (other, one))
    ]  # fmt: skip
    world.run(seconds / 2)
    since = world.now
    world.run(seconds / 2)
    return swarm.lying_share(old, since), swarm.lying_share(new, since), swarm.exchanges(old, since)


def test_lies_about_members_bring_no_partners():
    old, new, _ = played(2 * INTERVAL_S, 40.0, 160.0)
    assert old < 1.25 * SHARE
    assert new < 1.5 * SHARE


@pytest.mark.slow
def test_members_that_ask_all_the_time_are_soon_partners_as_others():
    old, new, exchanges = played(0.5, 200.0, 800.0)
    assert old < 1.5 * SHARE
    assert new < 1.6 * SHARE
    assert exchanges < 1.4
