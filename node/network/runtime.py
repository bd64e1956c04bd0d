"""The network thread of a node: it performs a Peer's effects on real streams, keeps time, and decides nothing.

The :class:`~gossip.peer.Peer` decides: it takes *reports* of what has happened and returns *effects*, which say what to
do (send, dial, copy, stream). A *session* is one exchange with a partner, or one piece of weights for a newcomer.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import trio

from gossip.effects import (
    Dial,
    Effect,
    LookUp,
    MemberChanged,
    Notice,
    OpenPort,
    Punch,
    Send,
    TryDial,
    Tunnel,
)  # fmt: skip
from gossip.errors import RemoteError
from gossip.ids import Address, PeerId, short
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
from node.links.hidden import HiddenLinks, Relay
from node.links.link import Link
from node.links.pool import Links
from node.network.link_life import CLOSE_S, LinkLife
from node.network.striping import Striping
from node.network.transfers.log import ExchangeLog
from node.network.transfers.streams import SharedModel, Streams
from node.observe.events import NodeEvent
from node.observe.losses import Losses
from node.observe.stalls import STALL_AFTER_S, Stalls
from node.transport.blocking_io import BlockingIoPool
from node.transport.router import PortKeeper

POLL_S = 0.25  # The most seconds between two checks whether vectors move, below the shortest timeout of a probe.
PENDING_MESSAGES = 32  # Messages kept for a peer that is being dialled. Beyond that the oldest one is dropped.
MAX_TIMER_S = 3600.0  # The timer ends at least so often. A peer without a deadline has an infinite one.
FLOAT32_MB = 4e-6  # The size of one element in MB.
REPORTS = (
    "count_votes", "finish", "hand_over", "leave", "merge", "note_misbehaviour", "on_adopted", "on_collected",
    "on_compared", "on_dial_failed", "on_dial_tried", "on_failed", "on_frozen_changed", "on_frozen_hashed",
    "on_gathered", "on_linked", "on_mended", "on_moments", "on_not_kept", "on_not_met", "on_not_taken", "on_own_seed",
    "on_port", "on_recalled", "on_restored", "on_seed_busy", "on_seeds_found", "on_served", "on_snapshotted",
    "on_spoiled", "on_stepped", "on_streamed", "on_tunnel", "on_unlinked", "pause", "publish_figures", "resume",
    "set_moments", "set_optimizer", "settle", "start", "tick", "update_counts",
)  # fmt: skip
"""The methods of a Peer that take reports. A fault in one leaves the peer inconsistent, which ends the network side."""


class Reporter(Protocol):
    """The receiver of the events that users see, a :class:`node.network.service.Service`."""

    @property
    def faults(self) -> Faults: ...

    def notify(self, kind: str, sentence: str) -> None:
        """Tell the user of an event in one sentence."""

    def announce(self, event: NodeEvent) -> None:
        """Tell the user and the program of a structured event."""


class Runtime:
    """The network side of a node, in one trio task tree; ``main`` runs until cancelled.

    A *batch* is all that one report, one tick or one read of a link causes. Its messages leave together at its end.

    Everything runs in trio's thread. The training thread reaches it only by trio's token.
    """

    def __init__(self, peer: Peer, access: Access, live: SharedModel, reporter: Reporter) -> None:
        self.peer, self.config, config = peer, peer.config, peer.config
        self.failure: BaseException | None = None  # The fault that ends this network side.
        for name in REPORTS:
            setattr(peer, name, self.guard_report(getattr(peer, name)))
        self.notify, self.faults = reporter.notify, reporter.faults
        self.seed_lookup, self.is_looking_up = access.lookup, False
        self.connector = Connector(access, config, self, frozenset(peer.seeds.seeds))
        if self.seed_lookup is not None:
            self.seed_lookup.log = lambda sentence: self.connector.notify_once(sentence, "seed")
        self.links, self.io_pool = Links(), BlockingIoPool()
        self.exchange_log = ExchangeLog(peer, config, reporter.announce)
        self.streams = Streams(peer, live, self.links, self.exchange_log, self.faults, self.perform, self.spawn)
        self.averager, self.transfers = self.streams.averager, self.streams.transfers
        self.stalls = Stalls(peer, lambda: self.read_progress is not None, reporter.announce, self.notify)
        self.striping = Striping(self.links, self.connector, config)
        self.connector.on_joining = self.on_joining
        self.hidden = HiddenLinks(self.connector, self.on_not_met)
        self.relay = Relay(peer, self.links)
        self.port_keeper = PortKeeper(self.on_port, peer.id[:12])
        self.losses = Losses(self.links, self.notify, self.striping.widen)
        self.undelivered: dict[PeerId, deque[Message]] = {}  # Messages to peers that are being dialled.
        self.clock = trio.lowlevel.current_clock()
        self.timer = trio.CancelScope()  # It ends when the peer's next tick is due.
        self.timer_deadline = -math.inf  # That of `timer`; -inf until it first runs.
        self.mixes_parts = config.part != "all"  # True if each mix covers only a part of the model.
        self.is_stopping = False
        self.nursery: trio.Nursery | None = None  # Runs all tasks; None before :meth:`main`.
        self.on_batch_end: Callable[[], object] = lambda: None  # Called when a batch of effects is performed.
        # Returns the steps and samples of the training loop; None until it trains.
        self.read_progress: Callable[[], tuple[int, int]] | None = None

    @property
    def now(self) -> float:
        return self.clock.current_time()

    async def main(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; raise the fault that ended it."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                self.connector.open(nursery)
                nursery.start_soon(self.run_timer)
                nursery.start_soon(self.streams.run_jobs)
                nursery.start_soon(self.watch_for_stalls)
                self.perform(self.peer.start(self.now))
                if self.failure is None:
                    task_status.started()
        except Exception as error:
            self.fail(error)
        finally:
            self.is_stopping = self.connector.is_closed = True
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """End this network side after a fault of this library, which left the peer or its effects inconsistent.

        From here on no effect is performed. Before :meth:`main` the error is raised instead.
        """
        if self.nursery is None:
            raise error
        if self.failure is None:
            self.failure = error
            self.is_stopping = self.connector.is_closed = True
            self.nursery.cancel_scope.cancel()

    def guard_report(self, report: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a report to the peer, so that a fault in it ends this network side and the caller gets no effects."""

        @functools.wraps(report)
        def guarded(*args: Any, **named: Any) -> Any:
            try:
                return report(*args, **named)
            except RemoteError:  # A member's fault ends that member's link.
                raise
            except Exception as error:
                self.fail(error)
                return []

        return guarded

    # -- effects -------------------------------------------------------------------------------------------------
    def perform(self, effects: Iterable[Effect]) -> None:
        """Perform effects in order, and end the batch, unless this runs inside another batch of effects."""
        if self.failure is not None:
            return
        links = self.links
        links.batch_depth += 1
        try:
            for effect in effects:
                self.perform_one(effect)
        except RemoteError:  # A member's fault ends that member's link.
            raise
        except Exception as error:
            self.fail(error)
        finally:
            links.batch_depth -= 1
        if not links.batch_depth:
            self.end_batch()

    def end_batch(self) -> None:
        """Send the queued messages and set the timer, after all effects of a report, a tick or some messages."""
        if self.failure is not None:
            return
        try:
            self.links.flush()
            deadline = self.peer.deadline
            if deadline < self.timer_deadline:  # Setting the timer for every message would cost as much as the message.
                self.timer_deadline = self.timer.deadline = deadline
            if self.mixes_parts:
                self.averager.prepare_next_part(self.peer.exchanges.next_part)
            self.on_batch_end()
        except Exception as error:
            self.fail(error)

    def perform_one(self, effect: Effect) -> None:
        """Perform one effect. Those of vectors go to the streams."""
        match effect:
            case Send(to, message):
                self.send(to, message)
            case Dial(address, expect):
                self.connector.dial(address, expect)
            case Punch():
                self.hidden.open(effect, None if effect.via is None else self.links.newest(effect.via))
            case Tunnel():
                self.hidden.open(effect)
            case LookUp():
                self.spawn(self.look_up_seeds)
            case OpenPort(port):
                self.port_keeper.open(port, self.spawn)
            case TryDial(asker, address):
                self.spawn(self.try_dial, asker, address)
            case Notice(kind, sentence, session):
                if session is not None:
                    sentence = sentence.replace("{tensor}", self.averager.furthest_of(session))
                self.notify(kind, sentence)
            case MemberChanged(peer, before, after):
                self.exchange_log.on_member_changed(peer, before, after)
            case _:
                self.streams.perform_one(effect)

    def send(self, to: PeerId, message: Message) -> None:
        """Send a message over its session's link, else over the newest link to the peer, else dial the peer."""
        session = getattr(message, "session", None)
        link = self.transfers.link_of(session) if session is not None else None
        # Offer and Fetch begin a session; Outcome and Settled are about one whose link may have ended.
        if link is None or link.peer != to or isinstance(message, Offer | Fetch | Outcome | Settled):
            link = self.links.newest(to)
        if isinstance(message, Offer):  # A Fetch that is not only a query was bound to its link by ReceivePiece.
            transfer = self.averager.open(message.session)
            transfer.link, transfer.offer = link, (to, self.now)
        if link is not None:
            link.send(message)
            if isinstance(message, Abort):  # Chunks of its session may still be in flight.
                self.transfers.expect_late_chunks(message.session)
            return
        record = self.peer.membership.record(to)
        if record is None or record.address is None or self.is_stopping:
            return
        self.undelivered.setdefault(to, deque(maxlen=PENDING_MESSAGES)).append(message)
        self.connector.dial(record.address, to)

    def spawn(self, task: Callable[..., Any], *args: object) -> None:
        if self.nursery is not None and not self.is_stopping:
            self.nursery.start_soon(task, *args)

    async def look_up_seeds(self) -> None:
        """Look up the seeds, unless that is being done."""
        if self.seed_lookup is None or self.is_looking_up:
            return
        self.is_looking_up = True
        try:
            lookup = await self.seed_lookup.poll()
        except Exception as error:
            self.faults.contain(error, "The search for seeds", "it is repeated")
            return
        finally:
            self.is_looking_up = False
        self.connector.seeds.on_found(lookup)
        self.perform(self.peer.on_seeds_found(lookup.addresses, lookup.expected))

    async def try_dial(self, asker: PeerId, address: Address) -> None:
        """Dial an address for the member that asked whether others can reach it there, and report the result."""
        has_connected = await self.connector.try_dial(address)
        self.perform(self.peer.on_dial_tried(asker, has_connected, self.now))

    # -- calls of the connector (LinkOwner) ------------------------------------------------------------------------
    def on_dial_failed(self, peer: PeerId | None) -> None:
        if peer is not None:
            self.undelivered.pop(peer, None)
        self.perform(self.peer.on_dial_failed(peer, self.now))

    async def on_joining(self, link: Link, theirs: Hello) -> None:
        """Handle a connection of a member that joins a link of ours as a lane, or a tunnel that we relay."""
        if theirs.joins in self.peer.meetings.tunnels:
            await self.relay.on_joined(link, theirs.joins)
        else:
            await self.striping.on_lane(link, theirs)

    def on_not_met(self, peer: PeerId) -> None:
        self.perform(self.peer.on_not_met(peer, self.now))

    def on_port(self, address: Address | None, detail: str) -> None:
        self.perform(self.peer.on_port(address, detail, self.now))

    async def run_link(self, link: Link, theirs: Hello) -> None:
        await LinkLife(self, link).run(theirs)

    def report_misbehaviour(self, culprit: PeerId | str, kind: str) -> None:
        """Report a kind of misbehaviour of a member, or of a stranger's host, to the peer (gossip.misbehaviour)."""
        self.perform(self.peer.note_misbehaviour(culprit, kind, self.now))

    # -- time ----------------------------------------------------------------------------------------------------
    async def run_timer(self) -> None:
        """Call the peer's tick at each of its deadlines."""
        while True:
            self.timer_deadline = min(self.peer.deadline, self.now + MAX_TIMER_S)
            self.timer = trio.CancelScope(deadline=self.timer_deadline)
            with self.timer:
                await trio.sleep_forever()
            if self.now >= self.peer.deadline:
                self.perform(self.peer.tick(self.now))
                if self.peer.deadline <= self.now:  # A deadline that a tick does not move must not cause a busy loop.
                    await trio.sleep(0.01)

    async def watch_for_stalls(self) -> None:
        """Poll the links for bytes of vectors, and now and then look for stalls of the loop, streams and links."""
        check_period_s, next_check_at = min(self.config.stall_s / 4, STALL_AFTER_S / 4), self.now
        while True:
            await trio.sleep(min(check_period_s, POLL_S))
            now = self.now
            for link in self.links.all():
                if link.poll_motion(now):
                    self.peer.on_proof_of_life(link.peer, now)
            if now >= next_check_at:
                next_check_at = now + check_period_s
                self.stalls.check(now)
                self.losses.check_links(now)
                self.close_stalled_links(now)

    def close_stalled_links(self, now: float) -> None:
        """Close the links whose streams do not move, and retire the links that no session uses."""
        chunk_s = FLOAT32_MB * self.config.chunk_elements / self.config.slowest_rate_mb_s
        for link in self.transfers.stalled_links(now, self.config.stall_s):
            if link.visit is None:  # A reader that stops costs nobody anything.
                self.notify("transfer", f"A transfer with {short(link.peer)} stopped moving; its link is closed.")
                self.report_misbehaviour(link.peer, "wasted")
            link.close_now()
        for link in self.streams.gathers.stalled_links(now, self.config.stall_s):
            self.notify("transfer", f"A group's stream from {short(link.peer)} stopped; its link is closed.")
            link.close_now()
        busy = self.transfers.used_links()
        for link in self.links.all():
            is_unread = link.visit is not None and link.batch is not None and now - link.sent_at > self.config.stall_s
            if is_unread or link.is_held_up(now, self.config.stall_s, chunk_s) or now - link.retired_at > CLOSE_S:
                link.close_now()
            elif now - link.used_at > self.config.internal.idle_s and link not in busy and link.retired_at == math.inf:
                link.retire()

    async def leave(self, within_s: float) -> None:
        """Announce LEFT, wait up to ``within_s`` seconds for it to be sent, and close every link."""
        if self.read_progress is not None:
            self.peer.update_counts(*self.read_progress())
        self.perform(self.peer.leave(self.now))
        self.is_stopping = self.connector.is_closed = True
        for link in self.links.all():
            link.finish()
        with trio.move_on_after(within_s):
            while len(self.links):  # noqa: ASYNC110 - a second at most, at the very end
                await trio.sleep(0.005)
        for link in self.links.all():
            link.close_now()
