"""Members that lie about members, so that honest ones meet them more often: what share of partners do they become?

Of a swarm of bare peers a part lies. Each tells others of liars alone, accuses honest members of being dead, asks for
exchanges far more often than others, and asks honest members alone. It mixes as it should, since only whom honest
members meet is measured: python -m tests.simulation.eclipse.
"""

import argparse
import dataclasses
import hashlib
import random
from typing import Any

from gossip.ids import MemberRecord, PeerId
from gossip.wire.messages import Hint
from tests.harness.configs import tuned
from tests.harness.world import address_of
from tests.simulation.host import Host, Manners
from tests.simulation.schedule import peer_id
from tests.simulation.world import World

STEP_S = 0.5
MIX_EVERY_STEPS = 8
INTERVAL_S = MIX_EVERY_STEPS * STEP_S
ACCUSED = 2  # Honest members that each message of a liar accuses.


class Favouring:
    """The selection rule of a liar: honest members alone."""

    def __init__(self, selector: Any, honest: set[PeerId]) -> None:
        self.selector, self.honest = selector, honest

    def __getattr__(self, name: str) -> Any:
        return getattr(self.selector, name)

    def choose(self, swarm: Any, asked: Any, rng: random.Random) -> PeerId | None:
        fitting = [peer for peer in swarm.alive() if peer in self.honest and peer not in asked and swarm.fits(peer)]
        return rng.choice(fitting) if fitting else None


class Eclipser(Host):
    """A member that lies about other members."""

    liar = True

    def send(self, to: PeerId, message: Any) -> None:
        for name in ("updates", "records"):
            updates = getattr(message, name, None)
            if updates is not None:
                told = [update for update in updates if isinstance(update, MemberRecord) and self.lies(update.id)]
                message = dataclasses.replace(message, **{name: (*told, *self.accusations())})
        super().send(to, message)

    def lies(self, peer: PeerId) -> bool:
        return self.world.by_id[peer].liar

    def accusations(self) -> tuple[Hint, ...]:
        victims = [self.peer.membership.record(host.id) for host in self.rng.sample(self.world.honest, ACCUSED)]
        return tuple(
            Hint(record.id, record.incarnation, self.rng.random() < 0.5, self.id)
            for record in victims if record is not None
        )  # fmt: skip


class Eclipse:
    """A swarm of bare peers in virtual time, some of which lie.

    Args:
        seed: The seed of all draws.
        honest: The number of honest members that begin.
        liars: The number of lying members.
        ask_every_s: How often a liar asks for an exchange. Honest members ask about once in ``2 * INTERVAL_S``.
    """

    def __init__(self, seed: int, honest: int, liars: int, ask_every_s: float) -> None:
        self.seed, self.rng = seed, random.Random(f"eclipse {seed}")
        self.config = tuned(mix_every_steps=MIX_EVERY_STEPS)
        self.world = World(seed, self.config, exact=False)
        self.world.network.latency_s = 0.02
        self.ask_every_s = ask_every_s
        self.numbers = 0
        self.honest: set[PeerId] = set()
        lying = set(self.rng.sample(range(ACCUSED, honest + liars), liars))
        for place in range(honest + liars):
            self.enter(place in lying)
            self.world.run(0.1)

    def enter(self, is_liar: bool = False, seeds: tuple[int, ...] | None = None) -> Host:
        """Start a process with these hosts as its seeds; a random honest one if not given."""
        number, world = self.numbers, self.world
        self.numbers += 1
        run_id = hashlib.sha256(b"run %d %d" % (self.seed, number)).digest()[:16]
        record = MemberRecord(peer_id(number), b"", 1, address=address_of(number), run_id=run_id)
        if seeds is None:
            seeds = (self.rng.choice([host.number for host in world.honest]),) if world.honest else ()
        manners = Manners(self.rng)
        manners.step_s = min(STEP_S, self.ask_every_s / 2) if is_liar else STEP_S
        manners.samples, manners.losses, manners.learning, manners.copy_s, manners.fails = 16, None, 0, 0.0, 0.0
        if is_liar:
            world.config = tuned(self.config, mix_every_steps=max(1, round(self.ask_every_s / manners.step_s)))
        kind = Eclipser if is_liar else Host
        rng = random.Random(f"{self.seed} {number}")
        host = kind(world, number, record, manners, rng, seeds=tuple(map(address_of, seeds)))
        world.config = self.config
        if is_liar:
            host.peer.partners.selector = Favouring(host.peer.partners.selector, self.honest)
        else:
            self.honest.add(host.id)
        return world.enter(host)

    def lying_share(self, hosts: list[Host], since: float) -> float:
        """Return the share of the partners of these hosts that lie, in exchanges since this time."""
        partners = [partner for host in hosts for at, _, partner in host.mixes if at >= since and partner is not None]
        return sum(self.world.by_id[partner].liar for partner in partners) / len(partners)

    def exchanges(self, hosts: list[Host], since: float) -> float:
        """Return the exchanges of one of these hosts in an interval, since this time."""
        count = sum(at >= since for host in hosts for at, *_ in host.mixes)
        return count / len(hosts) / (self.world.now - since) * INTERVAL_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=70)
    parser.add_argument("--liars", type=int, default=30)
    parser.add_argument("--ask-every-s", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=1_000.0, help="virtual time after the newcomers have come")
    options = parser.parse_args()
    swarm = Eclipse(1, options.honest, options.liars, options.ask_every_s)
    world, old = swarm.world, list(swarm.world.honest)
    world.run(60.0)
    liars = [host.number for host in world.running if host.liar]
    honest = [host.number for host in old]
    seeds = {
        "an honest seed": lambda: (swarm.rng.choice(honest),),
        "an honest and a lying seed": lambda: (swarm.rng.choice(liars), swarm.rng.choice(honest)),
        "a lying seed": lambda: (swarm.rng.choice(liars),),
    }
    newcomers = {name: [swarm.enter(seeds=draw()) for _ in range(4)] for name, draw in seeds.items()}
    began, columns = world.now, [f"new, {name}" for name in seeds]
    print("|", " | ".join(["partners that lie, times their share", "exchanges of an old one", "old", *columns]), "|")
    print("|---" * (3 + len(columns)) + "|", flush=True)
    members = options.liars / (options.honest + options.liars)
    for _ in range(10):
        since = world.now
        world.run(options.seconds / 10)
        shares = [swarm.lying_share(hosts, since) / members for hosts in (old, *newcomers.values())]
        figures = " | ".join(f"{share:.2f}" for share in shares)
        intervals = f"{(since - began) / INTERVAL_S:.0f} to {(world.now - began) / INTERVAL_S:.0f} intervals"
        print(f"| {intervals} | {swarm.exchanges(old, since):.2f} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
