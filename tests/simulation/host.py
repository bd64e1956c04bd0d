"""One life of one member: its Peer, and a driver that performs effects in the order and with the manners of node/."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gossip.effects import (
    Adopt,
    Collect,
    Confirm,
    Dial,
    Effect,
    Gather,
    MemberChanged,
    Merge,
    Mix,
    Notice,
    Recall,
    Release,
    Rename,
    Restore,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.errors import RemoteError
from gossip.exchange.session import State
from gossip.ids import Address, MemberRecord, PeerId
from gossip.peer import Peer
from gossip.wire.messages import Fetch, Offer, Outcome
from gossip.wire.records import trusting, unsigned
from tests.simulation.vectors import Model

if TYPE_CHECKING:
    import random

    from gossip.config import Config
    from tests.simulation.network import Link
    from tests.simulation.world import World

__all__ = ["ELEMENTS", "Host", "Manners", "Session"]

ELEMENTS = 4096  # enough for a clip radius, and two chunks of the least length for each of two donors
PENDING = 32  # as node.runtime: messages kept for one who is being dialled
KEEPS_NOT = 0.1  # share of trials before which there is no memory to keep what is there
TICKS = 3  # what a tick changes may itself be told at once; more is a driver that spins


class Manners:
    """How this life behaves beside the protocol: seconds, shares and counts that the schedule draws."""

    __slots__ = ("copy_s", "fails", "learning", "losses", "samples", "spare", "step_s")

    def __init__(self, rng: random.Random) -> None:
        self.step_s = rng.choice([0.03, 0.06, 0.1, 0.2])
        self.learning = rng.choice([0, 0, 1, -1])  # what a step adds to the value
        self.samples = rng.choice([1, 1, 4])  # of a step
        self.losses = rng.choice([None, (1.0, 1.1), (0.1, 10.0)])  # what its batches say, if anything
        self.spare = rng.random() < 0.5  # a snapshot asked for at a boundary is taken at that boundary
        self.copy_s = rng.choice([0.0, 0.0, 0.0, 0.3])  # until a snapshot's copy is there
        self.fails = 0.0  # share of streams that fail by themselves


class Session:
    """What a driver keeps for one session number, from Snapshot or Collect to Release."""

    __slots__ = ("collect", "gather", "given", "link", "means", "merged", "mixed", "partner", "pushes", "reported",
                 "sent", "serve", "theirs", "total", "transfer", "value", "values")  # fmt: skip

    def __init__(self) -> None:
        self.pushes = 0
        self.value: Fraction | float | None = None  # the snapshot, once it is taken
        self.given: Fraction | float = 0  # the mass that it carries away, and mass * value
        self.total: Fraction | float = 0
        self.partner: PeerId | None = None
        self.link: Link | None = None  # that its stream runs over
        self.transfer: Transfer | None = None
        self.theirs: Fraction | float | None = None
        self.collect: Collect | None = None
        self.serve: Serve | None = None
        self.gather: Gather | None = None
        self.values: dict[PeerId, Fraction | float] = {}  # of a group: what came of each one's vector,
        self.means: dict[PeerId, Fraction | float] = {}  # and of each one's mean
        self.sent: dict[PeerId, bool] = {}  # to whom we stream, and whether the mean was sent as well
        self.reported = False  # to the peer, that the snapshot is taken
        self.mixed = self.merged = False


class Host:
    """``record`` is what it says of itself at first, ``book`` what it remembers of others."""

    liar = False

    def __init__(
        self, world: World, number: int, record: MemberRecord, config: Config, manners: Manners, rng: random.Random,
        *, seeds: tuple[Address, ...] = (), book: tuple[MemberRecord, ...] = (), value: int = 0, dialable: bool = True,
    ) -> None:  # fmt: skip
        self.world, self.number, self.id, self.config, self.manners, self.rng = (
            world, number, record.id, config, manners, rng,
        )  # fmt: skip
        self.dialable, self.seeds = dialable, seeds
        exact = config.mixing != "row-stochastic"
        self.model = Model(value, config.conserves, exact)
        self.steps = 0
        self.gone = self.left = self.paused = False
        self.stopped = 0  # how many freezes it is under
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.awake_at = world.now
        self.links: dict[PeerId, list[Link]] = {}
        self.bound: dict[int, Link] = {}
        self.dialling: dict[Address, dict[PeerId | None, None]] = {}
        self.waiting: dict[PeerId, deque[Any]] = {}
        self.sessions: dict[int, Session] = {}
        self.wishes: dict[int, Snapshot] = {}
        self.early: dict[int, list[Callable[[], None]]] = {}  # of a group that has not begun here
        self.adoption: Adopt | None = None
        self.kept: Fraction | float | None = None  # the weights that were there, while others are on trial
        self.restoring = False
        self.pieces: list[tuple[int, int, Fraction | float]] = []
        self.joining_since = -1.0
        self.armed = math.inf
        self.since: dict[int, float] = {}  # when an exchange was first seen under way
        self.peer = Peer(
            record, sign=unsigned, verify=trusting, config=config, fingerprint="f", elements=ELEMENTS, rng=rng,
            seeds=seeds, book=book, now=world.now,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"{'liar' if self.liar else 'node'}{self.number}"

    def start(self) -> None:
        self.perform(self.peer.start(self.world.now))
        self.later(self.manners.step_s * self.rng.random(), self.boundary)

    # -- time ----------------------------------------------------------------------------------------------------
    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """An event of this life: none once it is over, and none while the process is stopped."""
        self.world.later(delay_s, self.happen, what, arguments)

    def happen(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.gone:
            return
        if self.stopped:
            self.backlog.append((what, arguments))
        else:
            what(*arguments)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long: what was to happen meanwhile happens then, in order."""
        self.stopped += 1
        self.world.later(seconds, self.thaw)

    def thaw(self) -> None:
        self.stopped -= 1
        self.awake_at = self.world.now
        if self.rng.random() < 0.5:  # the timer, or the sockets first
            self.fire()
        while self.backlog and not self.stopped and not self.gone:
            what, arguments = self.backlog.popleft()
            what(*arguments)

    def arm(self) -> None:
        deadline = self.peer.deadline
        if deadline < self.armed:
            self.armed = deadline
            self.world.plan(max(deadline, self.world.now), self.happen, self.fire, ())

    def fire(self) -> None:
        now = self.world.now
        if self.armed > now or self.gone or self.stopped:
            return
        self.armed = math.inf
        for _ in range(TICKS):
            if self.gone or self.peer.deadline > now:
                break
            self.perform(self.peer.tick(now))
        if not self.gone:
            if self.peer.deadline <= now:
                self.world.fail("no deadline that a tick does not move", f"{self} still has {self.peer.deadline}")
            self.arm()

    # -- what the driver reports ---------------------------------------------------------------------------------
    def call(self, event: str, *arguments: Any) -> None:
        if not self.gone:
            self.perform(getattr(self.peer, event)(*arguments, self.world.now))

    def received(self, link: Link, sender: Host, message: Any) -> None:
        world = self.world
        if self.left:
            return
        world.mark(message, self.number)
        if world.tell is not None:
            world.note(f"{self} hears from {sender}: {message}")
        session = getattr(message, "session", None)
        binds = type(message) in (Offer, Fetch, Outcome)
        if binds:
            self.bound.setdefault(session, link)
            self.peer.counted(self.steps, self.manners.samples * self.steps)
        try:
            effects = self.peer.receive(sender.id, message, world.now)
        except RemoteError as error:
            if not sender.liar and not self.liar:
                world.fail("an honest message ends no link", f"{self} refused {message} of {sender}: {error}")
            world.network.cut_link(link)
            return
        self.perform(effects)
        if binds and session not in self.peer.exchanges.table and session not in self.peer.donating.table:
            self.bound.pop(session, None)

    def boundary(self) -> None:
        """Between two steps: weights taken over, shifts added, snapshots taken, and then the peer is told."""
        world, model, peer = self.world, self.model, self.peer
        self.later(self.manners.step_s, self.boundary)
        if self.paused or self.left:
            return
        if self.restoring:
            self.restore()
        trial = self.adoption is not None and self.adoption.trial
        if trial and self.rng.random() < KEEPS_NOT:
            self.adoption = None
            self.pieces.clear()
            self.call("not_kept")
        if trial:
            model.apply()  # what is finished is in the weights that may come back
        adopted = self.adoption is not None
        apart = self.adopt() if adopted else (0.0, 0.0)
        model.apply()
        taken = self.take(list(self.wishes))
        if peer.ready and not adopted and not peer.held:
            self.steps += 1
            world.judge.learned(self, model.learn(self.manners.learning))
        if adopted:
            self.perform(peer.adopted(world.now, *apart))
        losses = self.manners.losses
        loss = self.rng.uniform(*losses) if losses is not None and peer.ready else None
        self.call("stepped", self.steps, self.manners.samples * self.steps, loss)
        self.copied(taken)
        if self.manners.spare and not self.gone:
            self.copied(self.take([session for session, wish in self.wishes.items() if not wish.pushes]))

    def take(self, sessions: list[int]) -> list[int]:
        for number in sessions:
            wish, session = self.wishes.pop(number), self.sessions[number]
            session.value = self.model.value
            if wish.pushes:
                session.given = self.model.give(wish.pushes)
                session.total = session.given * session.value
                self.world.judge.given(self, number, session)
        return sessions

    def copied(self, sessions: list[int]) -> None:
        for number in sessions:
            session = self.sessions.get(number)
            if session is not None and self.manners.copy_s:
                self.later(self.manners.copy_s * self.rng.random(), self.snapshotted, number, session)
            elif session is not None:
                self.snapshotted(number, session)

    def snapshotted(self, number: int, session: Session) -> None:
        if self.left or self.sessions.get(number) is not session:
            return
        session.reported = True
        self.perform(self.peer.snapshotted(number, self.world.now, session.given))

    def adopt(self) -> tuple[float, float]:
        """Overwrite the weights with what came; returns how far apart the two are, squared, and the norm of ours."""
        size = self.peer.joining.size
        covered = sum(stop - start for start, stop, _ in self.pieces)
        if covered != size or min(start for start, _, _ in self.pieces) != 0:
            self.world.fail("a joining vector is whole", f"{self} adopts {covered} of {size} elements")
        value = sum((p * (stop - start) for start, stop, p in self.pieces), self.model.mass * 0) / covered
        own = self.model.value
        self.kept = own if self.adoption is not None and self.adoption.trial else None
        self.world.judge.replaced(self, value)
        self.adoption = None
        self.pieces.clear()
        return float(value - own) ** 2 * ELEMENTS, float(own) ** 2 * ELEMENTS

    def restore(self) -> None:
        """The weights on trial were worse: those that were there are again."""
        self.restoring = False
        if self.kept is None:
            self.world.fail("what is put back was kept", f"{self} is told to restore, and holds nothing")
            return
        self.world.judge.replaced(self, self.kept)
        self.kept = None
        self.call("restored")

    # -- links ---------------------------------------------------------------------------------------------------
    def up(self, link: Link, record: MemberRecord) -> None:
        place = link.place(self)
        other = link.ends[1 - place]
        if link.broken and not link.open[1 - place] and other.gone:
            return
        link.open[place] = True
        if link.broken:  # and this end was told before it had anything to lose
            self.later(self.world.network.latency(), self.lost, link)
        first = other.id not in self.links
        self.links.setdefault(other.id, []).append(link)
        waiting = self.waiting.pop(other.id, ())
        try:
            effects = self.peer.linked(other.id, record, self.world.now)
        except RemoteError as error:
            if not other.liar:
                self.world.fail("an honest message ends no link", f"{self} refused the Hello of {other}: {error}")
            self.world.network.cut_link(link)
            return
        self.world.note(f"{self} is linked with {other}{'' if first else ', once more'}")
        self.perform(effects)
        for message in waiting:
            self.send(other.id, message)

    def lost(self, link: Link) -> None:
        """This end's link is gone: what ran over it fails, and the peer is told if it was the last."""
        place = link.place(self)
        if not link.open[place]:
            return
        link.open[place] = False
        if not any(link.open):
            self.world.network.links.pop(link, None)
        other = link.ends[1 - place]
        mine = self.links.get(other.id, [])
        if link in mine:
            mine.remove(link)
        last = not mine
        if last:
            self.links.pop(other.id, None)
        self.world.note(f"{self} lost {'its' if last else 'a'} link with {other}")
        for session in [session for session, used in self.bound.items() if used is link]:
            self.bound.pop(session, None)
            self.call("failed", session, "broken")
        for number, session in list(self.sessions.items()):
            if session.gather is not None and session.link is None and other.id in session.sent and last:
                self.call("failed", number, "broken")
        if last and not self.gone:
            self.perform(self.peer.unlinked(other.id, self.world.now, orderly=link.orderly))

    def dial_failed(self, peer: PeerId | None) -> None:
        if peer is not None:
            self.waiting.pop(peer, None)
        self.call("dial_failed", peer)

    def send(self, to: PeerId, message: Any) -> None:
        world = self.world
        session = getattr(message, "session", None)
        link = self.bound.get(session) if session is not None else None
        if link is None or link.other(self).id != to or type(message) in (Offer, Fetch):
            links = self.links.get(to)
            link = links[-1] if links else None
        if link is not None:
            if type(message) is Offer:
                self.bound[message.session] = link
            world.network.send(link, self, message)
            return
        record = self.peer.membership.record(to)
        if record is None or record.address is None or self.left:
            return
        self.waiting.setdefault(to, deque(maxlen=PENDING)).append(message)
        world.network.dial(self, record.address, to)

    # -- effects -------------------------------------------------------------------------------------------------
    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            PERFORM[type(effect)](self, effect)
        if not self.gone:
            self.arm()

    def on_send(self, effect: Send) -> None:
        self.world.judge.sent(self, effect.to, effect.message)
        self.send(effect.to, effect.message)

    def on_dial(self, effect: Dial) -> None:
        if not self.left:
            self.world.network.dial(self, effect.address, effect.expect)

    def on_try(self, effect: TryDial) -> None:
        to = self.world.at(effect.address)
        ok = to is not None and to.dialable and not self.world.network.cut(self, to)
        self.later(2 * self.world.network.latency(), self.call, "dial_tried", effect.asker, ok)

    def on_snapshot(self, effect: Snapshot) -> None:
        if effect.session in self.sessions:
            self.world.fail("a number is one session's", f"{self} takes a second snapshot for {effect.session:x}")
        session = self.sessions[effect.session] = Session()
        session.pushes = effect.pushes
        self.wishes[effect.session] = effect

    def on_recall(self, effect: Recall) -> None:
        """As who has no earlier snapshot: that of the next boundary."""
        if effect.session not in self.sessions:
            self.on_snapshot(Snapshot(effect.session, False))

    def held(self, number: int, effect: Effect) -> Session:
        """What an effect refers to."""
        session = self.sessions.get(number)
        if session is None:
            self.world.fail("effects refer to live sessions", f"{self} is told {effect}")
            raise AssertionError
        return session

    def on_transfer(self, effect: Transfer) -> None:
        number = effect.session
        session = self.held(number, effect)
        if session.value is None or session.transfer is not None:
            self.world.fail("nothing streams without a snapshot, or twice", f"{self} is told {effect}")
        self.world.judge.began(self, effect)
        link = self.bound.get(number)
        if link is None:
            self.later(0.0, self.call, "failed", number, "broken")
            return
        session.transfer, session.partner, session.link = effect, effect.partner, link
        if effect.sends:
            self.stream(link, link.other(self), number, self.come, session.value)

    def stream(self, link: Link, to: Host, number: int, arrive: Callable[..., None], value: Any) -> None:
        """A whole stream, or a fault in its place: it stalls until the link is closed, or brings wrong bytes."""
        network, rng = self.world.network, self.world.rng
        delay_s = network.streamed_s(link, self)
        if to.liar or rng.random() >= self.manners.fails:
            to.later(delay_s, arrive, link, self, to, number, value)
        elif rng.random() < 0.5:
            to.later(delay_s + self.config.stall_s, to.stalled, link, number)
        else:
            to.later(delay_s, to.spoilt, link, number)

    def stalled(self, link: Link, number: int) -> None:
        if number in self.sessions and link.open[link.place(self)]:
            self.world.network.retire(link, self)

    def spoilt(self, link: Link, number: int) -> None:
        if number in self.sessions and link.open[link.place(self)]:
            self.call("failed", number, self.rng.choice(["checksum", "overflow"]))

    @staticmethod
    def come(link: Link, sender: Host, to: Host, number: int, value: Fraction | float) -> None:
        """The stream of a pair or of a push is whole."""
        session = to.sessions.get(number)
        if session is None or session.transfer is None or not to.world.network.carries(link, to):
            return
        right = session.partner == sender.id and session.link is link and session.transfer.receives
        if not right or session.theirs is not None or session.value is None:
            return
        session.theirs = value
        apart, own = float(value - session.value), float(session.value)
        if to.rng.random() < to.manners.fails / 4:
            apart = math.nan  # this side's filter refuses what came
        to.call("streamed", number, apart * apart * ELEMENTS, own * own * ELEMENTS)

    def on_gather(self, effect: Gather) -> None:
        number = effect.session
        session = self.held(number, effect)
        if session.value is None:
            self.world.fail("nothing streams without a snapshot, or twice", f"{self} is told {effect}")
            return
        if session.gather is None:
            session.gather = effect
            session.values[self.id] = session.value
            self.world.judge.formed(self, effect)
        elif session.gather.members != effect.members:
            self.world.fail("a group's members do not change", f"{self} is told {effect}")
        for member in effect.members:
            links = self.links.get(member)
            if member != self.id and member not in session.sent and links:
                session.sent[member] = False
                self.stream(links[-1], links[-1].other(self), number, self.slice_come, session.value)
        for arrive in self.early.pop(number, []):
            arrive()
        self.average(number, session)

    def average(self, number: int, session: Session) -> None:
        """With everybody's values our mean is made, and goes to all; with everybody's means the peer is told."""
        gather = session.gather
        assert gather is not None
        if len(session.values) < len(gather.members):
            return
        mean = sum(session.values.values()) / len(gather.members)
        session.means[self.id] = mean
        for member, sent in session.sent.items():
            links = self.links.get(member)
            if not sent and links:
                session.sent[member] = True
                self.stream(links[-1], links[-1].other(self), number, self.mean_come, mean)
        one = self.peer.exchanges.table.get(number)
        if len(session.means) == len(gather.members) and one is not None and one.state is State.STREAMING:
            assert session.value is not None
            session.theirs = mean
            apart, own = float(mean - session.value), float(session.value)
            self.call("gathered", number, apart * apart * ELEMENTS, own * own * ELEMENTS, [])

    @staticmethod
    def slice_come(link: Link, sender: Host, to: Host, number: int, value: Fraction | float) -> None:
        to.part_come(link, sender, number, "values", value)

    @staticmethod
    def mean_come(link: Link, sender: Host, to: Host, number: int, value: Fraction | float) -> None:
        to.part_come(link, sender, number, "means", value)

    def part_come(self, link: Link, sender: Host, number: int, what: str, value: Fraction | float) -> None:
        if not self.world.network.carries(link, self):
            return
        session = self.sessions.get(number)
        if session is None or session.gather is None:
            if number in self.peer.exchanges.table:
                self.early.setdefault(number, []).append(lambda: self.part_come(link, sender, number, what, value))
            return
        if sender.id in session.gather.members:
            getattr(session, what)[sender.id] = value
            self.average(number, session)

    def on_mix(self, effect: Mix) -> None:
        session = self.held(effect.session, effect)
        if session.value is None or session.theirs is None or session.mixed:
            self.world.fail("no mix without two vectors, and none twice", f"{self} is told {effect}")
            return
        session.mixed = True
        shift = Fraction(effect.weight) * (session.theirs - session.value) if self.model.exact else 0.0
        self.model.pending.append(shift)
        self.world.judge.mixed(self, effect, shift)

    def on_merge(self, effect: Merge) -> None:
        session = self.held(effect.session, effect)
        received = session.theirs is not None
        value = session.theirs if received else session.value
        if value is None or session.merged or not effect.mass >= 0:  # a clip may leave nothing of a row-stochastic one
            self.world.fail("no merge without a vector and a mass, and none twice", f"{self} is told {effect}")
            return
        session.merged = True
        self.model.merges.append((effect.mass, effect.mass * value))
        self.world.judge.merged(self, effect, received)

    def on_rename(self, effect: Rename) -> None:
        """The snapshot is offered to another, under a number of its own."""
        session = self.held(effect.session, effect)
        if effect.to in self.sessions or session.transfer is not None:
            self.world.fail("a number is one session's", f"{self} is told {effect}")
        self.sessions[effect.to] = self.sessions.pop(effect.session)
        self.bound.pop(effect.session, None)
        self.world.judge.renamed(self, effect)

    def on_release(self, effect: Release) -> None:
        number = effect.session
        session = self.sessions.pop(number, None)
        if session is None:
            self.world.fail("one Release for each session", f"{self} is told {effect}")
            return
        self.wishes.pop(number, None)
        self.bound.pop(number, None)
        self.early.pop(number, None)
        if session.given and not session.reported and self.world.judge.returned(self, number):
            self.model.merges.append((session.given, session.total))  # it was to carry this away, and goes nowhere
        self.world.judge.released(self, number, session)

    def on_collect(self, effect: Collect) -> None:
        number = effect.session
        if number in self.sessions:
            self.world.fail("a number is one session's", f"{self} collects under {number:x} again")
        session = self.sessions[number] = Session()
        if self.joining_since != self.peer.joining.began:  # what an abandoned joining got counts no more
            self.joining_since = self.peer.joining.began
            self.pieces.clear()
        links = self.links.get(effect.partner)
        session.collect, session.partner = effect, effect.partner
        if not links:
            self.later(0.0, self.call, "failed", number, "broken")
            return
        session.link = self.bound[number] = links[-1]

    def on_serve(self, effect: Serve) -> None:
        session = self.held(effect.session, effect)
        link = self.bound.get(effect.session)
        if session.value is None or link is None or link.other(self).id != effect.partner:
            self.later(0.0, self.call, "failed", effect.session, "broken")
            return
        session.serve = effect
        self.piece(effect.session, effect.start, link)

    def piece(self, number: int, start: int, link: Link) -> None:
        session = self.sessions.get(number)
        if session is None or session.serve is None or not link.open[link.place(self)]:
            return
        stop = min(start + self.config.chunk_elements, session.serve.stop)
        to = link.other(self)
        delay_s = self.world.network.streamed_s(link, self)
        to.later(delay_s, to.collected, link, self, number, start, stop, session.value)
        if stop < session.serve.stop:
            self.later(delay_s, self.piece, number, stop, link)
        else:
            self.later(delay_s, self.call, "served", number)

    def collected(
        self, link: Link, sender: Host, number: int, start: int, stop: int, value: Fraction | float
    ) -> None:  # fmt: skip
        session = self.sessions.get(number)
        if session is None or session.collect is None or session.link is not link:
            return
        if not self.world.network.carries(link, self):
            return
        if session.collect.compare:
            held = next((mine for a, b, mine in reversed(self.pieces) if a <= start < b), value)
            elements = stop - start
            apart_sq, own_sq = float(value - held) ** 2 * elements, float(held) ** 2 * elements
            self.call("compared", number, apart_sq, own_sq)
            return
        self.pieces = [one for one in self.pieces if one[:2] != (start, stop)]  # it may come again, of another
        self.pieces.append((start, stop, value))
        self.call("collected", number, stop)

    def on_adopt(self, effect: Adopt) -> None:
        self.adoption = effect

    def on_confirm(self, effect: Confirm) -> None:
        self.kept = None

    def on_restore(self, effect: Restore) -> None:
        self.restoring = True

    def on_changed(self, effect: MemberChanged) -> None:
        self.world.judge.changed(self, effect)

    def on_notice(self, effect: Notice) -> None:
        if self.world.tell is not None:
            self.world.note(f"{self} says: {effect.kind}: {effect.sentence}")

    # -- ends ----------------------------------------------------------------------------------------------------
    def crash(self) -> None:
        """kill -9: its links break at once, for others as they notice."""
        self.world.judge.ended(self)
        self.gone = True
        self.world.note(f"{self} crashes")
        for link in [link for link in self.world.network.links if self in link.ends]:  # also those in their handshake
            self.world.network.cut_link(link)
            link.open[link.place(self)] = False
        if self.world.by_id.get(self.id) is self and self.world.ports.get(self.port) is self:
            del self.world.ports[self.port]

    @property
    def port(self) -> int:
        return 1000 + self.number

    def leave(self) -> None:
        """An orderly end: LEFT is said, and what is queued is sent."""
        self.world.note(f"{self} leaves")
        self.world.judge.ended(self)
        self.perform(self.peer.leave(self.world.now))
        self.left = True
        for links in list(self.links.values()):
            for link in list(links):
                self.world.network.retire(link, self)
        for link in [link for link in self.world.network.links if self in link.ends and not link.orderly]:
            self.world.network.cut_link(link)  # in their handshake
        self.gone = True
        if self.world.ports.get(self.port) is self:
            del self.world.ports[self.port]


PERFORM: dict[type, Callable[[Host, Any], None]] = {
    Send: Host.on_send, Dial: Host.on_dial, TryDial: Host.on_try, Snapshot: Host.on_snapshot,
    Recall: Host.on_recall,
    Transfer: Host.on_transfer, Gather: Host.on_gather, Mix: Host.on_mix, Merge: Host.on_merge, Rename: Host.on_rename,
    Release: Host.on_release, Serve: Host.on_serve, Collect: Host.on_collect, Adopt: Host.on_adopt,
    Confirm: Host.on_confirm, Restore: Host.on_restore,
    MemberChanged: Host.on_changed, Notice: Host.on_notice,
}  # fmt: skip
