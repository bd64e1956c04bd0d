"""The connector: dials and accepts links, up to the finished Hello, with limits on strangers."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from gossip.config import Config
from gossip.errors import RefusedError, RemoteError
from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.messages import Hello
from node.faults import Faults
from node.links.dial_budget import DialBudget
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.links.handshake_pool import HandshakePool, neighbourhood
from node.links.link import Link
from node.transport.byte_stream import BrokenLinkError, ByteStream, Network
from node.transport.sealed import fresh_share, leave_tls
from node.transport.seeds import Found, SeedLookup
from node.transport.tcp import is_loopback, is_private
from node.transport.tls import Contexts, TlsStream

__all__ = ["Access", "Connector"]

OBSERVED_S = 30.0  # The time limit for an observer to read the status, page by page.
DIALS = 16  # Concurrent dials.
NAME_BYTES = 16  # The length of a link's name, by which lanes join it.
# Concurrent dials to members known by hearsay: their addresses may belong to anybody and drop packets.
TO_STRANGERS = 2
TO_SILENT = 8  # Concurrent dials to addresses whose last dial timed out.
STRANGERS_WAITING = 64  # Dials to strangers that may queue; further ones fail at once.
SILENT_S = 1.0  # A dial that fails after this time was dropped, not refused.
REMEMBERED = 4_096  # Silent addresses that are remembered.
NAMED = 4  # Seeds whose failure is explained in the message that ends a node.
TOLD = 64  # Distinct refusals that are logged, so that strangers cannot fill the log.


@dataclass(frozen=True, slots=True)
class Access:
    """How a node reaches others, and they it.

    Attributes:
        network: Where it listens, and how it dials.
        greeter: Its part of a handshake.
        contexts: Its certificates; None in a swarm without a secret.
        lookup: The look-up of its seeds, if there is anything to look up.
    """

    network: Network
    greeter: Greeter
    contexts: Contexts | None = None
    lookup: SeedLookup | None = None


class LinkOwner(Protocol):
    """The network side that links belong to, a :class:`node.network.runtime.Runtime`."""

    @property
    def faults(self) -> Faults: ...

    def record(self) -> MemberRecord:
        """Return our own signed record."""

    def knows(self, peer: PeerId) -> bool:
        """Return True if this is or was a contacted member."""

    def member_hosts(self) -> Collection[str]:
        """Return the neighbourhoods of members' hosts."""

    async def run_link(self, link: Link, theirs: Hello) -> None:
        """Run a link from the finished Hello to the end of the stream."""

    def dial_failed(self, peer: PeerId | None) -> None:
        """Note that a peer (None: a seed) was not reached."""

    def seed_answered(self, seed: Address) -> None:
        """Note that a seed accepted a connection."""

    def met_itself(self, seed: Address) -> None:
        """Note that a seed is this node."""

    def strange(self, host: str) -> None:
        """Note that a handshake from this host led to no member."""

    def on_event(self, kind: str, sentence: str) -> None:
        """Tell people of an event."""


def has_sent(stream: ByteStream) -> bool:
    """Return True if a byte has come over a stream, as far as the stream can tell."""
    return getattr(stream, "heard", True)


class Connector:
    """The connector: opens links to other nodes and accepts theirs, for its ``owner``.

    ``seeds`` are the addresses of the seeds, as far as known; ``join`` runs an accepted connection as a lane.
    """

    def __init__(
        self, access: Access, config: Config, owner: LinkOwner, seeds: frozenset[Address] = frozenset()
    ) -> None:
        self.network, self.greeter, self.contexts = access.network, access.greeter, access.contexts
        self.config, self.owner, self.faults = config, owner, owner.faults
        self.join: Callable[[Link, Hello], Awaitable[None]] | None = None  # Takes a further connection of a link.
        # A refusal by a seed is final; one by an address from hearsay may only mean that the address is stale.
        self.seeds = seeds
        self.names: Mapping[Address, str] = {}  # The name under which the user gave a seed whose address was looked up.
        self.missing: Mapping[str, str] = {}  # For each name that was looked up and gave no seeds: the reason.
        # The peers that are expected at each address being dialled.
        self.dialling: dict[Address, set[PeerId | None]] = {}
        self.dial_limit = trio.CapacityLimiter(DIALS)
        self.stranger_limit, self.silent_limit = trio.CapacityLimiter(TO_STRANGERS), trio.CapacityLimiter(TO_SILENT)
        self.budget = DialBudget()
        self.strange: set[Address] = set()  # Addresses being dialled for members known by hearsay only.
        self.silent: OrderedDict[Address, None] = OrderedDict()  # Addresses whose last dial timed out.
        self.handshake_pool = HandshakePool(self.neighbours, has_sent, owner.strange)
        self.failures: dict[Address, str] = {}  # The failure of the last dial, for each seed that did not answer.
        self.unanswered: set[Address] = set()  # Seeds whose last dial failed without an answer.
        self.refusals: dict[Address, RefusedError] = {}  # Refusals of this node, by seed.
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

    def seeded(self, found: Found) -> None:
        """Take the addresses that a look-up of the seeds gave, and forget failures and refusals of former seeds."""
        self.seeds, self.names, self.missing = frozenset(found.addresses), found.names, found.missing
        self.failures = {address: why for address, why in self.failures.items() if address in self.seeds}
        self.refusals = {address: error for address, error in self.refusals.items() if address in self.seeds}

    def dial(self, address: Address, expect: PeerId | None) -> None:
        """Begin a link to ``address``, where ``expect`` should answer; one dial at a time to one address."""
        if self.closed or address == self.owner.record().address or (expect is not None and not self.may_dial(address)):
            self.spawn(self.report, {expect})
            return
        if address in self.dialling:
            self.dialling[address].add(expect)
            return
        strange = expect is not None and address not in self.seeds and not self.owner.knows(expect)
        if strange and len(self.strange) >= TO_STRANGERS + STRANGERS_WAITING:
            self.spawn(self.report, {expect})
            return
        if strange:
            self.strange.add(address)
        self.dialling[address] = {expect}
        self.spawn(self.dial_task, address, expect)

    def turn(self, address: Address) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the limiter to acquire before ``dial_limit``.

        Dials to addresses that drop packets last until the timeout. Their own limiters keep them from holding all
        places, so that dials to honest members never wait for them.
        """
        if address in self.strange:
            return self.stranger_limit
        return self.silent_limit if address in self.silent else contextlib.nullcontext()

    def neighbours(self) -> Collection[str]:
        """Return the networks for which the handshake pool reserves places: members, seeds and ourselves."""
        mine = self.owner.record().address
        hosts = {seed.host for seed in self.seeds} | ({mine.host} if mine is not None else set())
        return {neighbourhood(host) for host in hosts}.union(self.owner.member_hosts())

    def may_dial(self, address: Address) -> bool:
        """Return True if this node may dial an address that came in another's record.

        A node on a public address dials no private addresses, and a node on a network dials no loopback address.
        """
        mine = self.owner.record().address
        if mine is None or is_loopback(mine.host):
            return True
        return not is_loopback(address.host) and (is_private(mine.host) or not is_private(address.host))

    async def report(self, hoped: set[PeerId | None]) -> None:
        await trio.lowlevel.checkpoint()  # Never report from inside the decision that dialled.
        self.missed(hoped)

    def missed(self, hoped: set[PeerId | None]) -> None:
        for peer in hoped:
            self.owner.dial_failed(peer)

    async def dial_task(self, address: Address, expect: PeerId | None) -> None:
        greeted: tuple[Link, Hello] | None = None
        hoped: set[PeerId | None] = set()
        failure, refused, began, charged = "", None, trio.current_time(), False
        try:
            async with self.turn(address), self.dial_limit:
                began = trio.current_time()
                charged = address in self.seeds or self.budget.take(address, began)
                if not charged:
                    raise BrokenLinkError(
                        f"{address} is on a host where dials keep failing: its dial budget is used up."
                    )
                with trio.move_on_after(self.config.hello_timeout_s):
                    stream = await self.connect(address)
                    if address in self.seeds:
                        self.owner.seed_answered(address)
                    failure = "accepted the connection, but sent no greeting"
                    greeted = await self.handshake(stream, False, expect)
        except RefusedError as error:
            self.note_refusal(error, address, expect)
            refused = error
        except (OSError, RemoteError) as error:
            failure = failure or reason(error)
        finally:
            hoped = self.dialling.pop(address, set())
            self.strange.discard(address)
        if not charged:  # A dial that the budget refused says nothing about a member known by hearsay.
            self.missed({peer for peer in hoped if peer is None or self.owner.knows(peer)})
            return
        if greeted is not None and greeted[1].record is not None:
            self.budget.prove(address)
        if greeted is None and trio.current_time() - began > SILENT_S:
            self.silent[address] = None
            if len(self.silent) > REMEMBERED:
                self.silent.popitem(last=False)
        else:
            self.silent.pop(address, None)
        if address in self.seeds:
            self.note_seed(address, greeted is not None, failure or "did not answer", refused)
        if greeted is not None and greeted[1].record is None:  # Only a side that dials may be an observer.
            greeted[0].stream.close_now()
            greeted = None
        if greeted is None:
            self.missed(hoped)
            return
        greeted[0].address = address
        # Do not await between the Hello and `run_link`, which closes the stream.
        self.missed(hoped - {None, greeted[0].peer})
        await self.owner.run_link(*greeted)

    @property
    def refusal(self) -> RefusedError | None:
        """Return a seed's refusal of this node, preferably one that says more than "closed"."""
        errors = self.refusals.values()
        return next((error for error in errors if error.code != "closed"), next(iter(errors), None))

    def called(self, seed: Address) -> str:
        """Return the name under which the user knows a seed."""
        return self.names.get(seed) or str(seed)

    def note_seed(self, address: Address, greeted: bool, failure: str, refused: RefusedError | None) -> None:
        """Note the outcome of a dial to a seed.

        Nodes that start together do not listen at the same moment, so a seed that does not answer is reported after a
        delay.
        """
        if greeted or refused is not None:
            self.unanswered.discard(address)
        if greeted:
            self.failures.pop(address, None)
        elif refused is not None:  # `note_refusal` logs this one.
            self.failures[address] = f"refused this node: {refused}"
        else:
            self.failures[address] = failure
            if address not in self.unanswered:
                self.unanswered.add(address)
                self.spawn(self.tell_unanswered, address)

    async def tell_unanswered(self, address: Address) -> None:
        """Log once per cause why a seed still does not answer after half of ``join_timeout_s``.

        A name with several addresses is reported only if none answers: they may be ::1 and 127.0.0.1, or nodes of which
        some are down.
        """
        await trio.sleep(self.config.join_timeout_s / 2)
        if address not in self.unanswered:
            return
        self.unanswered.discard(address)  # The next failed dial starts a new delay and may report another cause.
        name, failure = self.called(address), self.failures.get(address)
        missing = all(seed in self.failures for seed in self.seeds if self.called(seed) == name)
        if failure is not None and address in self.seeds and missing:
            self.tell(f"Seed {name} {failure}; it is tried again and again.", "seed")

    def why_alone(self) -> str:
        """Return the failure of the last dial to each seed, or of the look-up of seeds."""
        causes = {self.called(address): failure for address, failure in self.failures.items()}
        said = [*(f"seed {name} {failure}" for name, failure in causes.items()), *map(" ".join, self.missing.items())]
        if len(said) > NAMED:
            said[NAMED:] = [f"{len(said) - NAMED} more failed likewise"]
        return "; ".join(said) or "no node there sent its weights"

    def note_refusal(self, error: RefusedError, address: Address, expect: PeerId | None) -> None:
        if error.code == "self" and address in self.seeds:
            self.owner.met_itself(address)
        if error.code == "self" or (error.code == "closed" and expect is not None):
            return
        if address in self.seeds:
            self.refusals[address] = error
        self.tell(f"{address}: {error}")

    async def accept(self, stream: ByteStream) -> None:
        if self.closed:
            stream.close_now()
            return
        visitor = self.handshake_pool.enter(stream, trio.current_time())
        try:
            greeted = await self.greet_stranger(stream)
            if greeted is None:
                stream.close_now()
                if visitor in self.handshake_pool.visitors:  # Otherwise the handshake pool has reported it.
                    self.owner.strange(stream.peer_host)
                return
            if greeted[1].record is None:
                # An observer keeps its place in the handshake pool, so its time is limited.
                with trio.move_on_after(OBSERVED_S):
                    await self.owner.run_link(*greeted)
                return
        finally:
            self.handshake_pool.leave(visitor)
        if greeted[1].joins and self.join is not None:
            await self.join(*greeted)
        else:
            await self.owner.run_link(*greeted)

    async def greet_stranger(self, stream: ByteStream) -> tuple[Link, Hello] | None:
        try:
            with trio.move_on_after(self.config.hello_timeout_s):
                return await self.handshake(stream, True, None)
        except RefusedError as error:
            if error.code in ("layout", "swarm", "version", "secret"):
                self.tell(str(error))
        except RemoteError:
            pass
        return None

    async def dial_lane(self, address: Address, peer: PeerId, joins: bytes) -> Link | None:
        """Open another connection for the link to ``peer`` that was dialled at ``address``.

        Returns:
            The lane, or None if nothing answers within ``hello_timeout_s``.

        Raises:
            OSError, RemoteError: The connection or its handshake failed.
        """
        async with self.dial_limit:
            with trio.move_on_after(self.config.hello_timeout_s):
                return (await self.handshake(await self.connect(address), False, peer, joins))[0]
        return None

    async def handshake(
        self, stream: ByteStream, server_side: bool, expect: PeerId | None, joins: bytes = b""
    ) -> tuple[Link, Hello]:
        try:
            proven, share = None, b""
            name = b"" if joins else secrets.token_bytes(NAME_BYTES)
            if self.contexts is not None:
                tls = TlsStream(stream, self.contexts, server_side=server_side)
                await tls.handshake()
                stream, proven, share = tls, tls.peer_id, fresh_share()
            reader = FrameReader(stream)
            theirs = await self.greeter.greet(stream, reader, self.owner.record(), proven, expect, share, name, joins)
            if share and theirs.share:
                stream = reader.stream = await leave_tls(tls, share, theirs.share)
        except (OSError, RemoteError):
            stream.close_now()
            raise
        except Exception as error:
            stream.close_now()
            self.faults.contain(error, "The handshake with a stranger", "its link is closed")
            raise BrokenLinkError("A fault of this program ended the handshake.") from None
        except BaseException:
            stream.close_now()
            raise
        peer = theirs.record.id if theirs.record is not None else PeerId(b"observer")
        link = Link(stream, reader, peer)
        link.name, link.named = name, theirs.lanes
        return link, theirs

    async def try_dial(self, address: Address, asker: str = "") -> bool:
        """Return True if a connection to ``address`` can be opened, for a member whose link comes from ``asker``.

        A connection does not prove that a member listens. So the dial stays charged to the budget, unless the address
        is on the asker's own host.
        """
        own = neighbourhood(address.host) == neighbourhood(asker)
        if self.may_dial(address) and (own or self.budget.take(address, trio.current_time())):
            with trio.move_on_after(self.config.hello_timeout_s), contextlib.suppress(OSError, RemoteError):
                stream = await self.connect(address)
                await stream.aclose()
                return True
        return False

    async def connect(self, address: Address) -> ByteStream:
        """Dial ``address``. It comes from others, so any fault that it causes counts as a failed dial."""
        try:
            return await self.network.connect(address)
        except (OSError, RemoteError):
            raise
        except Exception as error:
            self.faults.contain(error, "Dialling an address from another member", "it is not dialled")
            raise BrokenLinkError(f"{address} cannot be dialled.") from None

    def tell(self, sentence: str, kind: str = "refused") -> None:
        if sentence not in self.told and len(self.told) < TOLD:
            self.told.add(sentence)
            self.owner.on_event(kind, sentence)


def reason(error: OSError | RemoteError) -> str:
    """Return in words why a connection failed."""
    if isinstance(error, socket.gaierror):
        return "has a name that cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection: no node listens there"
    if isinstance(error, RemoteError):
        return "did not answer" if error.code == "broken" else f"did not greet: {error}"
    return f"cannot be reached: {(error.strerror or str(error)).lower()}"
