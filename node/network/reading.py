"""The driver of a reader's transfer: it performs a newcomer's effects over the links of an observer."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple

import trio

from gossip.arithmetic.layout import Layout
from gossip.averaging.streams import ComparingReceiver, PieceReceiver
from gossip.averaging.vectors import Vector
from gossip.config import Config
from gossip.effects import Effect, ReceivePiece, Release, Send
from gossip.errors import ProtocolError, RemoteError
from gossip.exchange.session import Local
from gossip.ids import Address, MemberRecord, PeerId
from gossip.state_transfer.joining import Newcomer, Phase
from gossip.wire.messages import Abort, Busy, Chunk, Fetch, Message, Refuse, Serving
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.links.reading import read_link
from node.transport.byte_stream import BrokenLinkError

__all__ = ["Contact", "Reading"]

RETRY_S = 0.05  # The first pause before a busy donor is asked again. It doubles, since many readers may wait.
MAX_RETRY_S = 1.0
REDIAL_S = 1.0  # The pause before a donor is dialled again whose link has ended.


class Contact(NamedTuple):
    """A node that has greeted this reader."""

    address: Address
    reader: FrameReader
    record: MemberRecord
    fingerprint: str  # Of its model.


class Reading:
    """The transfer of one run's weights to a reader.

    Args:
        layout: The layout of the model.
        contacts: The donors, all of one run.
        timeout_s: Give up after so long without data.
        dial: Greets the node at an address; returns None if that fails.
    """

    def __init__(
        self, layout: Layout, contacts: list[Contact], timeout_s: float,
        dial: Callable[[Address], Awaitable[Contact | None]],
    ) -> None:  # fmt: skip
        self.dial, self.run_id = dial, contacts[0].record.run_id
        self.vector = Vector.mapped(layout.size).array  # Pages are allocated as weights arrive.
        frozen, bits = layout.frozen_stop - layout.exchanged, layout.size - layout.frozen_stop
        local = Local(layout.fingerprint, layout.exchanged, 0, frozen, bits)
        self.joining = Newcomer(local, Config(join_timeout_s=timeout_s), partial(secrets.randbits, 62))
        self.joining.find_donors = lambda run_id: self.donors()
        self.links: dict[PeerId, Link] = {}
        self.receivers: dict[int, tuple[PeerId, PieceReceiver | ComparingReceiver]] = {}  # By session.
        self.fetches: dict[int, tuple[Fetch, float]] = {}  # With the pause after the next Busy.
        self.changed = trio.Event()
        for contact in contacts:
            self.open_link(contact)

    def donors(self) -> list[PeerId]:
        """Return the linked donors in random order."""
        return random.sample(list(self.links), len(self.links))

    async def run(self, contacts: list[Contact]) -> bool:
        """Fetch the weights into ``vector``. Return False if no donor gives them any more."""
        joining = self.joining
        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(self.keep_link, contact, nursery)
            self.perform(joining.begin(self.run_id, self.donors(), trio.current_time()))
            while joining.phase not in (Phase.IDLE, Phase.ADOPTING):
                self.changed = trio.Event()
                with trio.move_on_at(max(joining.next_deadline, trio.current_time() + 0.01)):
                    await self.changed.wait()
                now = trio.current_time()
                self.perform(joining.tick(now))
                if joining.is_starved and joining.deadline <= now:
                    self.perform(joining.on_starved(self.donors(), now))
            nursery.cancel_scope.cancel()
        return joining.phase is Phase.ADOPTING

    # -- links ---------------------------------------------------------------------------------------------------
    def open_link(self, contact: Contact) -> Link:
        peer = contact.record.id
        link = self.links[peer] = Link(contact.reader.stream, contact.reader, peer)
        return link

    async def keep_link(self, contact: Contact, nursery: trio.Nursery) -> None:
        """Run the link to a donor. Dial it again if the link breaks: a donor closes that of a reader at any time."""
        peer, link = contact.record.id, self.links[contact.record.id]
        while True:
            try:
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(self.write, link)
                    may_return = await self.read(link, nursery)
                    tasks.cancel_scope.cancel()
            finally:
                link.stream.close_now()
                del self.links[peer]
            self.perform(self.joining.on_unlinked(peer, trio.current_time()))
            again: Contact | None = None
            while may_return and again is None:
                await trio.sleep(random.uniform(0.5, 1.5) * REDIAL_S)
                again = await self.dial(contact.address)
                may_return = again is None or (again.record.id, again.record.run_id) == (peer, self.run_id)
            if again is None or not may_return:
                return
            link = self.open_link(again)

    async def write(self, link: Link) -> None:
        with contextlib.suppress(RemoteError):
            await link.write_loop(lambda session: None, lambda session: None)
        link.stream.close_now()

    async def read(self, link: Link, nursery: trio.Nursery) -> bool:
        """Read until the link ends. Return False if the donor sent what no correct one sends."""
        on_message = partial(self.on_message, link, nursery)
        try:
            await read_link(link, on_message, partial(self.buffer_for, link), partial(self.on_body, link))
        except BrokenLinkError:
            return True
        except ProtocolError:
            return False
        except RemoteError:
            return True
        return True

    # -- effects and reports -------------------------------------------------------------------------------------
    def perform(self, effects: Iterable[Effect]) -> None:
        """Perform the newcomer's effects. Adopt needs nothing: the phase says that the vector is whole."""
        lost: set[PeerId] = set()
        for effect in effects:
            match effect:
                case Send(to, message):
                    link = self.links.get(to)
                    if link is None:
                        lost.add(to)
                    else:
                        link.send(message)
                    if isinstance(message, Fetch):
                        self.fetches[message.session] = message, RETRY_S
                case ReceivePiece(session, donor, start, stop):
                    kind = ComparingReceiver if effect.compare else PieceReceiver
                    self.receivers[session] = donor, kind(session, self.vector, start, stop)
                case Release(session):
                    self.receivers.pop(session, None)
                    self.fetches.pop(session, None)
                case _:
                    pass
        for peer in lost:
            self.perform(self.joining.on_unlinked(peer, trio.current_time()))
        self.changed.set()

    def on_message(self, link: Link, nursery: trio.Nursery, message: Message) -> None:
        now, joining, peer = trio.current_time(), self.joining, link.peer
        match message:
            case Serving():
                self.perform(joining.on_serving(peer, message, now))
            case Busy(session) if joining.is_from(session, peer) and session in self.fetches:
                nursery.start_soon(self.ask_again, link, session)
            case Busy(session):
                self.perform(joining.on_refused(peer, session, now))
            case Refuse(session, code) | Abort(session, code):
                self.perform(joining.on_refused(peer, session, now, code))
            case _:  # A donor says nothing else that matters here.
                pass

    async def ask_again(self, link: Link, session: int) -> None:
        """Ask a busy donor again, until the newcomer gives the session up: donors serve readers last."""
        fetch, pause_s = self.fetches[session]
        self.fetches[session] = fetch, min(2 * pause_s, MAX_RETRY_S)
        await trio.sleep(random.uniform(0.5, 1.5) * pause_s)
        if session in self.fetches:
            link.send(fetch)

    def buffer_for(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer of a chunk; None for one that nobody waits for, or that was not asked of this donor."""
        donor, receiver = self.receivers.get(chunk.session, (None, None))
        return None if receiver is None or donor != link.peer else receiver.begin_chunk(chunk, body_bytes)

    def on_body(self, link: Link, chunk: Chunk) -> None:
        """Handle a chunk whose body is in its buffer."""
        session, now = chunk.session, trio.current_time()
        _, receiver = self.receivers.get(session, (None, None))
        if receiver is None:
            return
        if not receiver.finish_chunk(chunk):
            self.perform(self.joining.on_failed(session, now))
        elif isinstance(receiver, PieceReceiver):
            self.perform(self.joining.on_collected(session, receiver.start + receiver.position, now))
        elif receiver.is_complete:
            self.perform(self.joining.on_compared(session, receiver.difference_sq, receiver.own_sq, now))
