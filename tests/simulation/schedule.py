"""A random schedule: the configuration of a swarm, its hosts, and their faults; then quiet, in which all must get well.

Everything is drawn from the seed. ``peers`` and ``seconds`` shorten a schedule that fails, which shortens its trace.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any, ClassVar

from gossip.arithmetic.moments import MomentForm
from gossip.config import Config
from gossip.ids import MemberRecord, PeerId
from tests.harness.configs import tuned
from tests.harness.world import address_of
from tests.simulation.bounds import check_bounds, check_exchanges, longest_s
from tests.simulation.host import ELEMENTS, Host, Manners
from tests.simulation.liars import Liar
from tests.simulation.overlaps import Overlaps
from tests.simulation.quiet import Quiet
from tests.simulation.world import World

# Time after the last fault until all must be well: suspicion, the longest bench, and the third dial of a stranger.
WHOLE_S = 400.0
REPORT_S = 0.25  # Time between two reports of a loop without another reason, as a node's; least step in the quiet.
# Kinds of messages whose links may break as they are sent.
TALK = ("Commit", "Settled", "Outcome", "Accept", "Offer", "Joined", "Begin", "Abort", "Busy")


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Draw the settings that change decisions. All times are short: a few virtual seconds hold many decisions."""
    mixing = rng.choices(["pair", "group", "push-sum", "row-stochastic"], [12, 4, 4, 1])[0]
    settings: dict[str, Any] = {
        "mixing": mixing, "mix_every_steps": rng.choice([1, 2, 4]),
        "filter": "none" if mixing != "row-stochastic" else "auto", "reply_timeout_s": rng.choice([0.5, 1.0, 2.0]),
        "boundary_patience_s": rng.choice([0.5, 1.0]), "stall_s": rng.choice([0.5, 1.0]),
        "bench_s": rng.choice([0.3, 1.0, 3.0]), "doubt_s": rng.choice([1.5, 3.0, 6.0]),
        "probe_period_s": rng.choice([0.5, 1.0]), "probe_timeout_min_s": 0.3, "probe_timeout_max_s": 0.6,
        "gossip_period_s": 0.5, "push_pull_period_s": rng.choice([4.0, 8.0]), "heal_period_s": rng.choice([2.0, 4.0]),
        "join_timeout_s": rng.choice([3.0, 6.0]), "seed_backoff_s": 0.5, "seed_backoff_max_s": 4.0,
        "incoming_exchanges": rng.choice([1, 2, 3]), "chunk_elements": 1024,
        "staleness_exponent": rng.choice([0.0, 0.0, 0.5]), "donors": rng.choice([1, 2, 4]),
    }  # fmt: skip
    if rng.random() < 0.15:
        settings["mix_every_s"] = rng.choice([0.3, 1.0])
    if rng.random() < 0.15:
        settings["max_version_gap"] = rng.choice([0.0, 1.0, 3.0])
    if mixing == "pair":
        kind = rng.random()
        if kind < 0.3:
            settings |= {"outer_momentum": 0.5, "outer_rate": 0.7}
        elif kind < 0.4:
            settings |= {"partners": 0, "selection": rng.choice(["ring", "torus"])}
        if kind >= 0.3 and rng.random() < 0.3:
            settings["part"] = rng.choice(["mask 0.1", "fragments 4"])
        elif kind >= 0.3 and rng.random() < 0.2:
            settings["codec"] = rng.choice(["moniqua4", "auto", "int8"])
        if rng.random() < 0.15:
            settings["filter"] = "clip"
    if mixing == "group":
        settings["group_size"] = rng.choice([2, 3, 4, 0])
        if settings["group_size"] and rng.random() < 0.5:
            settings["selection"] = "grid"
    elif mixing in ("push-sum", "row-stochastic"):
        settings["partners"] = rng.choice([1, 1, 2, 3])
    if "selection" not in settings and mixing != "group" and rng.random() < 0.3:
        settings["selection"] = rng.choice(["ring", "torus", "exponential", "grid", "nearest"])
    return settings


def peer_id(number: int) -> PeerId:
    """Return the id of the host with this number, hashed to spread the ids over the buckets of a digest."""
    return PeerId(hashlib.sha256(b"host %d" % number).digest()[:16])


class Schedule:
    """One seed's world, played by :meth:`play`."""

    EXACT: ClassVar[bool] = True  # The weights are fractions.
    LOOK_S: ClassVar[float] = 0.5  # Time between two checks of all hosts.

    def __init__(
        self, seed: int, *, tell: Callable[[str], None] | None = None, peers: int | None = None,
        seconds: float | None = None, liars: bool | None = None, overlaps: bool = True,
    ) -> None:  # fmt: skip
        self.seed = seed
        rng = self.rng = random.Random(f"schedule {seed}")
        self.overlaps = Overlaps(seed, overlaps)
        self.config = self.configure()
        self.world = World(seed, self.config, tell, self.EXACT)
        self.world.report_s = REPORT_S if overlaps else 0.0
        count = rng.choice([2, 2, 3, 3, 3, 4, 4, 5, 6])
        count = rng.choice([12, 20, 50]) if rng.random() < 0.006 else count
        lasts_s = (2.0 + 8.0 * rng.random()) * min(1.0, 6 / count)
        count = self.overlaps.count(count)
        self.count = min(count, peers) if peers else count
        self.lasts_s = min(lasts_s, seconds) if seconds else lasts_s
        lying = rng.random() < 0.35
        self.liars = (lying if liars is None else liars) and (1 + (rng.random() < 0.2))
        self.divided = rng.random() < 0.08  # Two runs begin by themselves, and must merge.
        self.every_s = self.overlaps.every_s(rng.choice([0.1, 0.3, 1.0, 3.0]))  # Mean time between two faults.
        self.fails = rng.choice([0.0, 0.0, 0.02, 0.1])  # Share of streams that fail.
        network = self.world.network
        network.latency_s = self.overlaps.latency_s(rng.choice([0.001, 0.01, 0.05, 0.15]))
        network.slow_streams = rng.choice([0.3, 1.0, 1.0, 4.0])
        for kind in TALK:
            if rng.random() < 0.35:
                network.breaks[kind] = rng.choice([0.01, 0.05, 0.2])
        if rng.random() < 0.2:
            network.breaks.clear()
        self.faults = [fault for fault in FAULTS if rng.random() < 0.6]
        more = self.more = random.Random(f"more {seed}")
        self.bound = more.random() < 0.15  # Some hosts may only join a run.
        self.copies = int(more.random() < 0.06 and not self.config.pushes)  # Processes with another's key.
        self.faults += [Schedule.finish_one] * (6 * (more.random() < 0.1))  # Often enough that votes are won.
        self.world.votes_every_s = 1.0 if self.liars or Schedule.finish_one in self.faults else 0.0
        self.numbers = 0
        self.lives: dict[int, int] = {}
        self.fallen: list[Host] = []  # Hosts that crashed, of which some are started again.
        self.ends_s = 0.0
        self.looks = 0

    def configure(self) -> Config:
        return tuned(**self.overlaps.settings(random_settings(self.rng)))

    # -- who is there --------------------------------------------------------------------------------------------
    def enter(
        self, *, liar: bool = False, seedless: bool = False, again: Host | None = None, memory: bool = True,
        twin: Host | None = None,
    ) -> Host:  # fmt: skip
        """Start a process.

        Args:
            liar: True for an attacker.
            seedless: True if it knows no seed.
            again: The host that crashed, whose key the process has; None for a new member.
            memory: True if it remembers the members of its earlier life.
            twin: The running host whose key it copies.
        """
        world, rng = self.world, self.rng
        number = self.numbers if again is None else again.number
        self.numbers += again is None
        life = self.lives[number] = self.lives.get(number, 0) + 1
        again = twin or again
        run_id = hashlib.sha256(b"genesis %d %d %d" % (self.seed, number, life)).digest()[:16]
        book: tuple[MemberRecord, ...] = ()
        incarnation = 1
        if again is not None and memory:
            book = tuple(again.peer.membership.book())
            incarnation = again.peer.membership.me.incarnation + 1
        dialable = again.dialable if again is not None else liar or self.dials(number)
        record = MemberRecord(
            peer_id(number) if twin is None else twin.id, b"", incarnation, address=address_of(number), run_id=run_id
        )
        others = [host for host in world.running if not host.left and not host.liar and host.dialable]
        seeds = () if seedless or not others else tuple(
            address_of(host.number) for host in rng.sample(others, min(len(others), rng.choice([1, 1, 2])))
        )  # fmt: skip
        if not seeds and not seedless and number:
            seeds = (address_of(0),)
        manners = self.manners()
        manners.fails = self.fails
        kind = Liar if liar else Host
        value = rng.randint(-40, 40)
        host = kind(
            world, number, record, manners, random.Random(f"{self.seed} {number} {life}"),
            seeds=seeds, book=book, value=value, dialable=dialable, must_join=bool(seeds) and self.must_join(),
        )  # fmt: skip
        host.liar = liar or twin is not None
        if (form := self.moments(number)) is not None:
            host.peer.set_moments(form)
        return world.enter(host)

    def moments(self, number: int) -> MomentForm | None:
        """Return the form of a host's moments: half of the schedules have any, and one host in five has others."""
        draws = random.Random(f"moments {self.seed}")
        if draws.random() < 0.5:
            return None
        is_other = random.Random(f"moments {self.seed} {number}").random() < 0.2
        return OTHER_MOMENTS if is_other else MOMENTS

    def manners(self) -> Manners:
        manners = Manners(self.rng)
        manners.step_s = self.overlaps.step_s(manners.step_s)
        return manners

    def dials(self, number: int) -> bool:
        """Return True if others can dial this host."""
        return number == 0 or self.rng.random() < 0.9

    def must_join(self) -> bool:
        return self.bound and self.more.random() < 0.5

    # -- playing -------------------------------------------------------------------------------------------------
    def play(self) -> World:
        """Play the schedule. Raises :class:`tests.simulation.judge.Failure` if a claim does not hold."""
        world, rng = self.world, self.rng
        self.begin()
        world.run(self.overlaps.calm_s(rng.choice([0.0, 1.0, 2.5])))
        self.look()
        self.ends_s = world.now + self.lasts_s
        self.later_fault()
        while world.now < self.ends_s:
            world.run(min(self.LOOK_S, self.ends_s - world.now))
            self.look()
        self.heal()
        self.settle()
        return world

    def begin(self) -> None:
        world, rng = self.world, self.rng
        if self.divided:
            world.network.sides = lambda number: number % 2 if number < self.count else 0
            world.later(self.config.join_timeout_s + 2.0, self.rejoin)
        for place in range(self.count):
            self.enter(seedless=not place)
            world.run(rng.random() * 0.3)
        for _ in range(self.liars):
            self.enter(liar=True)
        if self.copies:
            world.later(self.more.random() * self.lasts_s, self.copy_one)

    def look(self) -> None:
        """Check all honest hosts. Their tables are checked every fourth time, since a leak lasts."""
        self.looks += 1
        for host in self.world.honest:
            (check_exchanges if self.looks % 4 else check_bounds)(self.world, host)

    def later_fault(self) -> None:
        if self.faults:
            self.world.later(self.rng.expovariate(1 / self.every_s), self.fault)

    def fault(self) -> None:
        if self.world.now >= self.ends_s:
            return
        self.rng.choice(self.faults)(self)
        self.later_fault()

    def some(self) -> Host | None:
        """Return a random running host that is not stopped."""
        awake = [host for host in self.world.running if not host.stopped]
        return self.rng.choice(awake) if awake else None

    # -- faults --------------------------------------------------------------------------------------------------
    def break_link(self) -> None:
        links = list(self.world.network.links)
        if links:
            self.world.network.cut_link(self.rng.choice(links))

    def retire_link(self) -> None:
        host = self.some()
        if host is None:
            return
        used = set(map(id, host.bound.values()))
        idle = [link for links in host.links.values() for link in links if id(link) not in used and not link.broken]
        if idle:
            self.world.network.retire(self.rng.choice(idle), host)

    def spike(self) -> None:
        network = self.world.network
        network.spike, network.spike_until = self.rng.choice([5.0, 30.0]), self.world.now + self.rng.random()

    def congest(self) -> None:
        """Let streams take longer than any deadline allows, for a while."""
        network, usual = self.world.network, self.world.network.slow_streams
        if usual < 20.0:
            network.slow_streams = 50.0
            self.world.later(self.rng.random(), self.clear, usual)

    def clear(self, usual: float) -> None:
        self.world.network.slow_streams = usual

    def part(self) -> None:
        network = self.world.network
        if network.sides is None:
            sides = {number: self.rng.randint(0, 1) for number in range(self.numbers)}
            network.part(sides)
            self.world.truth.moved()
            self.world.note(f"the network parts: {sides}")
            self.world.later(self.rng.choice([0.3, 2.0, 6.0]), self.rejoin)

    def rejoin(self) -> None:
        self.world.network.sides = None
        self.world.truth.moved()
        self.world.note("the network is whole")

    def crash(self) -> None:
        host = self.some()
        if host is not None and not host.liar and len(self.world.honest) > 1:
            self.fallen.append(host)
            host.crash()

    def restart(self) -> None:
        if self.fallen:
            host = self.fallen.pop(self.rng.randrange(len(self.fallen)))
            if self.world.by_id[host.id] is host:
                self.enter(again=host, memory=self.rng.random() < 0.6)

    def leave(self) -> None:
        host = self.some()
        if host is not None and not host.liar and len(self.world.honest) > 2:
            host.leave()

    def newcomer(self) -> None:
        if self.numbers < 2 * self.count + 2:
            self.enter()

    def stop(self) -> None:
        host = self.some()
        if host is not None:
            self.world.note(f"{host!r} is stopped")
            host.freeze(self.rng.choice([0.05, 0.4, 1.5, 5.0]))

    def pause(self) -> None:
        """Stop a training loop for a while: it reaches no boundary."""
        host = self.some()
        if host is not None and host.stepping:
            host.stepping = False
            self.world.later(self.rng.choice([0.2, 1.0, 3.0]), self.unpause, host)

    @staticmethod
    def unpause(host: Host) -> None:
        host.stepping = True

    def hesitate(self) -> None:
        """Change how long copies of a host's snapshots take."""
        host = self.some()
        if host is not None:
            host.manners.copy_s = self.rng.choice([0.0, 0.1, 1.0])

    def settle_one(self) -> None:
        host = self.some()
        if host is not None and host.peer.view.ready and not host.liar:
            host.call("settle", self.rng.random() < 0.5)

    def resume_one(self) -> None:
        """Load a checkpoint. Everything that began from the old weights, or was to be added to them, is dropped."""
        host = self.some()
        if host is None or host.liar or not host.peer.view.ready:
            return
        value = host.model.value
        self.world.judge.replaced(host, value)
        host.adoption = host.kept = None
        host.restoring = False
        host.pieces.clear()
        self.world.truth.set(host, host.peer.local.progress.samples)
        host.call("resume", host.peer.local.run_id, host.peer.local.progress.samples, host.peer.local.version)

    def finish_one(self) -> None:
        """Let the owner of a host mark its run as finished."""
        host = self.some()
        if host is not None and not host.liar and host.peer.view.ready:
            self.world.judge.runs.ended_by_owner(host)
            host.call("finish")

    def copy_one(self) -> None:
        """Start another process with the key and the memory of a running host."""
        hosts = [host for host in self.world.honest if host.peer.view.ready and host.number]
        if hosts and len(self.world.honest) > 2:
            host = self.more.choice(hosts)
            self.world.judge.entered(host, -1)
            host.liar = True  # Claims about honest members do not hold for two processes with one key.
            self.world.judge.blurred = True
            self.enter(twin=host)

    def spoil_one(self) -> None:
        """Spoil a host's weights with NaN. Its loop restores them later, unless the swarm's have replaced them."""
        host = self.some()
        if host is not None and not host.liar and host.peer.view.ready:
            session = next((number for number, one in host.sessions.items() if one.value is not None), None)
            if session is not None and host.sessions[session].transfer is None and not host.sessions[session].gather:
                host.call("on_spoiled", session)
            else:
                host.call("on_spoiled", None)
            host.later(self.rng.choice([0.3, 2.0]), host.call, "on_mended")

    # -- the end -------------------------------------------------------------------------------------------------
    def heal(self) -> None:
        """End all faults: heal the network, let all loops run, and crash the liars."""
        world = self.world
        network = world.network
        self.rejoin()
        network.spike_until, network.slow_streams = 0.0, 1.0
        network.breaks.clear()
        self.faults = []
        for host in list(world.running):
            host.stepping, host.manners.fails = True, 0.0
            host.manners.copy_s = min(host.manners.copy_s, 0.1)
            # Two processes with one key never finish a group, and members asked for one would try for ever.
            if host.liar and (type(host) is not Host or self.config.mixing == "group"):
                host.crash()
            elif host.peer.local.settling:
                host.call("settle", False)
        world.note("no more faults")

    def settle(self) -> None:
        """Let no host begin a mix any more, and wait until all is well."""
        world = self.world
        since = world.now
        quiet = Quiet(world, has_liars=bool(self.liars))
        world.run(1.0 + 2.0 * self.rng.random())  # Mixing goes on.
        for host in world.running:
            host.step_s = max(host.step_s, world.report_s)
        while True:
            self.look()
            for host in world.running:
                host.peer.local.paused = True  # Nothing begins between two looks either.
                host.peer.exchanges.can_overlap = False  # Reservations would go on for ever.
            wrong = quiet.wrong()
            if not wrong:
                break
            if world.now - since > WHOLE_S + longest_s(self.config):
                world.fail("all is well after quiet", "; ".join(wrong))
            world.run(self.LOOK_S if world.now - since < 20.0 else 4 * self.LOOK_S)
        for host in world.honest:
            host.apply()
        world.judge.sums()


MOMENTS = MomentForm(("exp_avg", "exp_avg_sq"), ("first", "second"), ELEMENTS)
OTHER_MOMENTS = MomentForm(("momentum_buffer",), ("plain",), ELEMENTS)
FAULTS: tuple[Callable[[Schedule], None], ...] = (
    Schedule.break_link, Schedule.break_link, Schedule.retire_link, Schedule.spike, Schedule.part, Schedule.crash,
    Schedule.restart, Schedule.restart, Schedule.leave, Schedule.newcomer, Schedule.stop, Schedule.pause,
    Schedule.hesitate, Schedule.congest, Schedule.settle_one, Schedule.resume_one, Schedule.spoil_one,
)  # fmt: skip


def play(seed: int, **how: Any) -> World:
    """Play one seed. Raises :class:`tests.simulation.judge.Failure` if a claim does not hold."""
    return Schedule(seed, **how).play()
