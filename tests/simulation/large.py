"""A large random schedule: hundreds of peers, a hundred runs that meet, or hours of virtual time.

Few of the seeds are such, since each takes as long as a hundred small ones.
"""

import math
import random
from collections.abc import Callable
from typing import Any, ClassVar

from gossip.config import Config
from tests.harness.configs import tuned
from tests.harness.world import address_of
from tests.simulation.host import Host, Manners
from tests.simulation.schedule import Schedule

PEER_S = 20_000.0  # peers times seconds with faults in one schedule, about
APART = 0.03  # share of the truth by which a member's progress may differ from it after quiet
UNSEEN_S = 20.0  # time until a death or a newcomer counts everywhere
APART_S, TOGETHER_S = 20.0, 60.0  # time until members on other sides of a cut count no more, and until they count again
CALM_S = 1_200.0  # time within which all is well after the last fault


class Large(Schedule):
    """A schedule that is large in one ``kind``: "crowd" (members), "runs" or "hours"."""

    EXACT: ClassVar[bool] = False
    LOOK_S: ClassVar[float] = 10.0

    def __init__(self, seed: int, *, kind: str | None = None, **how: Any) -> None:
        own = self.own = random.Random(f"large {seed}")
        self.kind = own.choice(["crowd", "crowd", "runs", "hours", "hours"])
        self.kind = kind or self.kind
        super().__init__(seed, **how)
        match self.kind:
            case "crowd":
                count, self.lasts_s = own.choice([30, 60, 60, 100, 200, 300]), 0.0
            case "runs":
                count = own.choice([10, 20, 40, 100])
            case _:
                count = own.choice([3, 5, 8, 12])
        peers, seconds = how.get("peers"), how.get("seconds")
        self.count = min(count, peers) if peers else count
        lasts_s = min(max(PEER_S / count, 60.0), 10_800.0) * (0.5 + own.random())
        self.lasts_s = min(lasts_s, seconds) if seconds else lasts_s
        self.divided = False
        self.fails = own.choice([0.0, 0.0, 0.01])
        self.every_s = own.choice([2.0, 10.0, 60.0]) * self.lasts_s / 600.0
        lies = own.choice([0.0, 0.0, 0.0, 0.1, 0.3, 0.5]) if how.get("liars") is not False else 0.0
        self.liars = int(lies * self.count)
        self.hidden = own.choice([0.0, 0.0, 0.1, 0.5, 0.8])  # the share of peers that cannot be dialled
        self.life_s = own.choice([0.0, 0.0, 200.0, 600.0, 2_000.0])  # the mean of exponential lives, 0: for ever
        self.copies = own.choice([0, 0, 0, 1, 2]) if not self.config.pushes else 0  # processes with another's key
        self.paces = own.choice([0.0, 0.0, 1.0, 2.5])  # powers of two by which steps are faster and slower
        self.joiners = own.choice([0.0, 0.0, 0.5, 1.0])  # the share of newcomers that must join
        self.samples = own.choice([1, 16])  # samples of a step
        self.ends_runs = own.random() < 0.2
        self.world.votes_every_s = 10.0 if self.liars or self.ends_runs else 0.0
        network = self.world.network
        network.latency_s = own.choice([0.001, 0.02, 0.1, 0.4])
        network.slow_streams = own.choice([1.0, 5.0, 20.0])
        longest = self.config.reply_timeout_s / 0.08 / network.slow_streams / 6  # such that a piece arrives in time
        network.slow_pieces = min(own.choice([1.0, 1.0, 30.0, 300.0]), longest)
        network.breaks.clear()
        self.faults = [fault for fault in FAULTS if own.random() < 0.5]
        self.ends_s = math.inf
        self.slack = 0.0  # samples by which progress may be wrong, since members learn of changes late

    def configure(self) -> Config:
        own = self.own
        settings: dict[str, Any] = {
            "mix_every_steps": own.choice([4, 8, 16]),
            "reply_timeout_s": own.choice([5.0, 5.0, 20.0, 400.0]),
            "boundary_patience_s": 10.0,
            "chunk_elements": 1024,
        }
        match own.choice(["pair", "pair", "pair", "group", "push-sum"]):
            case "group":
                settings |= {"mixing": "group", "group_size": own.choice([3, 4, 8]), "filter": "none"}
            case "push-sum":
                settings |= {"mixing": "push-sum", "filter": "none"}
            case _:
                settings |= {"filter": own.choice(["none", "auto"])}
                if own.random() < 0.3:
                    settings |= {"selection": own.choice(["exponential", "ring", "nearest", "grid"])}
                elif own.random() < 0.5:
                    settings |= {"outer_momentum": 0.5, "outer_rate": 0.7}
        return tuned(**settings)

    # -- who is there --------------------------------------------------------------------------------------------
    def manners(self) -> Manners:
        own = self.own
        manners = Manners(own)
        usual = 4.0 if self.kind == "hours" else 0.5
        # Groups wait for their slowest member, and a fast one then trains more than an exchange brings to the others.
        paces = min(self.paces, 0.5) if self.config.mixing == "group" else self.paces
        manners.step_s = usual * 2.0 ** own.uniform(-paces, paces)
        manners.samples = self.samples
        manners.losses = None if own.random() < 0.9 else manners.losses
        manners.learning = 0
        return manners

    def dials(self, number: int) -> bool:
        return number < 3 or self.own.random() >= self.hidden

    def must_join(self) -> bool:
        return self.own.random() < self.joiners

    def lots(self, host: Host) -> None:
        if self.life_s and not host.liar:
            self.world.later(self.own.expovariate(1 / self.life_s), self.dies, host)

    def dies(self, host: Host) -> None:
        """End the host's process; another one starts later."""
        if host.gone or host.left or self.world.now >= self.ends_s or len(self.world.honest) < 3:
            return
        if self.own.random() < 0.2:
            host.leave()
        else:
            host.crash()
        self.unseen(UNSEEN_S, 1 / len(self.world.honest))
        self.world.later(self.own.expovariate(3 / self.life_s), self.comes)

    def comes(self) -> None:
        if self.world.now < self.ends_s:
            self.enter()

    def enter(self, **how: Any) -> Host:
        host = super().enter(**how)
        self.unseen(UNSEEN_S, 1 / max(1, len(self.world.honest)))
        self.lots(host)
        return host

    # -- playing -------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        world, own = self.world, self.own
        if self.kind == "runs":
            for _ in range(self.count):
                self.enter(seedless=True)
            world.run(own.choice([30.0, 120.0]))
            for one, other in zip(world.hosts, world.hosts[1:], strict=False):
                one.peer.seeds.renew((address_of(other.number),), {})
                one.perform([one.peer.seeds.dial(address_of(other.number))])
        else:
            for place in range(self.count):
                self.enter(seedless=not place)
                world.run(own.random() * 0.2)
        for _ in range(self.liars):
            self.enter(liar=True)
        for _ in range(self.copies):
            world.later(own.random() * self.lasts_s, self.copy_one)
        if self.ends_runs:
            world.later(own.random() * self.lasts_s, self.finish_some)

    def finish_some(self) -> None:
        """Let a share of the honest members mark their run as finished."""
        share = self.own.choice([0.1, 0.4, 0.9])
        for host in self.world.honest:
            if host.peer.view.ready and self.own.random() < share:
                self.world.judge.runs.ended_by_owner(host)
                host.call("finish")

    def crash(self) -> None:
        """Crash a host, unless the last fault is past: a crash that a cut planned may be due later.

        A member whose only contact it is would then look for a swarm that no member can name to it.
        """
        if self.world.now < self.ends_s:
            super().crash()

    def cut(self) -> None:
        """Cut the network into three parts, and let some hosts crash meanwhile."""
        network, own = self.world.network, self.own
        if network.sides is None:
            sides = {number: own.randint(0, 2) for number in range(self.numbers)}
            network.part(sides)
            self.world.truth.moved()
            self.world.note("the network parts in three")
            self.unseen(APART_S, 1.0)
            lasts_s = own.choice([0.02, 0.1, 0.3]) * self.lasts_s
            for _ in range(own.choice([0, 1, 5])):
                self.world.later(own.random() * lasts_s, self.crash)
            self.world.later(lasts_s, self.rejoin)

    def rejoin(self) -> None:
        if self.world.network.sides is not None:
            super().rejoin()
            self.unseen(TOGETHER_S, 1.0)

    def slow_links(self) -> None:
        """Make every link slow for a minute."""
        network, usual = self.world.network, self.world.network.latency_s
        network.latency_s = 1.5
        self.world.later(60.0, self.quick_links, usual)

    def quick_links(self, usual: float) -> None:
        self.world.network.latency_s = min(usual, self.world.network.latency_s)

    # -- the end -------------------------------------------------------------------------------------------------
    def unseen(self, seconds: float, share: float) -> None:
        """Allow for this share of the members counting too much or too little, for so many seconds."""
        rate = sum(host.samples / host.step_s for host in self.world.running if host.peer.view.ready and not host.liar)
        self.slack += seconds * share * rate

    def allowed(self, should: float) -> float:
        """Return by how many samples progress may differ. A copied key counts once."""
        copies = sum(host.liar and type(host) is Host for host in self.world.hosts)
        return (APART + copies / self.count) * should + self.slack

    def settle(self) -> None:
        since = self.world.now
        while True:
            self.world.run(20.0)
            self.look()
            wrong = self.unlike()
            if not wrong:
                break
            if self.world.now - since > CALM_S:
                self.world.fail("progress is the truth after quiet", "; ".join(wrong[:6]))
        super().settle()

    def unlike(self) -> list[str]:
        """Return a sentence for each member whose progress is not what it should be."""
        if self.liars:
            return []
        truth = self.world.truth
        found = []
        for host in self.world.honest:
            if host.peer.view.ready and host in truth:
                samples, should = host.peer.local.progress.samples, truth.of(host)
                # Exchanges may have been too few to bring a member all that others trained.
                least, most = sorted((should, truth.expected(host)))
                allowed = self.allowed(should) + truth.unsure
                if not least - allowed <= samples <= most + allowed:
                    found.append(f"{host!r} says {samples} of {should:.0f} ({samples / max(should, 1) - 1:+.1%})")
        return found


FAULTS: tuple[Callable[[Any], None], ...] = (
    Schedule.break_link, Schedule.retire_link, Schedule.spike, Large.cut, Large.cut, Schedule.crash, Schedule.restart,
    Schedule.leave, Schedule.newcomer, Schedule.stop, Schedule.pause, Schedule.congest, Large.slow_links,
    Schedule.settle_one, Schedule.spoil_one,
)  # fmt: skip
