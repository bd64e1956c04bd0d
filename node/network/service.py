"""A node's network side from start to end: it makes the Peer and its Runtime, reports to users, and keeps the state.

It is also their supervisor. If a fault of this library leaves the Peer inconsistent, its network side ends (links,
sessions, listening socket, tasks). A new one starts with the same identity, run, weights, outer step and address book.
The training loop notices nothing: its reports go to the old Peer, and the new one takes over the old one's numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import random
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from gossip import kernel
from gossip.discovery import Bootstrap
from gossip.errors import IdentityError, LocalError
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.selection.graphs import Graph
from gossip.selection.registry import selector_of
from node.faults import LATER_S, Faults, first_cause, place, report_to, trace
from node.identity.keys import Identity, keep_secret, verify
from node.identity.statedir import OF_THIS_PROCESS, Memory, StateDir
from node.links.connector import Access
from node.links.handshake import Greeter
from node.model.state import State
from node.network.hints import LoopHints, WakeEvent
from node.network.runtime import Runtime
from node.network.transfers.coding import measured
from node.network.transfers.streams import SharedModel
from node.observe import notices
from node.observe.console import Console
from node.observe.events import ExchangeEvent, NodeEvent, NoticeEvent, RunEvent
from node.observe.figures import Reading, Source
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView, members_of
from node.observe.notices import LOGGER
from node.settings import Settings, advertised
from node.transport.seeds import SeedLookup
from node.transport.tcp import TcpNetwork
from node.transport.tls import swarm_contexts

__all__ = ["LEAVE_S", "REPORT_S", "Service"]

REPORT_S = 0.25  # Seconds between two reports of a running loop: the most that members and figures lag.
LOOK_S = 1.0  # Seconds between two checks whether the run is finished, and which members to store.
# Seconds between writes of the address book; it is also written once twice as many members are known.
REMEMBER_S = 30.0
OF_RUNS = frozenset({"started", "joined", "merged", "put back", "finished"})  # Notices about the current run.
LEAVE_S = 1.0  # Seconds for LEFT to be sent.
HANDOVER_S = 3.0  # Seconds to wait for a node that just ended to release this state directory.


class NodeModel(SharedModel, Protocol):
    """The live model of a node, a :class:`node.loop.live.LiveModel`."""

    @property
    def state(self) -> State: ...
    @property
    def wake(self) -> WakeEvent: ...


class MeasuredLoop(Protocol):
    """The training loop's figures for users. Both calls come from the network thread."""

    def figures(self) -> Reading:
        """Return the figures for the progress line and the log."""

    def source(self) -> Source:
        """Return the source of all figures, for the page."""


class PageServer(Protocol):
    """The listening socket of a page."""

    async def bind(self) -> Address:
        """Listen, and return the address."""

    def close(self) -> None:
        """Stop listening."""


class WebPage(Protocol):
    """The page for browsers and monitors, a :class:`node.page.page.Page`."""

    @property
    def server(self) -> PageServer: ...

    def heard(self, event: NodeEvent) -> None:
        """Show an event."""

    def link(self, seen: Address) -> str:
        """Return the link to the page, as others reach it."""

    async def serve(self, runtime: Callable[[], Runtime], source: Callable[[], Source]) -> None:
        """Serve the page until cancelled."""


class Service:
    """The node's network side, which runs in the network thread.

    The training thread reads ``view``, ``signals`` and plain numbers of ``runtime``.
    """

    def __init__(
        self, settings: Settings, live: NodeModel, signals: LoopHints, loop: MeasuredLoop, page: WebPage | None = None
    ) -> None:
        self.settings, self.live, self.signals, self.loop, self.page = settings, live, signals, loop, page
        self.identity = Identity.load(settings.state_dir)
        self.state_dir = StateDir(settings.state_dir)
        self.memory = Memory()  # As last written, or as it would be written.
        self.incarnation = 0
        self.runtime: Runtime | None = None  # After a fault, the ended one until there is another.
        self.counts: Callable[[], tuple[int, int]] | None = None  # Returns the loop's current steps and samples.
        self.faults = Faults(self.notice)
        self.bound: Address | None = None  # The address on which this node listens, kept after a fault.
        self.began = False  # A network side has started.
        self.shown = False  # This node's address was shown.
        self.beginning = False  # A new network side is starting after a fault.
        self.pause_s = 0.0  # Seconds until it starts.
        self.view = SwarmView()
        self.members: tuple[Member, ...] = ()  # As of the last request.
        self.listed_at = -math.inf  # By time.monotonic.
        self.listeners = Listeners(lambda: self.identity.id.hex())
        self.progress: Console | None = None
        self.debugging = LOGGER.isEnabledFor(logging.DEBUG)  # Whether logging wants exchanges, as of the last check.
        self.leaving: trio.Event | None = None
        self.clock_s = 0.0  # The network's clock minus time.perf_counter.

    async def main(self, started: Callable[[], None]) -> None:
        """Run until ``leaving`` is set. After a fault of trio's loop itself, it is called again.

        Raises:
            LocalError: Before ``started``: the port or the state directory is in use, or the log cannot be written.
        """
        self.leaving = trio.Event()
        self.live.state.enter_thread()
        self.clock_s = trio.current_time() - time.perf_counter()
        self.shown = False
        await self.take_state_dir()
        try:
            page_at = None if self.page is None else await self.page.server.bind()
            try:
                async with trio.open_nursery() as nursery:
                    await self.supervise(started, nursery, page_at)
                    nursery.cancel_scope.cancel()
            finally:
                if self.page is not None:
                    self.page.server.close()
        finally:
            self.state_dir.release()

    # -- supervision ---------------------------------------------------------------------------------------------
    async def supervise(self, started: Callable[[], None], nursery: trio.Nursery, page_at: Address | None) -> None:
        """Run one network side after another until this node leaves. Raise what must end the node."""
        assert self.leaving is not None
        while not self.leaving.is_set():
            await self.rest()
            try:
                await self.run(started, nursery, page_at)
            except Exception as error:
                if not self.recovers(error):
                    self.close_progress()
                    raise
        self.close_progress()

    def recovers(self, error: BaseException) -> bool:
        """Note a fault that ended the network side, and return True if another one starts.

        Call it once all tasks of the network side have ended. The node ends if its network side never began, with
        ``on_fault = "raise"``, and after a LocalError, which is for the user. A LocalError while a new network side
        starts (the port is not free at once) is tried again, since the node trains already.
        """
        cause = first_cause(error)
        if not self.began or not isinstance(cause, Exception):
            return False
        if isinstance(cause, LocalError) and not self.beginning:
            return False
        if self.settings.on_fault == "raise":
            self.tell_fault(cause, "and on_fault says to raise it")
            return False
        self.pause_s = self.faults.restart(time.monotonic())
        self.beginning = True
        if self.runtime is not None:
            # Fail the runtime too, if it has not reported the fault itself.
            self.runtime.fail(error)
        self.live.boundary.restart()
        self.signals.release()
        self.live.wake.set()
        if self.pause_s < LATER_S:
            end = "which begins anew at once while the loop trains on"
        else:
            end = f"which is tried again every {LATER_S:.0f} s while the loop trains on alone"
        self.tell_fault(cause, end)
        return True

    def close_progress(self) -> None:
        """Write the last row and the closing table."""
        if self.progress is not None:
            try:
                self.progress.close(time.time(), self.loop.figures())
            except Exception as error:
                self.faults.contain(error, "A reading of the figures", "there is no closing table")

    def leave(self) -> None:
        """Say LEFT and end; call it in the network thread."""
        assert self.leaving is not None
        self.leaving.set()

    def failed(self, error: Exception) -> None:
        """End the network side after a fault in a call of the training thread."""
        if self.runtime is not None:
            self.runtime.fail(error)

    async def rest(self) -> None:
        """Wait until the network side may start again, or this node leaves."""
        assert self.leaving is not None
        with trio.move_on_after(self.pause_s):
            while not self.leaving.is_set():
                self.tick()
                with trio.move_on_after(LOOK_S):
                    await self.leaving.wait()

    @property
    def resting(self) -> bool:
        """Return True if the network side had so many faults that it is tried once a minute."""
        return self.beginning and self.pause_s >= LATER_S

    def tell_fault(self, cause: Exception, end: str) -> None:
        """Report a fault that ended the network side, with the traceback for a bug report."""
        if isinstance(cause, LocalError):
            self.notice("restarted", f"The network side cannot begin anew, and is tried again: {cause}")
            return
        sentence = (
            f"A fault of this library ({type(cause).__name__} in {place(cause)}) ended the network side, {end}. "
            f"Report the traceback, which the log has, {report_to()}."
        )
        self.announce(NoticeEvent("restarted", time.time(), sentence), traceback=trace(cause))
        notices.log(self.identity.id.hex(), "restarted", f"The traceback to report:\n{trace(cause)}", True)

    async def serve_page(self) -> None:
        """Serve the page for the node's whole life, across network sides."""
        assert self.page is not None
        while True:
            try:
                await self.page.serve(lambda: self.here, self.loop.source)
            except Exception as error:
                self.faults.contain(error, "The page", "it is served anew")
                await trio.sleep(LOOK_S)

    @property
    def here(self) -> Runtime:
        """Return the newest network side."""
        assert self.runtime is not None
        return self.runtime

    async def take_state_dir(self) -> None:
        with trio.move_on_after(HANDOVER_S):
            while not self.state_dir.take():  # noqa: ASYNC110 - another process has to release it
                await trio.sleep(0.1)
            if not self.began:
                # If two processes made a key at once, only one key stayed.
                self.identity = Identity.load(self.settings.state_dir)
            if self.settings.secret is not None and self.settings.state_dir is not None:
                # Otherwise a restart without the setting would run open.
                keep_secret(self.settings.secret, self.settings.state_dir)
            return
        if self.state_dir.holder == OF_THIS_PROCESS:
            raise IdentityError(
                f"The state directory {self.settings.state_dir} is in use by {OF_THIS_PROCESS}: close() that one, or "
                "give this one a directory of its own."
            )
        raise IdentityError(
            f"The state directory {self.settings.state_dir} is in use by {self.state_dir.holder}: it holds the "
            "identity of one node, so give each node a directory of its own."
        )

    async def run(self, started: Callable[[], None], nursery: trio.Nursery, page_at: Address | None) -> None:
        """Run one network side to its end. The first one starts the page, in ``nursery``."""
        settings, first = self.settings, self.runtime is None
        network = TcpNetwork(self.bound or settings.listen, settings.config.hello_timeout_s)
        bound = self.bound = await network.bind()
        try:
            if first:
                self.memory = self.state_dir.read()
                self.incarnation = self.memory.incarnation + 1
            lookup = SeedLookup(settings.seeds, settings.expected, settings.sources, settings.secret, bound)
            peer = self.make_peer(advertised(settings, bound, self.known), lookup, trio.current_time())
            shown = str(peer.membership.me.address or bound or "no address: it only dials out")
            if self.progress is None:
                self.progress = Console.from_environment(time.time(), self.identity.id.hex(), shown, os.environ)
            contexts = swarm_contexts(self.identity, settings.secret) if settings.secret is not None else None
            greeter = Greeter(settings.config.swarm, self.live.state.layout)
            runtime = Runtime(peer, Access(network, greeter, contexts, lookup), self.live, self)
            runtime.counts = self.counts
            lockstep = settings.config.max_version_gap is not None  # Release a held loop at once.
            runtime.after_perform = self.after_perform if lockstep else partial(self.signals.read, peer)
            self.runtime, self.view = runtime, self.view if first else self.view.restarted()
            if not self.shown:
                self.shown = True
                self.show(nursery, shown, page_at)
            self.remember(runtime)
            if self.state_dir.damaged and first:
                self.notice("state", self.state_dir.damaged)
            await self.serve(runtime, started)
        finally:
            network.close()

    @property
    def known(self) -> list[Address]:
        """Return the addresses of members from earlier runs of this node."""
        return [record.address for record in self.memory.book if record.address is not None]

    def show(self, nursery: trio.Nursery, where: str, page_at: Address | None) -> None:
        """Announce this node's address, and start its page."""
        self.listeners.post(NoticeEvent("listening", time.time(), f"This node listens on {where}."))
        if self.page is not None and page_at is not None:
            seen = advertised(dataclasses.replace(self.settings, advertise=None), page_at, self.known) or page_at
            self.notice("page", f"The page of this node: {self.page.link(seen)}")
            nursery.start_soon(self.serve_page)

    async def serve(self, runtime: Runtime, started: Callable[[], None]) -> None:
        assert self.leaving is not None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.main)
                nursery.start_soon(self.look, runtime)
                self.refresh()
                self.began, self.beginning = True, False
                started()
                await self.leaving.wait()
                await runtime.leave(LEAVE_S)
                nursery.cancel_scope.cancel()
            self.refresh()
            self.list_members()
        finally:
            self.remember(runtime)

    def make_peer(self, address: Address | None, lookup: SeedLookup, now: float) -> Peer:
        """Return a peer with the last one's members and run."""
        identity, settings = self.identity, self.settings
        before = None if self.runtime is None else self.runtime.peer.own_run.state
        record = MemberRecord(
            identity.id, identity.public_key, self.incarnation, address=address, run_id=secrets.token_bytes(16),
        )  # fmt: skip
        if before is not None:
            self.incarnation = max(self.incarnation, before.incarnation) + 1
            record = dataclasses.replace(
                record, incarnation=self.incarnation, run_id=before.run_id, steps=before.earlier_steps,
                samples=before.earlier_samples, extra=before.extra,
            )  # fmt: skip
        config, layout = settings.config, self.live.state.layout
        graph = Graph.from_file(config.graph) if config.graph else None
        rng = random.Random(secrets.randbits(64))
        model = LocalModel(
            layout.fingerprint, layout.exchanged, self.live.state.trained_elements, layout.size - layout.exchanged,
            measured(kernel.built()),
        )  # fmt: skip
        bootstrap = Bootstrap(
            lookup.fixed,
            settings.expected,
            lookup.needed,
            self.memory.book,
            self.state_dir.finished(),
            must_join=settings.join_or_fail_s is not None,
            wait_until=now + settings.wait_s if settings.wait_for > 1 else -math.inf,
        )
        peer = Peer(
            Membership(record, sign=identity.sign, verify=verify, config=config, rng=rng, now=now), config, model,
            rng=rng, bootstrap=bootstrap, selector=selector_of(config, layout.exchanged, graph), now=now,
        )  # fmt: skip
        if before is not None:
            peer.go_on_from(before, now)
        return peer

    def after_perform(self) -> None:
        """Update the training thread's hints after every decision."""
        if self.runtime is not None and self.signals.read(self.runtime.peer):
            self.live.wake.set()

    def refresh(self) -> None:
        """Update the training thread's view of the swarm."""
        if self.runtime is not None:
            self.view = self.view.refreshed(self.runtime.peer)

    def settled(self) -> None:
        """Show the sample count on which the nodes have agreed, even if a larger one was shown before."""
        self.refresh()
        self.view = dataclasses.replace(self.view, settled=self.view.settled + 1)

    # -- events and figures for users ----------------------------------------------------------------------------
    def notice(self, kind: str, sentence: str) -> None:
        """Announce an event in one sentence."""
        now_s, peer = time.time(), None if self.runtime is None else self.runtime.peer
        if kind in OF_RUNS and peer is not None:
            self.refresh()  # From here on the count may be another run's.
            self.announce(RunEvent(kind, now_s, sentence, peer.view.run_id.hex()))
        else:
            self.announce(NoticeEvent(kind, now_s, sentence))

    def announce(self, event: NodeEvent, **fields: str) -> None:
        """Post an event to listeners, the page and the log.

        The log gets exchanges only when debugging. ``fields`` are for the log alone.
        """
        self.listeners.post(event)
        if self.page is not None:
            self.page.heard(event)
        if not isinstance(event, ExchangeEvent):
            if self.progress is not None:
                self.progress.event(event.at_s, event.kind, str(event), **fields)
        elif self.debugging:
            notices.log(self.identity.id.hex(), event.kind, str(event), False)

    def list_members(self) -> None:
        """List the members for the training thread, which waits for them."""
        if self.runtime is not None:
            self.members, self.listed_at = members_of(self.runtime.peer), time.monotonic()

    def tick(self) -> float:
        """Write the progress line and the log row that are due; return the seconds until the next call."""
        if self.progress is None:
            return LOOK_S
        try:
            self.progress.tick(time.time(), self.loop.figures)
        except Exception as error:
            self.faults.contain(error, "A reading of the figures", "the next is in a second")
        return min(self.progress.pace_s, LOOK_S)

    async def look(self, runtime: Runtime) -> None:
        """Check the run and the members once a second; more often for a terminal.

        A turn costs as much as a message. A running loop refreshes the view with its reports. The address book is
        written soon after the start, and whenever many members are new. So a node that is killed in its first seconds
        also finds its swarm again.
        """
        looked_s, pause_s, written_s, written = -math.inf, LOOK_S, runtime.now, runtime.peer.view.alive
        while True:
            pause = self.tick()
            now = runtime.now
            if now - looked_s >= LOOK_S:
                looked_s = now
                runtime.perform(runtime.peer.count_votes(now))
                self.refresh()
                self.debugging = LOGGER.isEnabledFor(logging.DEBUG)
                known = runtime.peer.view.alive
                if known >= 2 * written or now - written_s >= pause_s:
                    self.remember(runtime)
                    pause_s, written_s, written = min(2 * pause_s, REMEMBER_S), now, known
            await trio.sleep(pause)

    def remember(self, runtime: Runtime) -> None:
        """Write the address book. If the peer has a fault, the last one stays."""
        peer = runtime.peer
        try:
            self.memory = Memory(self.incarnation, peer.membership.my_samples, peer.membership.book())
        except Exception as error:
            self.faults.contain(error, "A reading of the members", "the last one is kept")
            return
        warning = self.state_dir.write(self.memory.incarnation, self.memory.samples, self.memory.book)
        if warning:
            self.notice("state", warning)
