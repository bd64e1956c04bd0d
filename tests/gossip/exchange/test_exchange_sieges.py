"""One attacker against four honest members: how much honest nodes still mix with each other under each attack."""

import dataclasses
import functools
import itertools

import pytest

from gossip.config import Config
from gossip.wire.messages import Accept, Busy, Chunk, Offer
from tests.gossip.exchange.sides import OUTER
from tests.harness.host import Host
from tests.harness.marks import slow
from tests.harness.world import World

PLAIN = Config()
SESSIONS = itertools.count(10**15)


class Siege(World):
    """Four honest nodes, and the attackers that a test adds."""

    def __init__(self, config: Config, seed: int = 7, step_s: float = 0.1) -> None:
        super().__init__(seed, config=config)
        self.honest = self.swarm(4, step_s=step_s)
        self.until(self.agreed, 30.0)

    def mixes(self, seconds: float) -> float:
        """Return the mixes of honest nodes with each other in so many seconds, for each node and interval."""
        before, steps = self.mixes_with(self.honest), self.steps
        self.run(seconds)
        return (self.mixes_with(self.honest) - before) * self.config.interval_steps / (self.steps - steps)

    def mixes_with(self, partners: list[Host]) -> int:
        """Return how often honest nodes have mixed with these."""
        ids = {node.id for node in partners}
        return sum(partner in ids for node in self.honest for _, _, partner in node.mixes)

    @property
    def steps(self) -> int:
        return sum(node.steps for node in self.honest)

    def attacker(self, **how):
        one = self.start(0, **how)
        self.until(lambda: all(one.id in node.links for node in self.honest), 30.0)
        return one

    def attack(self, kind: type[Host]) -> Host:
        """Add an attacker of this kind, which has the weights and whose own Peer begins no mixes."""
        self.config, config = dataclasses.replace(self.config, mix_every_steps=10**6), self.config
        liar = self.attacker(kind=kind)
        self.config = config
        self.until(lambda: liar.peer.view.ready, 30.0)
        return liar


class Silent(Host):
    """A host that answers no offer, and makes none."""

    def received(self, link, sender, message):
        if not isinstance(message, Offer):
            super().received(link, sender, message)


class Busybody(Host):
    """A host that answers BUSY to every offer."""

    def received(self, link, sender, message):
        if isinstance(message, Offer):
            self.send(sender.id, Busy(message.session))
        else:
            super().received(link, sender, message)


class Stalling(Host):
    """A host that takes every offer, makes its own, and streams nothing."""

    def received(self, link, sender, message):
        if isinstance(message, Offer):
            self.send(sender.id, Accept(message.session, message.version, message.weight, message.codec))
        elif not isinstance(message, Accept | Chunk):
            super().received(link, sender, message)

    def offer(self, nodes, every_s):
        for node in nodes:
            if node.id not in self.links:
                self.world.network.dial(self, node.peer.membership.me.address, node.id)
                continue
            local = node.peer.local
            offer = Offer(next(SESSIONS), local.fingerprint, local.run_id, local.version, 0.5, "fp32")
            self.send(node.id, offer)
        self.later(every_s, self.offer, nodes, every_s)


@functools.cache
def without_attack(config, seconds, **how):
    """Return how often honest nodes mix in so many seconds without an attack."""
    calm = Siege(config, **how)
    calm.run(10.0)
    return calm.mixes(seconds)


@pytest.mark.parametrize("config", [OUTER, PLAIN], ids=["outer momentum", "plain"])
def test_one_that_answers_no_offer_leaves_seven_eighths_of_honest_mixing(config):
    """Before, each node that asked the silent one waited for 5 s, and answered BUSY to all others meanwhile."""
    siege = Siege(config, step_s=0.03)
    siege.run(10.0)
    siege.attack(Silent)
    assert siege.mixes(20.0) > 0.875 * without_attack(config, 20.0, step_s=0.03)
    assert sum(node.peer.exchanges.failures_by_reason.get("unanswered", 0) for node in siege.honest) >= 4, (
        "all have asked it"
    )


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(OUTER, Stalling, id="outer momentum-Stalling"),
        pytest.param(PLAIN, Busybody, id="plain-Busybody"),
        slow(OUTER, Busybody, id="outer momentum-Busybody"),
        slow(PLAIN, Stalling, id="plain-Stalling"),
    ],
)
def test_a_crowd_of_strangers_leaves_seven_eighths_of_honest_mixing(config, kind):
    """Identities cost nothing, so all new ones count as one. Before, stalling ones left 0.79 and 0.28."""
    siege = Siege(config, step_s=0.03)
    siege.run(10.0)
    crowd = [siege.attack(kind) for _ in range(20)]
    if kind is Stalling:
        for liar in crowd:
            liar.offer(siege.honest, every_s=1.0)
    assert siege.mixes(20.0) > 0.875 * without_attack(config, 20.0, step_s=0.03)


@pytest.mark.parametrize("config", [slow(OUTER, id="outer momentum"), pytest.param(PLAIN, id="plain")])
def test_offers_that_are_never_completed_leave_nine_tenths_of_honest_mixing(config):
    calm, siege = Siege(config).mixes(60.0), Siege(config)
    siege.attack(Stalling).offer(siege.honest, every_s=0.1)
    assert siege.mixes(60.0) > 0.9 * calm


@pytest.mark.parametrize(
    ("config", "share"), [slow(OUTER, 0.95, id="outer momentum"), pytest.param(PLAIN, 0.85, id="plain")]
)
def test_one_that_mixes_all_the_time_is_nobodys_only_partner(config, share):
    """The member completes every exchange and always wants another, but honest nodes still choose their partners.

    With plain means it takes their offers during its own exchanges, and so more of them than a usual member.
    """
    calm, siege = Siege(config), Siege(config)
    calm.attacker()  # the calm swarm has a fifth member too, which a quarter of the honest choose as well
    siege.config = dataclasses.replace(config, mix_every_steps=1)
    greedy = siege.attacker(step_s=0.02)
    siege.config = config
    before, steps = siege.mixes_with([greedy]), siege.steps
    assert siege.mixes(60.0) > share * calm.mixes(60.0)
    intervals = (siege.steps - steps) / config.interval_steps
    assert siege.mixes_with([greedy]) - before <= 2.2 * intervals, "twice an interval and no more"
