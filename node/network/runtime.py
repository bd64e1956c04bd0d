"""The network thread of a node: it performs a Peer's effects on real streams, keeps time, and decides nothing."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import trio

from gossip.averaging.boundary import Visit
from gossip.effects import (
    Dial,
    Effect,
    Gather,
    LookUp,
    MemberChanged,
    Merge,
    Mix,
    Notice,
    ReceivePiece,
    Release,
    Rename,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.errors import RemoteError
from gossip.ids import Address, MemberRecord, PeerId, short
from gossip.peer import Peer
from gossip.wire.messages import (
    Abort,
    Fetch,
    Hello,
    Message,
    Offer,
    Outcome,
    Settled,
)  # fmt: skip
from node.faults import Faults
from node.links.connector import Access, Connector
from node.links.handshake_pool import neighbourhood
from node.links.link import Link
from node.links.pool import Links
from node.network.link_life import LinkLife
from node.network.striping import Striping
from node.network.transfers.log import ExchangeLog
from node.network.transfers.streams import SharedModel, Streams
from node.observe.events import NodeEvent
from node.observe.losses import Losses
from node.observe.stalls import STANDS_S, Stalls
from node.transport.blocking_io import BlockingIoPool
from node.transport.seeds import SeedLookup

__all__ = ["Reporter", "Runtime"]

LOOK_S = 0.25  # The interval between two checks whether vectors move: below the shortest timeout of a probe.
PENDING_MESSAGES = 32  # Messages kept for a peer that is being dialled.
REPORTS = (
    "adopted", "collected", "compared", "count_votes", "counted", "dial_failed", "dial_tried", "failed",
    "finish", "frozen_hashed", "gathered", "leave", "linked", "mended", "merge", "misbehaves", "not_kept", "not_taken",
    "optimizer", "recalled", "restored", "resume", "seed_answered", "seed_is_me", "seeded", "served", "settle",
    "snapshotted", "spoiled", "start", "stepped", "streamed", "tell_figures", "tick", "unlinked",
)  # fmt: skip
"""The methods that report everything but messages to a Peer: a fault in one leaves its state inconsistent."""


class Reporter(Protocol):
    """The receiver of the events that users see, a :class:`node.network.service.Service`."""

    @property
    def faults(self) -> Faults: ...

    def notice(self, kind: str, sentence: str) -> None:
        """Announce an event that is only a sentence."""

    def announce(self, event: NodeEvent) -> None:
        """Announce a structured event."""


class Runtime:
    """The network side of a node, in one trio task tree; ``main`` runs until cancelled.

    All methods but ``main`` and tasks are synchronous and run in trio's thread. The training thread reaches it only by
    trio's token.
    """

    def __init__(
        self, peer: Peer, access: Access, live: SharedModel, reporter: Reporter
    ) -> None:  # fmt: skip
        self.peer, self.config, config = peer, peer.config, peer.config
        self.failure: BaseException | None = None  # The fault that ends this network side.
        for name in REPORTS:
            setattr(peer, name, self.guarded(getattr(peer, name)))
        self.on_event = on_event = reporter.notice
        self.faults = reporter.faults
        self.lookup, self.looking = access.lookup, False
        self.connector = Connector(access, config, self, frozenset(peer.seeds.seeds))
        if self.lookup is not None:
            self.lookup.tell = lambda sentence: self.connector.tell(sentence, "seed")
        # Hosts of members, and the turnover at which they were computed.
        self.hosts_seen, self.hosts = -1, frozenset[str]()
        self.links, self.hands = Links(), BlockingIoPool()
        self.streams = Streams(peer, live, self.links, self)
        self.averager, self.sessions = self.streams.averager, self.streams.sessions
        self.exchange_log = ExchangeLog(peer, config, reporter.announce)
        self.streams.on_begun, self.streams.on_over = self.exchange_log.begun, self.exchange_log.over
        self.stalls = Stalls(peer, lambda: self.counts is not None, reporter.announce, on_event)
        self.striping = Striping(self.links, self.connector, config)
        self.connector.join = self.striping.join
        self.losses = Losses(self.links, on_event, self.striping.widen)
        self.pending: dict[PeerId, deque[Message]] = {}  # For peers that are being dialled.
        self.clock = trio.lowlevel.current_clock()
        self.timer, self.armed = trio.CancelScope(), -math.inf  # The timer ends when the peer's next tick is due.
        self.parted = config.part != "all"
        self.stopping = False
        self.nursery: trio.Nursery | None = None
        self.after_perform: Callable[[], object] = lambda: None
        self.counts: Callable[[], tuple[int, int]] | None = None  # Steps and samples of the training loop, now.

    @property
    def now(self) -> float:
        return self.clock.current_time()

    async def main(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; raise the fault that ended it."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                self.connector.open(nursery)
                nursery.start_soon(self.keep_time)
                nursery.start_soon(self.streams.mixer)
                nursery.start_soon(self.watch)
                self.perform(self.peer.start(self.now))
                if self.failure is None:
                    task_status.started()
        except Exception as error:
            self.fail(error)
        finally:
            self.stopping = self.connector.closed = True
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """End this network side after a fault of this library, which left the peer or its effects inconsistent.

        From here on no effect is performed. Without a nursery the network side is not running, and the error is raised.
        """
        if self.nursery is None:
            raise error
        if self.failure is None:
            self.failure = error
            self.stopping = self.connector.closed = True
            self.nursery.cancel_scope.cancel()

    def guarded(self, report: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a report to the peer: a fault in it ends this network side, and the caller gets no effects."""

        @functools.wraps(report)
        def reported(*args: Any, **named: Any) -> Any:
            try:
                return report(*args, **named)
            except RemoteError:  # A member caused it, which ends its link.
                raise
            except Exception as error:
                self.fail(error)
                return []

        return reported

    # -- effects -------------------------------------------------------------------------------------------------
    def perform(self, effects: Iterable[Effect]) -> None:
        if self.failure is not None:
            return
        links = self.links
        links.gathering += 1
        try:
            for effect in effects:
                self.perform_one(effect)
        except RemoteError:  # A member caused it, which ends its link.
            raise
        except Exception as error:
            self.fail(error)
        finally:
            links.gathering -= 1
        if not links.gathering:
            self.settle()

    def settle(self) -> None:
        """Send messages and set the timer, once all effects of one report, tick or batch of messages are performed."""
        if self.failure is not None:
            return
        try:
            self.links.flush()
            deadline = self.peer.deadline
            if deadline < self.armed:  # Setting the timer for every message would cost as much as the message.
                self.armed = self.timer.deadline = deadline
            if self.parted:
                self.averager.expect(self.peer.exchanges.next_part)
            self.after_perform()
        except Exception as error:
            self.fail(error)

    def perform_one(self, effect: Effect) -> None:
        streams = self.streams
        match effect:
            case Send(to, message):
                self.send(to, message)
            case Snapshot():
                streams.snapshot(effect)
            case Transfer():
                streams.transfer(effect)
            case Gather(session):
                # Members that did not answer the invitation were counted before it began.
                self.exchange_log.offer_over(session)
                streams.gather(effect)
            case Mix():
                streams.mix(effect)
            case Merge():
                streams.merge(effect)
            case Rename():
                streams.rename(effect)
                self.exchange_log.offer_over(effect.session)
            case Release(session):
                begun, link = session in streams.accounts, self.sessions.links.get(session)
                streams.release(session)
                if not begun:
                    self.exchange_log.offer_over(session, None if link is None else link.peer)
            case Dial(address, expect):
                self.connector.dial(address, expect)
            case ReceivePiece():
                streams.collect(effect)
            case Serve():
                streams.serve(effect)
            case LookUp():
                self.look()
            case TryDial(asker, address):
                self.spawn(self.try_dial, asker, address)
            case Notice(kind, sentence):
                self.on_event(kind, sentence)
            case MemberChanged(peer, before, after):
                self.exchange_log.member_changed(peer, before, after)
            case _:
                self.averager.perform(effect)

    def spawn(self, task: Callable[..., Any], *args: object) -> None:
        if self.nursery is not None and not self.stopping:
            self.nursery.start_soon(task, *args)

    def look(self) -> None:
        """Start a look-up of the seeds, unless one is running."""
        if self.lookup is not None and not self.looking:
            self.looking = True
            self.spawn(self.look_up, self.lookup)

    async def look_up(self, lookup: SeedLookup) -> None:
        try:
            found = await lookup.look()
        except Exception as error:
            self.faults.contain(error, "The search for seeds", "it is repeated")
            return
        finally:
            self.looking = False
        self.connector.seeded(found)
        self.perform(self.peer.seeded(found.addresses, found.expected))

    # -- the connector's ----------------------------------------------------------------------------------------
    def record(self) -> MemberRecord:
        return self.peer.membership.me

    def knows(self, peer: PeerId) -> bool:
        return self.peer.membership.remembers(peer)

    def seed_answered(self, seed: Address) -> None:
        self.peer.seed_answered(seed)

    def strange(self, host: str) -> None:
        """Count a handshake that led to no member."""
        self.note(host, "strangers")

    def met_itself(self, seed: Address) -> None:
        if self.lookup is not None:
            self.lookup.met_itself(seed)
        self.peer.seed_is_me(seed)

    def dial_failed(self, peer: PeerId | None) -> None:
        if peer is not None:
            self.pending.pop(peer, None)
        self.perform(self.peer.dial_failed(peer, self.now))

    def member_hosts(self) -> frozenset[str]:
        """Return the hosts of contacted members, as far as their addresses are numeric."""
        peer = self.peer
        if peer.membership.turnover != self.hosts_seen:
            self.hosts_seen = peer.membership.turnover
            records = (peer.membership.record(other) for other in peer.membership.contacted())
            addresses = (record.address for record in records if record is not None)
            self.hosts = frozenset(neighbourhood(address.host) for address in addresses if address is not None)
        return self.hosts

    async def try_dial(self, asker: PeerId, address: Address) -> None:
        link = self.links.newest(asker)
        ok = await self.connector.try_dial(address, "" if link is None else link.stream.peer_host)
        self.perform(self.peer.dial_tried(asker, ok, self.now))

    def send(self, to: PeerId, message: Message) -> None:
        session = getattr(message, "session", None)
        link = self.sessions.links.get(session) if session is not None else None
        if link is None or link.peer != to or isinstance(message, Offer | Fetch | Outcome | Settled):
            link = self.links.newest(to)
            if isinstance(message, Offer):
                self.exchange_log.offered[message.session] = to, self.now
        if link is not None:
            if isinstance(message, Offer):  # A Fetch that is not only a query was bound to its link by ReceivePiece.
                self.sessions.links[message.session] = link
            link.send(message)
            if isinstance(message, Abort):  # Chunks in flight do not belong to any session now.
                self.sessions.late(message.session)
            return
        record = self.peer.membership.record(to)
        if record is None or record.address is None or self.stopping:
            return
        self.pending.setdefault(to, deque(maxlen=PENDING_MESSAGES)).append(message)
        self.connector.dial(record.address, to)

    # -- reports of the training thread --------------------------------------------------------------------------
    def at_boundary(
        self, steps: int, samples: int, loss: float | None, visit: Visit,
        optimizer: tuple[tuple[str, ...], tuple[tuple[str, float], ...]] | None = None,
    ) -> None:  # fmt: skip
        if optimizer is not None:
            self.peer.optimizer(*optimizer)
        self.averager.visited(visit, steps, samples, loss)

    # -- a link's life -------------------------------------------------------------------------------------------
    async def run_link(self, link: Link, theirs: Hello) -> None:
        """Run a link from the finished Hello to the end of the stream."""
        await LinkLife(self, link).run(theirs)

    def note(self, who: PeerId | str, kind: str) -> None:
        """Report a misbehaviour that :mod:`gossip.misbehaviour` counts."""
        self.perform(self.peer.misbehaves(who, kind, self.now))

    # -- time ----------------------------------------------------------------------------------------------------
    async def keep_time(self) -> None:
        while True:
            self.armed = min(self.peer.deadline, self.now + 3600)
            self.timer = trio.CancelScope(deadline=self.armed)
            with self.timer:
                await trio.sleep_forever()
            if self.now >= self.peer.deadline:
                self.perform(self.peer.tick(self.now))
                if self.peer.deadline <= self.now:  # A deadline that a tick does not move must not cause a busy loop.
                    await trio.sleep(0.01)

    async def watch(self) -> None:
        """Watch for stalled streams, idle links and a stalled training loop."""
        chunk_s = 4e-6 * self.config.chunk_elements / self.config.slowest_rate_mb_s
        every_s, due = min(self.config.stall_s / 4, STANDS_S / 4), self.now
        while True:
            await trio.sleep(min(every_s, LOOK_S))
            now = self.now
            for link in self.links.all():
                if link.look(now):
                    self.peer.heard(link.peer, now)
            if now < due:
                continue
            due = now + every_s
            self.stalls.look(now)
            self.losses.look(now)
            for session in self.sessions.stalled(now, self.config.stall_s):
                text = f"A transfer with {short(session.partner)} stopped moving; its link is closed."
                self.on_event("transfer", text)
                self.note(session.partner, "wasted")
                session.link.close_now()
            for link in self.streams.gathers.stalled(now, self.config.stall_s):
                self.on_event("transfer", f"A group's stream from {short(link.peer)} stopped; its link is closed.")
                link.close_now()
            busy = self.streams.busy()
            for link in self.links.all():
                if link.held_up(now, self.config.stall_s, chunk_s):
                    link.close_now()
                if now - link.used_at > self.config.internal.idle_s and link not in busy:
                    link.retire()

    async def leave(self, within_s: float) -> None:
        """Announce LEFT, wait for it to be sent, and close every link."""
        if self.counts is not None:
            self.peer.counted(*self.counts())
        self.perform(self.peer.leave(self.now))
        self.stopping = self.connector.closed = True
        for link in self.links.all():
            link.finish()
        with trio.move_on_after(within_s):
            while len(self.links):  # noqa: ASYNC110 - a second at most, at the very end
                await trio.sleep(0.005)
        for link in self.links.all():
            link.close_now()
