"""One life of one member: its Peer, and a driver that performs effects in the order and manner of node/."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gossip import effects
from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.messages import Fetch, Offer, Outcome, Settled
from tests.harness.network import Link
from tests.harness.sessions import Session, Sessions

if TYPE_CHECKING:
    from tests.harness.world import World

PENDING = 32  # Messages kept for a peer while it is dialled, as in node.network.runtime.
TICKS = 3  # A tick may make another one due at once. More in a row mean that the driver spins.


class Host(Sessions):
    """A member with a training loop. A step adds ``learning`` to the weights, and ``loss`` returns their loss."""

    def __init__(
        self, world: World, number: int, peer: Any, *, value: int = 0, step_s: float = 0.1, dialable: bool = True
    ) -> None:  # fmt: skip
        super().__init__(value, world.config.conserves, world.config.mixing != "row-stochastic")
        self.world, self.number, self.peer, self.id = world, number, peer, peer.membership.me.id
        self.rng = world.rng
        self.step_s, self.dialable, self.learning, self.samples = step_s, dialable, 0, 1
        self.loss: Callable[[Host], float | None] = lambda host: None
        self.steps = 0
        self.stepping = True  # False pauses the training loop and nothing else.
        self.gone = self.left = False
        self.dark = False  # The machine is off, so that dials to it time out instead of being refused.
        self.links: dict[PeerId, list[Link]] = {}
        self.dialling: dict[Address, dict[PeerId | None, None]] = {}
        self.waiting: dict[PeerId, deque[Any]] = {}  # Messages to send once the dial succeeds.
        self.armed = math.inf
        self.log: list[tuple[float, effects.Effect]] = []

    def __repr__(self) -> str:
        return f"node{self.number}"

    def start(self) -> None:
        self.perform(self.peer.start(self.world.now))
        self.later(self.step_s * self.rng.random(), self.boundary)

    # -- time --------------------------------------------------------------------------------------------------------
    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Call ``what`` after the delay, unless this life has ended by then."""
        self.world.plan(self.world.now + delay_s, self.happen, what, arguments)

    def happen(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.gone:
            what(*arguments)

    def arm(self) -> None:
        deadline = self.peer.deadline
        if deadline < self.armed:
            self.armed = deadline
            self.world.plan(max(deadline, self.world.now), self.happen, self.fire, ())

    def fire(self) -> None:
        now = self.world.now
        if self.armed > now:
            return  # An earlier timer has fired for this deadline.
        self.armed = math.inf
        for _ in range(TICKS):
            if self.gone or self.peer.deadline > now:
                break
            self.perform(self.peer.tick(now))
        if not self.gone:
            if self.peer.deadline <= now:
                self.world.fail("no deadline that a tick does not move", f"{self} still has {self.peer.deadline}")
            self.arm()

    # -- what the driver reports and performs ------------------------------------------------------------------------
    def call(self, event: str, *arguments: Any) -> None:
        if not self.gone:
            self.perform(getattr(self.peer, event)(*arguments, self.world.now))

    def perform(self, told: Iterable[effects.Effect]) -> None:
        for effect in told:
            self.do(effect)
        if not self.gone:
            self.arm()

    def do(self, effect: effects.Effect) -> None:
        world, network = self.world, self.world.network
        self.log.append((world.now, effect))
        match effect:
            case effects.Send(to, message):
                self.send(to, message)
            case effects.Dial(address, expect):
                if not self.left:
                    network.dial(self, address, expect)
            case effects.TryDial(asker, address):
                to = world.at(address)
                ok = to is not None and to.dialable and not network.parted(self, to)
                self.later(2 * network.latency(self, to), self.call, "on_dial_tried", asker, ok)
            case _:
                self.average(effect)

    def send(self, to: PeerId, message: Any) -> None:
        """Send over the link on which the session began, else over the newest; without a link, dial the peer first."""
        session = getattr(message, "session", None)
        link = self.bound.get(session) if session is not None else None
        if link is None or link.other(self).id != to or type(message) in (Offer, Fetch, Outcome, Settled):
            link = self.links[to][-1] if to in self.links else None
        if link is not None:
            if type(message) is Offer:
                self.bound[message.session] = link
            self.world.network.send(link, self, message)
            return
        record = self.peer.membership.record(to)
        if record is not None and record.address is not None and not self.left:
            self.waiting.setdefault(to, deque(maxlen=PENDING)).append(message)
            self.world.network.dial(self, record.address, to)

    def received(self, link: Link, sender: Host, message: Any) -> None:
        if self.left:
            return
        session, binds = getattr(message, "session", None), type(message) in (Offer, Fetch, Outcome)
        if binds:
            self.bound.setdefault(session, link)
            self.peer.update_counts(self.steps, self.samples * self.steps)
        self.perform(self.peer.receive(sender.id, message, self.world.now))
        peer = self.peer
        if binds and not any(
            session in one for one in (peer.exchanges.table, peer.donating.table, peer.moments.served)
        ):
            self.bound.pop(session, None)

    # -- the training loop -------------------------------------------------------------------------------------------
    def apply(self) -> None:
        """Add the results of exchanges to the weights."""
        self.model.apply()

    def boundary(self) -> None:
        """Do a node's work between two steps: adopt weights, add shifts, take snapshots, then report to the peer."""
        self.later(self.step_s, self.boundary)
        if not self.stepping or self.left:
            return
        if self.restoring:  # The weights on trial were worse, so the earlier ones return.
            self.restoring = False
            self.replace(self.kept)
            self.kept, self.base = None, self.kept_base
            self.call("on_restored")
        adopted = self.adoption is not None and self.keeps()
        if adopted and self.adoption.trial:
            self.apply()  # Finished exchanges belong to the weights that may be restored.
        apart = self.adopt() if adopted else ()
        self.apply()
        taken = self.take(list(self.wishes))
        if self.peer.view.ready and not adopted and not self.peer.view.is_held:
            self.learn()
        if adopted:
            self.perform(self.peer.on_adopted(self.world.now, *apart))
        self.call("on_stepped", self.steps, self.samples * self.steps, self.loss(self))
        self.report_taken(taken)

    def keeps(self) -> bool:
        """Return True if there is memory for the old weights while the new ones are on trial."""
        return True

    def learn(self) -> None:
        self.steps += 1
        self.model.learn(self.learning)

    def take(self, numbers: list[int]) -> list[int]:
        """Take these snapshots of the current weights; return their sessions."""
        for session in map(self.wishes.pop, numbers):
            session.value = self.model.value
            if session.pushes:
                session.given = self.model.give(session.pushes)
                session.total = session.given * session.value
        return numbers

    def report_taken(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in self.sessions:
                self.copied(number, self.sessions[number])

    def copied(self, number: int, session: Session) -> None:
        if not self.left and self.sessions.get(number) is session:
            session.reported = True
            self.perform(self.peer.on_snapshotted(number, self.world.now, session.given))

    # -- links -------------------------------------------------------------------------------------------------------
    def up(self, link: Link, record: MemberRecord) -> None:
        other = link.other(self)
        link.open[link.place(self)] = True
        self.links.setdefault(other.id, []).append(link)
        waiting = self.waiting.pop(other.id, ())
        self.perform(self.peer.on_linked(other.id, record, self.world.now))
        for message in waiting:
            self.send(other.id, message)

    def lost(self, link: Link) -> None:
        """Drop this end's link: fail the sessions that used it, and tell the peer if it was the last link."""
        place, other = link.place(self), link.other(self)
        if not link.open[place]:
            return
        link.open[place] = False
        if not any(link.open):
            self.world.network.links.pop(link, None)
        self.links[other.id].remove(link)
        last = not self.links[other.id]
        if last:
            del self.links[other.id]
        for number in [number for number, used in self.bound.items() if used is link]:
            self.bound.pop(number, None)
            exchange = self.peer.exchanges.table.get(number)
            if exchange is None or not exchange.IS_GROUP:
                self.call("on_failed", number, "broken")
        if last and not self.gone:
            self.perform(self.peer.on_unlinked(other.id, self.world.now, orderly=link.orderly))

    # -- ends --------------------------------------------------------------------------------------------------------
    def crash(self) -> None:
        """End as by kill -9: all links break at once, and each partner notices a little later."""
        self.gone = True
        for link in [link for link in self.world.network.links if self in link.ends]:
            self.world.network.cut_link(link)
            link.open[link.place(self)] = False

    def power_off(self) -> None:
        """End as by a power failure: no partner is notified."""
        self.gone = self.dark = True

    def leave(self) -> None:
        """End in an orderly way: announce LEFT, and send all queued messages."""
        self.perform(self.peer.leave(self.world.now))
        self.left = True
        for link in [link for links in self.links.values() for link in links]:
            self.world.network.retire(link, self)
        self.gone = True

    # -- what came of it ---------------------------------------------------------------------------------------------
    def said(self, kind: type) -> list[tuple[float, Any]]:
        """Return the effects of this kind so far, with their times."""
        return [(at, effect) for at, effect in self.log if isinstance(effect, kind)]

    @property
    def notices(self) -> list[tuple[float, str, str]]:
        return [(at, notice.kind, notice.sentence) for at, notice in self.said(effects.Notice)]

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self.notices]

    @property
    def run_id(self) -> bytes:
        return self.peer.view.run_id
