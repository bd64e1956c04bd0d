"""How links come to be: dialling and accepting, up to the finished Hello, with a bound on strangers."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from gossip.config import Config
from gossip.errors import RefusedError, RemoteError
from gossip.ids import Address, MemberRecord, PeerId
from gossip.messages import Hello
from node.handshake import Greeter
from node.links import FrameReader, Link, Network
from node.stream import ByteStream
from node.tcp import is_loopback, is_private
from node.tls import Contexts, TlsStream

__all__ = ["Doors"]

UNTRUSTED = 64  # streams before their Hello: silent sockets fill this pool, never the one of members
OBSERVED_S = 30.0  # for an observer to read the status, page by page
DIALS = 16  # at once
TOLD = 64  # different refusals told to people: strangers fill no log


class Doors:
    """``me`` gives our own record, ``run_link`` takes a greeted link to its end, ``dial_failed`` hears of whom we did
    not reach (None: a seed), ``on_event`` tells people."""

    def __init__(
        self, network: Network, greeter: Greeter, contexts: Contexts | None, config: Config,
        me: Callable[[], MemberRecord], run_link: Callable[[Link, Hello], Awaitable[None]],
        dial_failed: Callable[[PeerId | None], None], on_event: Callable[[str, str], None], seeds: frozenset[Address],
    ) -> None:  # fmt: skip
        self.network, self.greeter, self.contexts, self.config = network, greeter, contexts, config
        self.me, self.run_link, self.dial_failed, self.on_event = me, run_link, dial_failed, on_event
        self.seeds = seeds  # what they say against us is final; a stale address book is not
        self.dialling: dict[Address, set[PeerId | None]] = {}  # whom we hope to find there
        self.dial_limit = trio.CapacityLimiter(DIALS)
        self.untrusted = 0
        self.refusal: RefusedError | None = None  # the first that says more than "closed"
        self.told: set[str] = set()
        self.nursery: trio.Nursery | None = None
        self.closed = False

    def open(self, nursery: trio.Nursery) -> None:
        """Dial and accept from now on, until cancelled; links live in ``nursery``."""
        self.nursery = nursery
        nursery.start_soon(self.network.serve, self.accept, nursery)

    def spawn(self, task: Callable[..., Any], *args: object) -> None:
        if self.nursery is not None and not self.closed:
            self.nursery.start_soon(task, *args)

    def dial(self, address: Address, expect: PeerId | None) -> None:
        """Begin a link to ``address``, where ``expect`` should answer; one dial at a time to one address."""
        if self.closed or address == self.me().address or (expect is not None and not self.may_dial(address)):
            self.spawn(self.report, {expect})
            return
        if address in self.dialling:
            self.dialling[address].add(expect)
            return
        self.dialling[address] = {expect}
        self.spawn(self.dial_task, address, expect)

    def may_dial(self, address: Address) -> bool:
        """Addresses in records come from others: a node on a public address dials no private one, and one on a network
        no loopback."""
        mine = self.me().address
        if mine is None or is_loopback(mine.host):
            return True
        return not is_loopback(address.host) and (is_private(mine.host) or not is_private(address.host))

    async def report(self, hoped: set[PeerId | None]) -> None:
        await trio.lowlevel.checkpoint()  # never from inside the decision that dialled
        self.missed(hoped)

    def missed(self, hoped: set[PeerId | None]) -> None:
        for peer in hoped:
            self.dial_failed(peer)

    async def dial_task(self, address: Address, expect: PeerId | None) -> None:
        greeted: tuple[Link, Hello] | None = None
        hoped: set[PeerId | None] = set()
        try:
            async with self.dial_limit:
                with trio.move_on_after(self.config.hello_timeout_s):
                    stream = await self.network.connect(address)
                    greeted = await self.handshake(stream, False, expect, address)
        except RefusedError as error:
            self.note_refusal(error, address, expect)
        except (OSError, RemoteError):
            pass
        finally:
            hoped = self.dialling.pop(address, set())
        if greeted is not None and greeted[1].record is None:  # only those who dial may observe
            greeted[0].stream.close_now()
            greeted = None
        if greeted is None:
            self.missed(hoped)
            return
        self.missed(hoped - {None, greeted[0].peer})  # nothing may wait between the Hello and who closes the stream
        await self.run_link(*greeted)

    def note_refusal(self, error: RefusedError, address: Address, expect: PeerId | None) -> None:
        if error.code == "self" or (error.code == "closed" and expect is not None):
            return
        if address in self.seeds and (self.refusal is None or self.refusal.code == "closed"):
            self.refusal = error
        self.tell(f"{address}: {error}")

    async def accept(self, stream: ByteStream) -> None:
        if self.untrusted >= UNTRUSTED or self.closed:
            stream.close_now()
            return
        self.untrusted += 1
        try:
            greeted = await self.greet_stranger(stream)
            if greeted is None:
                stream.close_now()
                return
            if greeted[1].record is None:
                with trio.move_on_after(OBSERVED_S):  # an observer stays a stranger, and does not stay for long
                    await self.run_link(*greeted)
                return
        finally:
            self.untrusted -= 1
        await self.run_link(*greeted)

    async def greet_stranger(self, stream: ByteStream) -> tuple[Link, Hello] | None:
        try:
            with trio.move_on_after(self.config.hello_timeout_s):
                return await self.handshake(stream, True, None, None)
        except RefusedError as error:
            if error.code in ("layout", "swarm", "version", "secret"):
                self.tell(str(error))
        except RemoteError:
            pass
        return None

    async def handshake(
        self, stream: ByteStream, server_side: bool, expect: PeerId | None, dialled: Address | None
    ) -> tuple[Link, Hello]:
        try:
            proven = None
            if self.contexts is not None:
                tls = TlsStream(stream, self.contexts, server_side=server_side)
                await tls.handshake()
                stream, proven = tls, tls.peer_id
            reader = FrameReader(stream)
            theirs = await self.greeter.greet(stream, reader, self.me(), proven, expect)
        except BaseException:
            stream.close_now()
            raise
        peer = theirs.record.id if theirs.record is not None else PeerId(b"observer")
        return Link(stream, reader, peer, dialled), theirs

    async def try_dial(self, address: Address) -> bool:
        """Whether a connection to ``address`` can be opened at all."""
        if self.may_dial(address):
            with trio.move_on_after(self.config.hello_timeout_s), contextlib.suppress(OSError, RemoteError):
                stream = await self.network.connect(address)
                await stream.aclose()
                return True
        return False

    def tell(self, sentence: str) -> None:
        if sentence not in self.told and len(self.told) < TOLD:
            self.told.add(sentence)
            self.on_event("refused", sentence)
