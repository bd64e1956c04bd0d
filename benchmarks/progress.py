"""Measure the error of the members' sample counts, ``swarm_samples``, with the whole protocol simulated.

    python benchmarks/progress.py [--seed 1] [SCENARIO ...]

Every peer takes steps of 16 samples and mixes every 16 steps. The output is one JSON line for each scenario and each
time of measurement:

``least``, ``median``, ``most``  the members' ``swarm_samples`` less what all members trained, over what they trained
``apart``  the largest number less the smallest, over what they trained
``truth``  what they trained; after a partition or a merge of runs, the mean of the samples behind each member's weights
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gossip.config import Config
from gossip.config.internal import Internal
from gossip.exchange.progress import RunProgress
from gossip.ids import MOST_SAMPLES, Claim
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel

SAMPLES, STEP_S, EVERY = 16, 0.25, 16
JOIN_S = 180.0  # join time of a slow newcomer
LIFE_S, AWAY_S = 600.0, 200.0  # means of exponential lives, and of the times until a replacement starts


class Lying(RunProgress):
    """The progress of a liar: from a certain time on it states the largest number that a message can hold."""

    begins: Callable[[], bool] = staticmethod(lambda: True)

    @property
    def claim(self) -> Claim:
        if self.begins():
            return Claim(*[MOST_SAMPLES] * 4)
        return Claim(self.samples, 0, 1)


Row = dict[str, Any]
"""One line of the output."""


class Watched:
    """A swarm whose trained samples are counted exactly."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.swarm = Swarm(seed, NetworkModel(), Config(mix_every_steps=EVERY, **settings))
        self.trained_by_gone = 0  # samples trained by peers that are gone
        self.liars: set[int] = set()

    def add(
        self, count: int = 1, *, step_s: float = STEP_S, seeds: Iterable[int] = (), founder: bool = False,
        samples: int = SAMPLES,
    ) -> int:  # fmt: skip
        for _ in range(count):
            index = self.swarm.add_peer(
                np.zeros(4, np.float32), seeds, step_s=step_s, samples_per_step=samples, founder=founder
            )  # fmt: skip
        return index

    def undialable(self, index: int) -> None:
        """Remove a peer's address, so that no other peer can dial it from now on."""
        peer = self.swarm.hosts[index].peer
        peer.membership.update_me(self.swarm.now, address=None)

    def lies(self, index: int, begins: float = 0.0) -> None:
        self.liars.add(index)
        progress = self.swarm.hosts[index].peer.local.progress
        progress.__class__ = Lying
        progress.begins = lambda: self.swarm.now >= begins

    def kill(self, index: int) -> None:
        host = self.swarm.hosts[index]
        self.swarm.training.report_steps(host)
        self.trained_by_gone += host.peer.local.samples
        self.swarm.kill(index)

    def joins_slowly(self, index: int, seconds: float) -> None:
        """Delay the last piece of a joining peer's weights by ``seconds``."""
        host = self.swarm.hosts[index]
        on_collected, now = host.peer.on_collected, self.swarm.now

        def late(session: int, position: int, at: float) -> list[Any]:
            if at < now + seconds:
                self.swarm.events.push(
                    now + seconds, host.on_soon, lambda: host.perform(on_collected(session, position, self.swarm.now))
                )
                return []
            return on_collected(session, position, at)

        host.peer.on_collected = late  # type: ignore[method-assign]

    def count(self) -> None:
        """Update the step counts of all peers, which the simulator does only when they matter."""
        for host in self.swarm.alive():
            self.swarm.training.report_steps(host)

    @property
    def honest(self) -> list[Any]:
        return [host for host in self.swarm.alive() if host.index not in self.liars and host.peer.view.ready]

    @property
    def trained(self) -> int:
        return self.trained_by_gone + sum(host.peer.local.samples for host in self.swarm.alive())

    def truth_after_parts(self) -> Callable[[], float]:
        """Return a function that gives the truth after parts of the swarm have trained separately.

        It is the mean of the samples behind each member's weights, plus what all train from now on.
        """
        self.count()
        mean = statistics.mean(host.peer.local.progress.samples for host in self.honest)
        before = self.trained
        return lambda: mean + self.trained - before

    def look(self, until: float, name: str, truth: Callable[[], float] | None = None) -> Row:
        """Simulate up to a time, and compare the honest members' numbers with the truth."""
        self.swarm.run_until(until)
        self.count()
        trained = truth() if truth else self.trained
        numbers = sorted(host.peer.local.progress.samples for host in self.honest)
        return {
            "scenario": name, "s": until, "members": len(numbers), "truth": round(trained),
            "least": numbers[0] / trained - 1, "median": statistics.median(numbers) / trained - 1,
            "most": numbers[-1] / trained - 1, "apart": (numbers[-1] - numbers[0]) / trained,
        }  # fmt: skip


# -- scenarios ---------------------------------------------------------------------------------------------------------
def even(seed: int) -> Iterator[Row]:
    """Run 60 peers of one pace, which join through the first."""
    world = Watched(seed)
    world.add()
    world.add(59, seeds=[0])
    for until in (30, 60, 300, 900):
        yield world.look(until, "even")


def undialable(seed: int) -> Iterator[Row]:
    """Run 60 peers, of which 50 cannot be dialled."""
    world = Watched(seed)
    world.add()
    world.add(9, seeds=[0])
    world.add(50, seeds=range(10))
    for index in range(10, 60):
        world.undialable(index)
    for until in (60, 300, 600, 1200):
        yield world.look(until, "undialable")


def joins(seed: int) -> Iterator[Row]:
    """Run 20 peers, while 20 more start one after another and take three minutes each to join."""
    world = Watched(seed, internal=Internal(reply_timeout_s=400.0), join_timeout_s=400.0)
    world.add()
    world.add(19, seeds=[0])
    world.swarm.run_until(60.0)
    for _ in range(20):
        world.joins_slowly(world.add(seeds=range(20)), JOIN_S)
        world.swarm.run_until(world.swarm.now + 10.0)
    for until in (300, 445, 600):
        yield world.look(until, "joins")


def lives(seed: int) -> Iterator[Row]:
    """Run 50 peers for an hour with exponential lives of ten minutes on average; each dead peer is replaced."""
    world = Watched(seed)
    world.add()
    world.add(49, seeds=[0])
    events = [(world.rng.expovariate(1 / LIFE_S), index) for index in range(50)]
    looks = [300.0, 900.0, 1800.0, 2700.0, 3600.0]
    while looks:
        when, index = min(events)
        if when > looks[0]:
            yield world.look(looks.pop(0), "lives")
            continue
        events.remove((when, index))
        world.swarm.run_until(when)
        if index < 0:
            seeds = world.rng.sample([host.index for host in world.swarm.alive()], 3)
            events.append((when + world.rng.expovariate(1 / LIFE_S), world.add(seeds=seeds)))
        else:
            world.kill(index)
            events.append((when + world.rng.expovariate(1 / AWAY_S), -1 - index))


def restarts(seed: int) -> Iterator[Row]:
    """Run 12 peers, each of which is killed once and restarts without its state, one after another."""
    world = Watched(seed)
    world.add()
    world.add(11, seeds=[0])
    world.swarm.run_until(120.0)
    for index in range(12):
        world.kill(index)
        world.swarm.run_until(world.swarm.now + 5.0)
        world.add(seeds=[host.index for host in world.swarm.alive()][:3])
        world.swarm.run_until(world.swarm.now + 25.0)
    for until in (480, 600):
        yield world.look(until, "restarts")


def paces(seed: int) -> Iterator[Row]:
    """Run 60 peers whose paces differ by up to a factor of 32."""
    world = Watched(seed)
    for index in range(60):
        step_s = STEP_S * 2.0 ** world.rng.uniform(-2.5, 2.5)
        world.add(step_s=step_s, seeds=[0] if index else [])
    for until in (60, 300, 600, 1200):
        yield world.look(until, "paces")


def batches(seed: int) -> Iterator[Row]:
    """Run two peers with equal step times and batches of 1 and 16, and then 16 peers with batches from 1 to 32."""
    world = Watched(seed)
    world.add(samples=1)
    world.add(samples=16, seeds=[0])
    for until in (60, 300, 900):
        yield world.look(until, "batches of 2")
    world = Watched(seed)
    for index in range(16):
        world.add(samples=2 ** (index % 6), seeds=[0] if index else [])
    for until in (60, 300, 900):
        yield world.look(until, "batches of 16")


def pair(seed: int) -> Iterator[Row]:
    """Run two peers, one of which is 32 times as fast."""
    world = Watched(seed)
    world.add()
    world.add(step_s=STEP_S / 32, seeds=[0])
    for until in (60, 300, 900):
        yield world.look(until, "pair")


def cut(seed: int) -> Iterator[Row]:
    """Run 60 peers, partitioned into three groups of 20 for an hour."""
    yield from healed(seed, 20, 40, "cut")


def uneven_cut(seed: int) -> Iterator[Row]:
    """Run 60 peers, partitioned into groups of 40, 10 and 10 for an hour."""
    yield from healed(seed, 40, 50, "uneven_cut")


def healed(seed: int, first: int, second: int, name: str) -> Iterator[Row]:
    """Run 60 peers, partitioned for an hour at the indices ``first`` and ``second``, and measure after it."""
    world = Watched(seed)
    world.add()
    world.add(59, seeds=[0])
    world.swarm.run_until(60.0)
    world.swarm.partition([range(first), range(first, second)])
    world.swarm.run_until(3660.0)
    truth = world.truth_after_parts()
    world.swarm.heal()
    for until in (3720, 3780, 3960):
        yield world.look(until, name, truth)


def runs(seed: int) -> Iterator[Row]:
    """Run 80 peers that train alone for five minutes, each in a run of its own, and then merge."""
    world = Watched(seed, join_timeout_s=1.0)
    world.add(80)
    world.swarm.run_until(300.0)
    hosts = world.swarm.hosts
    for host, following in itertools.pairwise(hosts):
        host.peer.seeds.renew((following.address,), {})
        world.swarm.perform(host, [host.peer.seeds.dial(following.address)])
    while len({host.peer.view.run_id for host in hosts}) > 1:
        world.swarm.run_until(world.swarm.now + 1.0)
    merged_at, truth = world.swarm.now, world.truth_after_parts()
    for after in (60, 120, 300):
        yield world.look(merged_at + after, "runs", truth)


def liars(seed: int) -> Iterator[Row]:
    """Run 30 honest members and 30 liars, which lie after the first ten minutes."""
    yield from lied(seed, 30, 30, 600.0, "liars")


def liar(seed: int) -> Iterator[Row]:
    """Run eight peers, one of which lies after the first ten minutes."""
    yield from lied(seed, 7, 1, 600.0, "liar")


def at_once(seed: int) -> Iterator[Row]:
    """Run eight peers, one of which lies from the beginning."""
    yield from lied(seed, 7, 1, 0.0, "at_once")


def liars_at_once(seed: int) -> Iterator[Row]:
    """Run 30 honest members and 30 liars, which lie from the beginning."""
    yield from lied(seed, 30, 30, 0.0, "liars_at_once")


def flood(seed: int) -> Iterator[Row]:
    """Run eight peers, one of which lies after ten minutes and offers sixteen times as often as the others."""
    yield from lied(seed, 7, 1, 600.0, "flood", STEP_S / 16)


def floods(seed: int) -> Iterator[Row]:
    """Run 30 honest members and 30 liars that lie after ten minutes and offer sixteen times as often."""
    yield from lied(seed, 30, 30, 600.0, "floods", STEP_S / 16)


def lied(seed: int, honest: int, liars: int, begins: float, name: str, step_s: float = STEP_S) -> Iterator[Row]:
    world = Watched(seed)
    world.add(1)
    world.add(honest - 1, seeds=[0])
    world.add(liars, seeds=[0], step_s=step_s, samples=SAMPLES if step_s == STEP_S else 1)
    world.swarm.run_until(5.0)
    for index in range(honest, honest + liars):
        world.lies(index, begins)
    for until in (begins + 10, begins + 60, begins + 300):
        yield world.look(until, name)


SCENARIOS = (
    even, undialable, joins, lives, restarts, paces, batches, pair, cut, uneven_cut, runs,
    liars, liar, at_once, liars_at_once, flood, floods,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=", ".join(scenario.__name__ for scenario in SCENARIOS)
    )
    arguments = parser.parse_args()
    for scenario in SCENARIOS:
        if arguments.scenarios and scenario.__name__ not in arguments.scenarios:
            continue
        for row in scenario(arguments.seed):
            print(
                json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
            )


if __name__ == "__main__":
    main()
