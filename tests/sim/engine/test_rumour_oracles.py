"""How a rumour spreads, against the whole membership protocol telling one (see oracles for the bounds)."""

import math

import numpy as np
import pytest

from gossip.ids import PeerId
from gossip.membership.dissemination import retransmits
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel
from tests.harness.configs import tuned
from tests.harness.marks import slow
from tests.sim.oracles import NEVER_S, SEED, Measured, holds


class Telling:
    """The membership protocol without training, probes or push-pull, which tells one rumour after another.

    All members hold links to all others, and none dials. Messages take half a second.
    """

    def __init__(self, n: int, seed: int, fanout: int) -> None:
        config = tuned(
            mix_every_steps=None, mix_every_s=NEVER_S, boundary_patience_s=NEVER_S, probe_period_s=NEVER_S,
            push_pull_period_s=NEVER_S, heal_period_s=NEVER_S, gossip_fanout=fanout,
        )  # fmt: skip
        self.period_s, self.rng = config.internal.gossip_period_s, np.random.default_rng(seed)
        self.swarm = Swarm(seed, NetworkModel(latency_s=0.5, rate_bytes_s=math.inf), config)
        for _ in range(n):
            self.swarm.add_peer(np.zeros(1, np.float32), founder=True, step_s=NEVER_S)
        self.swarm.introduce()
        for host in self.swarm.hosts:
            host.links.update(dict.fromkeys(other.id for other in self.swarm.hosts if other is not host))
        self.told = 0
        self.swarm.run_until(30.0)  # updates about the beginning have spread

    def unaware(self, rounds: int) -> list[int]:
        """Change a random peer's record; return how many lack the new one in the middle of round 0, 1 ..."""
        swarm, began_s = self.swarm, self.swarm.now
        source = swarm.hosts[int(self.rng.integers(len(swarm.hosts)))]
        self.told += 1
        source.peer.membership.update_me(began_s, homes=(PeerId(self.told.to_bytes(16, "big")),))
        swarm.arm_timer(source)
        news, counts = source.peer.membership.me, list[int]()
        for number in range(rounds):
            swarm.run_until(began_s + (number + 0.5) * self.period_s)
            views = (host.peer.membership.record(source.id) for host in swarm.hosts if host is not source)
            counts.append(sum(record != news for record in views))
        swarm.run_until(began_s + (rounds + retransmits(len(swarm.hosts)) + 1) * self.period_s)  # no more is told
        return counts


def plain_push(n: int, fanout: int, rng: np.random.Generator) -> float:
    """Return the rounds until all know, if each that knows tells ``fanout`` a round; inf when it dies before."""
    frames = -(-retransmits(n) // fanout)  # each member passes it on so often
    since = np.full(n, np.inf)
    since[0], number = 0, 0
    while np.isinf(since).any():
        telling = np.flatnonzero((since <= number) & (number < since + frames))
        if not len(telling):
            return math.inf
        others = rng.integers(n - 1, size=(len(telling), fanout))
        others += others >= telling[:, None]
        number += 1
        since[np.unique(others)] = np.minimum(since[np.unique(others)], number)
    return float(number)


def rounds_to_all(seed: int, n: int, fanout: int) -> Measured:
    """Measure the mean rounds until all members know, with messages that take a round.

    Compare 25 rumours with 1,000 runs of plain_push, both without rumours that died before (e^-retransmits of a node at
    most). The error is that of the difference.
    """
    telling, rng = Telling(n, seed, fanout), np.random.default_rng(seed)
    seen = [counts.index(0) for counts in (telling.unaware(28) for _ in range(25)) if 0 in counts]
    plain = [rounds for rounds in (plain_push(n, fanout, rng) for _ in range(1_000)) if rounds < math.inf]
    error = math.sqrt(np.var(seen, ddof=1) / len(seen) + np.var(plain, ddof=1) / len(plain))
    return float(np.mean(seen)), float(np.mean(plain)), error


@pytest.mark.parametrize(("n", "fanout"), [(32, 1), slow(128, 1), (128, 3)])
def test_a_rumour_takes_as_many_rounds_as_push_in_plain_rounds(n: int, fanout: int) -> None:
    seen, plain, error = rounds_to_all(SEED, n, fanout)
    assert holds((seen, plain, error))
    # log_(1+fanout) n + ln n / fanout + O(1): A. Frieze and G. Grimmett 1985, B. Pittel 1987 for fanout 1. Push alone
    # takes about 17 or 18 rounds at 1,024.
    assert 0 < plain - math.log(n, 1 + fanout) - math.log(n) / fanout < 1.5
