"""The supervisor of a node's network side: it makes the Peer and its Runtime, reports to users, and keeps their state.

If a fault of this library leaves the Peer inconsistent, its network side ends, with its links, sessions, listening
socket and tasks. The service then starts a new one with the same identity, run, weights, outer step and address book.
The training loop notices nothing. Its reports go to the old Peer, until the new one has taken over its numbers.

    main -> supervise -> run_once -> run_until_leaving         one network side: Peer, Runtime, poll
                ^                          | fault
                +-- wait_before_restart <--+-- recovers        or the error ends the node
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
from typing import TYPE_CHECKING, Any, cast

import trio

from gossip import kernel
from gossip.discovery.seeds import Bootstrap
from gossip.errors import IdentityError, LocalError
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.selection.graphs import Graph
from gossip.selection.registry import selector_of
from node.faults import LATER_S, Faults, first_cause, place_of, report_to, trace_of
from node.identity.keys import Identity, keep_secret, verify
from node.identity.statedir import OF_THIS_PROCESS, StateDir
from node.links.connector import Access
from node.links.handshake import Greeter
from node.network.address_book import AddressBook
from node.network.hints import LoopHints
from node.network.runtime import Runtime
from node.network.transfers.coding import measure_machine
from node.network.transfers.streams import SharedModel
from node.observe import notices
from node.observe.console import Console
from node.observe.events import ExchangeEvent, NodeEvent, NoticeEvent, RunEvent
from node.observe.figures import Source, reading
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView, members_of
from node.observe.notices import LOGGER
from node.settings import Settings, advertised_address
from node.transport.seeds import SeedLookup
from node.transport.tcp import TcpNetwork
from node.transport.tls import swarm_contexts

if TYPE_CHECKING:  # The page needs optional packages.
    from node.observe.page.page import Page

REPORT_S = 0.25  # Seconds between two reports of a running loop, by which members and figures lag at most.
POLL_S = 1.0  # Seconds between two checks whether the run is finished and the address book is to be written.
RUN_NOTICES = frozenset({"started", "joined", "merged", "put back", "finished"})  # Notices about the current run.
LEAVE_S = 1.0  # Seconds for LEFT, the farewell to other members, to be sent.
HANDOVER_S = 3.0  # Seconds in which a node that has just ended may release this state directory.
# The same for a node of this process that is known to end: a disk that stands still holds up its last write.
CLOSING_S = 30.0


class Service:
    """The supervisor of a node's network side, in the network thread.

    The training thread reads ``view``, ``hints``, ``members`` and plain numbers of ``runtime``.
    """

    def __init__(self, settings: Settings, live: SharedModel, hints: LoopHints, source: Callable[[], Source]) -> None:
        self.settings, self.live, self.hints = settings, live, hints
        self.source = source  # Returns the source of all figures of the loop; called in the network thread.
        self.page = make_page(settings)
        self.identity = Identity.load(settings.state_dir)
        self.state_dir = StateDir(settings.state_dir)
        self.runtime: Runtime | None = None  # The newest one. After a fault it has ended, until another starts.
        self.read_progress: Callable[[], tuple[int, int]] | None = None  # Returns the loop's steps and samples.
        self.faults = Faults(self.notify)
        self.completed_runs: frozenset[bytes] = frozenset()  # By earlier Nodes of the loop's thread.
        self.book = AddressBook(self.state_dir, self.faults, self.notify)
        self.bound: Address | None = None  # The address on which this node listens, kept after a fault.
        self.has_started = False  # A network side has run, at least once.
        self.has_shown_address = False
        self.is_restarting = False  # No new network side has started since the last fault.
        self.pause_s = 0.0  # Seconds to wait before the next network side starts; 0 before the first fault.
        self.view = SwarmView()
        self.members: tuple[Member, ...] = ()  # As of `listed_at`, by time.monotonic.
        self.listed_at = -math.inf  # -inf: never listed.
        self.listeners = Listeners(lambda: self.identity.id.hex())
        self.console: Console | None = None  # Made when the address is known; None until then.
        self.logs_exchanges = LOGGER.isEnabledFor(logging.DEBUG)  # As of the last poll.
        self.leaving: trio.Event | None = None  # Set to leave; None before the network thread runs.
        self.clock_s = 0.0  # The network's clock minus time.perf_counter.

    async def main(self, started: Callable[[], None]) -> None:
        """Run until this node leaves. The network thread calls it again after a fault of trio's loop itself.

        Args:
            started: Called when the network side runs.

        Raises:
            LocalError: The port or the state directory is in use, or the log cannot be written.
        """
        self.leaving = trio.Event()
        self.live.state.enter_thread()
        self.clock_s = trio.current_time() - time.perf_counter()
        self.has_shown_address = False
        await self.lock_state_dir()
        try:
            page_address = None if self.page is None else await self.page.server.bind()
            try:
                async with trio.open_nursery() as nursery:
                    await self.supervise(started, nursery, page_address)
                    nursery.cancel_scope.cancel()
            finally:
                if self.page is not None:
                    self.page.server.close()
        finally:
            self.state_dir.release()

    # -- supervision ---------------------------------------------------------------------------------------------
    async def supervise(self, started: Callable[[], None], nursery: trio.Nursery, page_address: Address | None) -> None:
        """Run one network side after another until this node leaves. Raises the errors that must end the node."""
        assert self.leaving is not None
        while not self.leaving.is_set():
            await self.wait_before_restart()
            try:
                await self.run_once(started, nursery, page_address)
            except Exception as error:
                if not self.can_recover(error):
                    self.close_console()
                    raise
        self.close_console()

    def can_recover(self, error: BaseException) -> bool:
        """Handle a fault that ended the network side, whose tasks have all ended. Return True if another one starts.

        The error ends the node if no network side has started, with ``on_fault = "raise"``, and if it is a LocalError,
        which the user must fix. But a LocalError of a restart (the port may not be free at once) is tried again, since
        the node trains already.
        """
        cause = first_cause(error)
        if not self.has_started or not isinstance(cause, Exception):
            return False
        if isinstance(cause, LocalError) and not self.is_restarting:
            return False
        if self.settings.on_fault == "raise":
            self.report_fault(cause, "and on_fault says to raise it")
            return False
        self.pause_s = self.faults.count_restart(time.monotonic())
        self.is_restarting = True
        if self.runtime is not None:
            self.runtime.fail(error)  # The runtime may not know of the fault.
        self.live.boundary.restart()
        self.hints.release()
        self.live.wake.set()
        if self.pause_s < LATER_S:
            consequence = "which begins anew at once while the loop trains on"
        else:
            consequence = f"which is tried again every {LATER_S:.0f} s while the loop trains on alone"
        self.report_fault(cause, consequence)
        return True

    def close_console(self) -> None:
        """Write the last row of the log, and the closing table."""
        if self.console is not None:
            try:
                self.console.close(time.time(), reading(self.source()))
            except Exception as error:
                self.faults.contain(error, "A reading of the figures", "there is no closing table")

    def leave(self) -> None:
        """Begin to leave: announce LEFT and end. Runs in the network thread."""
        assert self.leaving is not None
        self.leaving.set()

    async def wait_before_restart(self) -> None:
        """Wait for ``pause_s``, or until this node leaves, and write progress meanwhile."""
        assert self.leaving is not None
        with trio.move_on_after(self.pause_s):
            while not self.leaving.is_set():
                self.write_progress()
                with trio.move_on_after(POLL_S):
                    await self.leaving.wait()

    @property
    def is_backing_off(self) -> bool:
        """Return True if there were so many faults that the network side is started only once a minute."""
        return self.is_restarting and self.pause_s >= LATER_S

    def report_fault(self, cause: Exception, consequence: str) -> None:
        """Tell the user of a fault that ended the network side, with the traceback for a bug report.

        ``consequence`` is a clause that says what follows.
        """
        if isinstance(cause, LocalError):
            self.notify("restarted", f"The network side cannot begin anew, and is tried again: {cause}")
            return
        sentence = (
            f"A fault of this library ({type(cause).__name__} in {place_of(cause)}) ended the network side, "
            f"{consequence}. Report the traceback, which the log has, {report_to()}."
        )
        self.announce(NoticeEvent("restarted", time.time(), sentence), traceback=trace_of(cause))
        notices.log(self.identity.id.hex(), "restarted", f"The traceback to report:\n{trace_of(cause)}", True)

    async def serve_page(self) -> None:
        """Serve the page for the node's whole life, across network sides."""
        assert self.page is not None
        while True:
            try:
                await self.page.serve(lambda: cast(Runtime, self.runtime), self.source)
            except Exception as error:
                self.faults.contain(error, "The page", "it is served anew")
                await trio.sleep(POLL_S)

    async def lock_state_dir(self) -> None:
        """Lock the state directory, and take the identity that it holds. Raises IdentityError if it is in use."""
        began_at = trio.current_time()
        with trio.move_on_after(HANDOVER_S) as patience:
            while not self.state_dir.lock():  # Its holder has to release it.
                if self.state_dir.is_handed_over:
                    patience.deadline = began_at + CLOSING_S
                await trio.sleep(0.1)
            if not self.has_started:
                # Two processes may have made keys at once, of which one is left.
                self.identity = Identity.load(self.settings.state_dir)
            if self.settings.secret is not None and self.settings.state_dir is not None:
                # Otherwise a restart without the setting would run without encryption.
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

    async def run_once(self, started: Callable[[], None], nursery: trio.Nursery, page_address: Address | None) -> None:
        """Run one network side until it fails or this node leaves. The first one starts the page, in ``nursery``."""
        settings, is_first = self.settings, self.runtime is None
        network = TcpNetwork(self.bound or settings.listen, settings.config.hello_timeout_s)
        bound = self.bound = await network.bind()
        try:
            if is_first:
                self.book.read()
            lookup = SeedLookup(settings.seeds, settings.expected, settings.sources, settings.secret, bound)
            address = advertised_address(settings, bound, self.book.addresses)
            peer = self.make_peer(address, lookup, trio.current_time())
            address_text = str(peer.membership.me.address or bound or "no address: it only dials out")
            if self.console is None:
                self.console = Console.from_environment(time.time(), self.identity.id.hex(), address_text, os.environ)
            contexts = swarm_contexts(self.identity, settings.secret) if settings.secret is not None else None
            greeter = Greeter(settings.config.swarm, self.live.state.layout)
            runtime = Runtime(peer, Access(network, greeter, contexts, lookup), self.live, self)
            runtime.read_progress = self.read_progress
            runtime.on_batch_end = partial(self.update_hints, peer)
            self.runtime, self.view = runtime, self.view if is_first else self.view.restarted()
            if not self.has_shown_address:
                self.has_shown_address = True
                self.announce_address(nursery, address_text, page_address)
            self.book.save(peer)
            if self.state_dir.damage and is_first:
                self.notify("state", self.state_dir.damage)
            await self.run_until_leaving(runtime, started)
        finally:
            network.close()

    def announce_address(self, nursery: trio.Nursery, address_text: str, page_address: Address | None) -> None:
        """Announce this node's address, and start its page."""
        self.listeners.post(NoticeEvent("listening", time.time(), f"This node listens on {address_text}."))
        if self.page is not None and page_address is not None:
            settings = dataclasses.replace(self.settings, advertise=None)
            public = advertised_address(settings, page_address, self.book.addresses) or page_address
            self.notify("page", f"The page of this node: {self.page.guard.link(public)}")
            nursery.start_soon(self.serve_page)

    async def run_until_leaving(self, runtime: Runtime, started: Callable[[], None]) -> None:
        """Run the runtime until this node leaves, then announce LEFT. A fault in any task is raised."""
        assert self.leaving is not None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.main)
                nursery.start_soon(self.poll, runtime)
                self.refresh_view()
                self.has_started, self.is_restarting = True, False
                started()
                await self.leaving.wait()
                await runtime.leave(LEAVE_S)
                nursery.cancel_scope.cancel()
            self.refresh_view()
            self.list_members()
        finally:
            self.book.save(runtime.peer)

    def make_peer(self, address: Address | None, lookup: SeedLookup, now: float) -> Peer:
        """Return a peer, with the run and the numbers of the last one if there was one."""
        identity, settings = self.identity, self.settings
        # The run, counts and incarnation of the peer that a fault has ended; None for the first peer.
        last_state = None if self.runtime is None else self.runtime.peer.own_run.state
        record = MemberRecord(
            identity.id, identity.public_key, self.book.incarnation, address=address, run_id=secrets.token_bytes(16),
        )  # fmt: skip
        if last_state is not None:
            self.book.incarnation = max(self.book.incarnation, last_state.incarnation) + 1
            record = dataclasses.replace(
                record, incarnation=self.book.incarnation, run_id=last_state.run_id, steps=last_state.earlier_steps,
                samples=last_state.earlier_samples, extra=last_state.extra,
            )  # fmt: skip
        config, layout = settings.config, self.live.state.layout
        graph = Graph.from_file(config.graph) if config.graph else None
        rng = random.Random(secrets.randbits(64))
        model = LocalModel(
            layout.fingerprint, layout.exchanged, self.live.state.trained_elements,
            layout.frozen_stop - layout.exchanged, layout.size - layout.frozen_stop,
            measure_machine(kernel.implementation()),
        )  # fmt: skip
        finished_run = self.state_dir.finished_run()
        bootstrap = Bootstrap(
            lookup.fixed,
            settings.expected,
            lookup.is_needed,
            self.book.stored.book,
            b"" if finished_run in self.completed_runs else finished_run,
            must_join=settings.join_or_fail_s is not None,
            wait_until=now + settings.wait_s if settings.wait_for > 1 else -math.inf,  # -inf: do not wait.
            completed=self.completed_runs,
        )
        peer = Peer(
            Membership(record, sign=identity.sign, verify=verify, config=config, rng=rng, now=now), config, model,
            rng=rng, bootstrap=bootstrap, selector=selector_of(config, graph), now=now,
        )  # fmt: skip
        if last_state is not None:
            peer.continue_from(last_state, now)
        return peer

    def update_hints(self, peer: Peer) -> None:
        """Update the training loop's hints after a decision, and wake the loop if it may continue."""
        if self.hints.update_from(peer):
            self.live.wake.set()

    def refresh_view(self) -> None:
        """Update the training thread's view of the swarm."""
        if self.runtime is not None:
            self.view = self.view.refreshed(self.runtime.peer)

    def on_settled(self) -> None:
        """Handle the end of settling: show the sample count that the nodes agree on, even if a larger one was shown."""
        self.refresh_view()
        self.view = dataclasses.replace(self.view, settled=self.view.settled + 1)

    # -- events and figures for users ----------------------------------------------------------------------------
    def notify(self, kind: str, sentence: str) -> None:
        """Tell the user of an event in one sentence."""
        now_s, peer = time.time(), None if self.runtime is None else self.runtime.peer
        if kind in RUN_NOTICES and peer is not None:
            self.refresh_view()  # The sample count may be another run's now.
            self.announce(RunEvent(kind, now_s, sentence, peer.view.run_id.hex()))
        else:
            self.announce(NoticeEvent(kind, now_s, sentence))

    def announce(self, event: NodeEvent, **fields: Any) -> None:
        """Post an event to the listeners, the page and the log, which gets exchanges only at level DEBUG.

        ``fields`` are for the log alone.
        """
        self.listeners.post(event)
        if self.page is not None:
            self.page.on_event(event)
        if not isinstance(event, ExchangeEvent):
            if self.console is not None:
                self.console.write_event(event.at_s, event.kind, str(event), **fields)
        elif self.logs_exchanges:
            notices.log(self.identity.id.hex(), event.kind, str(event), False)

    def list_members(self) -> None:
        """Store the present members for the training thread, which waits for this call."""
        if self.runtime is not None:
            self.members, self.listed_at = members_of(self.runtime.peer, self.runtime.links.path_of), time.monotonic()

    def write_progress(self) -> float:
        """Write the progress line and the log row that are due; return the seconds until the next call."""
        if self.console is None:
            return POLL_S
        try:
            self.console.tick(time.time(), lambda: reading(self.source()))
        except Exception as error:
            self.faults.contain(error, "A reading of the figures", "the next is in a second")
        return min(self.console.tick_period_s, POLL_S)

    async def poll(self, runtime: Runtime) -> None:
        """Check the run and the members once a second, and write progress as often as a terminal shows it."""
        polled_at = -math.inf
        self.book.on_started(runtime.peer, runtime.now)
        while True:
            pause_s = self.write_progress()
            now = runtime.now
            if now - polled_at >= POLL_S:
                polled_at = now
                runtime.perform(runtime.peer.count_votes(now))
                self.refresh_view()  # A running loop does so too, but a waiting one may not.
                self.logs_exchanges = LOGGER.isEnabledFor(logging.DEBUG)
                self.book.save_if_due(runtime.peer, now)
            await trio.sleep(pause_s)


def make_page(settings: Settings) -> Page | None:
    """Return the page that the settings ask for, or None.

    Its modules are imported here, before the network thread starts, because the import takes a third of a second.
    """
    if settings.page is None:
        return None
    from node.observe.page.page import Page

    return Page(settings.page, settings.secret, settings.config)
