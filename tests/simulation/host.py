"""A host of a random schedule: it may be stopped, its loop and streams behave as drawn, and a judge watches it."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gossip.discovery.seeds import Bootstrap
from gossip.effects import Effect, Release
from gossip.errors import RemoteError
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.wire.records import trusting, unsigned
from tests.harness import host as harness
from tests.harness.model import Model, Number

if TYPE_CHECKING:
    from tests.harness.sessions import Session
    from tests.simulation.network import Link
    from tests.simulation.world import World

FROZEN = 2048  # frozen elements in every other seed, in which some newcomers have the run's base and some another
ELEMENTS = 4096  # enough for a clip radius, and two chunks of the least length for each of two donors
KEEPS_NOT = 0.1  # share of trials that find no memory for a copy of the present weights


class Forgotten(list[tuple[float, Effect]]):
    """A log that keeps nothing: a long schedule has millions of effects."""

    def append(self, one: tuple[float, Effect]) -> None:
        pass


class Manners:
    """One life's behaviour outside the protocol: seconds, shares and counts that the schedule draws."""

    __slots__ = ("copy_s", "fails", "learning", "losses", "samples", "spare", "step_s")

    def __init__(self, rng: random.Random) -> None:
        self.step_s = rng.choice([0.03, 0.06, 0.1, 0.2])
        self.learning = rng.choice([0, 0, 1, -1])  # what a step adds to the value
        self.samples = rng.choice([1, 1, 4])  # samples of a step
        self.losses = rng.choice([None, (1.0, 1.1), (0.1, 10.0)])  # range of its batches' losses, if they have any
        self.spare = rng.random() < 0.5  # a snapshot asked for at a boundary is taken at that boundary
        self.copy_s = rng.choice([0.0, 0.0, 0.0, 0.3])  # time until a snapshot's copy is complete
        self.fails = 0.0  # share of streams that fail by themselves


class Host(harness.Host):
    """A host that starts with ``record`` as its own record and ``book`` as its memory of other members."""

    world: World
    liar = False

    def __init__(
        self, world: World, number: int, record: MemberRecord, manners: Manners, rng: random.Random,
        *, seeds: tuple[Address, ...] = (), book: tuple[MemberRecord, ...] = (), value: int = 0, dialable: bool = True,
        must_join: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.manners, self.seeds = world.config, manners, seeds
        self.stopped = 0  # the number of freezes in effect
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.awake_at = world.now
        self.reported_at = -math.inf
        self.since: dict[int, float] = {}  # when an exchange was first seen in the table
        self.overlapped = False  # exchanges could overlap
        members = Membership(record, sign=unsigned, verify=trusting, config=world.config, rng=rng, now=world.now)
        peer = Peer(
            members, world.config, LocalModel("f", ELEMENTS, frozen_elements=FROZEN * (world.seed % 2)), rng=rng,
            bootstrap=Bootstrap(seeds, book=book, must_join=must_join), now=world.now,
        )  # fmt: skip
        super().__init__(world, number, peer, value=value, step_s=manners.step_s, dialable=dialable)
        if not world.exact:
            self.model = Model(value, world.config.conserves, False)
        draws = random.Random(f"base {world.seed} {record.id.hex()} {record.incarnation}")
        self.base, self.hash_s = draws.choice([7, 7, 8]) if world.seed % 2 else 7, draws.choice([0.0, 0.0, 3.0])
        self.log = Forgotten()
        self.must_join = must_join
        self.rng, self.learning, self.samples = rng, manners.learning, manners.samples
        losses = manners.losses
        self.loss = lambda host: rng.uniform(*losses) if losses is not None and peer.view.ready else None

    def __repr__(self) -> str:
        return f"{'liar' if self.liar else 'node'}{self.number}"

    def start(self) -> None:
        super().start()
        if self.world.votes_every_s:
            self.later(self.world.votes_every_s, self.vote)

    def perform(self, told: Iterable[Effect]) -> None:
        self.overlapped = self.overlapped or self.peer.exchanges.is_overlapping  # It may end before the next check.
        super().perform(told)

    def vote(self) -> None:
        """Count the votes on the end of the run, as a driver does now and then."""
        self.later(self.world.votes_every_s, self.vote)
        if not self.left:
            self.call("count_votes")

    # -- stopped -------------------------------------------------------------------------------------------------
    def happen(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.stopped and not self.gone:
            self.backlog.append((what, arguments))
        else:
            super().happen(what, arguments)

    def fire(self) -> None:
        if not self.gone and not self.stopped:
            super().fire()

    def freeze(self, seconds: float) -> None:
        """Stop the process as SIGSTOP does, and continue it after so long; missed events then happen in order."""
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

    # -- watched -------------------------------------------------------------------------------------------------
    def do(self, effect: Effect) -> None:
        ended = self.sessions.get(effect.session) if type(effect) is Release else None
        self.world.judge.watch(self, effect)
        super().do(effect)
        if ended is not None:
            self.world.judge.released(self, effect.session, ended)

    def received(self, link: Link, sender: Host, message: Any) -> None:
        if self.left:
            return
        self.world.mark(message, self.number)
        if self.world.tell is not None:
            self.world.note(f"{self} hears from {sender}: {message}")
        try:
            super().received(link, sender, message)
        except RemoteError as error:
            self.refuses(link, sender, f"{message}: {error}")

    def up(self, link: Link, record: MemberRecord) -> None:
        other = link.other(self)
        self.world.note(f"{self} has a link with {other}{', once more' if other.id in self.links else ''}")
        try:
            super().up(link, record)
        except RemoteError as error:
            self.refuses(link, other, f"Hello: {error}")

    def refuses(self, link: Link, other: Host, what: str) -> None:
        if not other.liar and not self.liar:
            self.world.fail("an honest message ends no link", f"{self} refused {other}'s {what}")
        self.world.network.cut_link(link)

    def lost(self, link: Link) -> None:
        if link.open[link.place(self)]:
            self.world.note(f"{self} lost a link with {link.other(self)}")
        super().lost(link)

    def learn(self) -> None:
        if self.learning:
            self.world.judge.learned(self, self.model.mass * self.learning)
        super().learn()
        self.world.truth.train(self, self.samples)

    def replace(self, value: Number) -> None:
        if value is None:
            self.world.fail("what is put back was kept", f"{self} is told to restore, and holds nothing")
        self.world.judge.replaced(self, value)

    def apply(self) -> None:
        if self.config.conserves:  # A settlement moves both sides by the same amount, whatever their masses are.
            self.world.judge.learned(self, self.model.mass * sum(self.model.pending))
        super().apply()

    # -- manners -------------------------------------------------------------------------------------------------
    def boundary(self) -> None:
        """Visit the boundary as a node does: if a mix or a report is due, or the peer has asked for something."""
        peer, model, now = self.peer, self.model, self.world.now
        due_steps, mix_at = peer.initiator.next_mix
        is_due = (self.steps + 1 >= due_steps and now >= mix_at) or now - self.reported_at > self.world.report_s
        has_requests = self.wishes or self.restoring or self.adoption is not None
        if not (is_due or has_requests or model.pending or model.merges):
            self.later(self.step_s, self.boundary)
            if self.stepping and not self.left and peer.view.ready and not peer.view.is_held:
                self.learn()
            return
        self.reported_at = now
        super().boundary()
        if self.stepping and not self.left and self.manners.spare and not self.gone:
            self.report_taken(self.take([number for number, session in self.wishes.items() if not session.pushes]))

    def keeps(self) -> bool:
        if not self.adoption.trial or self.rng.random() >= KEEPS_NOT:
            return True
        self.adoption = None
        self.pieces.clear()
        self.call("on_not_kept")
        return False

    def take(self, numbers: list[int]) -> list[int]:
        taken = super().take(numbers)
        for number in taken:
            if self.sessions[number].pushes:
                self.world.judge.given(self, number, self.sessions[number])
        return taken

    def copied(self, number: int, session: Session) -> None:
        if self.manners.copy_s:
            self.later(self.manners.copy_s * self.rng.random(), super().copied, number, session)
        else:
            super().copied(number, session)

    def stream(self, link: Link, number: int, what: str, value: Any) -> None:
        """Stream everything or inject a fault: the stream stalls until the link is closed, or brings wrong bytes."""
        network, rng, to = self.world.network, self.world.rng, link.other(self)
        delay_s = network.streamed_s(link, self)
        if to.liar or rng.random() >= self.manners.fails:
            to.later(delay_s, to.arrived, link, self, number, what, value)
        elif rng.random() < 0.5:
            to.later(delay_s + self.config.stall_s, to.stalled, link, number)
        else:
            to.later(delay_s, to.spoilt, link, number)

    def stalled(self, link: Link, number: int) -> None:
        if number in self.sessions and link.open[link.place(self)]:
            self.world.network.retire(link, self)

    def spoilt(self, link: Link, number: int) -> None:
        if number in self.sessions and link.open[link.place(self)]:
            self.call("on_failed", number, self.rng.choice(["checksum", "overflow"]))

    def report(self, event: str, number: int, session: Session, *more: Any) -> None:
        if event == "on_streamed" and self.rng.random() < self.manners.fails / 4:
            own = float(session.value)
            self.call(event, number, math.nan, own * own * ELEMENTS)  # this side's filter refuses what came
        else:
            super().report(event, number, session, *more)

    # -- ends ----------------------------------------------------------------------------------------------------
    def crash(self) -> None:
        self.world.note(f"{self} crashes")
        self.world.judge.ended(self)
        super().crash()

    def leave(self) -> None:
        self.world.note(f"{self} leaves")
        self.world.judge.ended(self)
        super().leave()
        for link in [link for link in self.world.network.links if self in link.ends and not link.orderly]:
            self.world.network.cut_link(link)  # links in their handshake
