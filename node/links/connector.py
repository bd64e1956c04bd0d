"""The connector: it dials and accepts links up to the finished Hello, with limits on strangers.

A *stranger* is a peer that this node has never been in contact with. Its address is hearsay, and may belong to anybody.
An *observer* queries the status of a node, or reads its weights, and is no member: its Hello has no record. ``theirs``
is the Hello of the other side.
"""

import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from gossip.config import Config
from gossip.discovery.reachability import TRY_S
from gossip.discovery.sightings import Sighting
from gossip.errors import RefusedError, RemoteError
from gossip.ids import Address, PeerId, short
from gossip.peer import Peer
from gossip.recent import Recent
from gossip.wire.messages import Hello
from node.faults import Faults
from node.links.dial_budget import DialBudget
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.links.handshake_pool import HandshakePool, neighbourhood
from node.links.link import Link
from node.links.seed_status import SeedStatus
from node.transport.byte_stream import BrokenLinkError, ByteStream, Network, socket_of
from node.transport.sealed import fresh_share, leave_tls
from node.transport.seeds import SeedLookup
from node.transport.tcp import Scope, is_name, numeric_address, scope_of
from node.transport.tls import Contexts, TlsStream

OBSERVER_S = 30.0  # Time for an observer to read the status page by page, or to fetch another piece of the weights.
OBSERVER = b"observer"  # Begins what stands for the id of an observer, which has none.
MAX_DIALS = 16  # Concurrent dials of all kinds.
NAME_BYTES = 16  # The length of a link's name, by which lanes join it.
MAX_STRANGER_DIALS = 2  # Concurrent dials to strangers, whose addresses may drop packets.
MAX_SILENT_DIALS = 8  # Concurrent dials to addresses whose last dial timed out.
MAX_STRANGERS = MAX_STRANGER_DIALS + 64  # Dials to strangers that may run or queue; further ones fail at once.
NO_GREETING = "accepted the connection, but sent no greeting"
SILENT_S = 1.0  # A dial that fails after a longer time was dropped by the network, and not refused.
MAX_SILENT_ADDRESSES = 4_096  # Silent addresses that are remembered.
MAX_NOTICES = 64  # Distinct notices of one kind, so that strangers cannot fill the log.


@dataclass(frozen=True, slots=True)
class Access:
    """The means by which a node reaches others, and others reach it.

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


@dataclass(slots=True)
class DialOutcome:
    """The outcome of one dial, which is *greeted* if its handshake succeeds."""

    is_allowed: bool = False  # The dial budget allows it. Otherwise nothing was dialled.
    seconds: float = 0.0  # The duration of the dial, without waits for limiters.
    greeted: tuple[Link, Hello] | None = None  # The link and the other side's Hello; None if the dial failed.
    failure: str = ""  # A clause that says why there is no link; empty if nothing answered in time.
    is_busy: bool = False  # The other side accepted the connection and closed it, as a node without room does.
    refusal: RefusedError | None = None  # The refusal, if either side has refused the other.


class LinkOwner(Protocol):
    """The network side that links belong to, a :class:`node.network.runtime.Runtime`."""

    peer: Peer

    @property
    def faults(self) -> Faults: ...

    async def run_link(self, link: Link, theirs: Hello) -> None:
        """Run a link from the finished Hello to the end of the stream."""

    def on_dial_failed(self, peer: PeerId | None) -> None:
        """Handle a dial that did not reach this peer, or a seed (None)."""

    def report_misbehaviour(self, culprit: PeerId | str, kind: str) -> None:
        """Report a kind of misbehaviour of a member, or of a stranger's host."""

    def notify(self, kind: str, sentence: str) -> None:
        """Tell the user of an event."""


class Connector:
    """The connector of one node. It opens links to other nodes and accepts theirs, and passes them to its owner.

    Args:
        access: The network, certificates and the look-up of seeds.
        config: The node's configuration.
        owner: The network side that the links belong to.
        seeds: The addresses of the seeds, as far as they are known.
    """

    def __init__(
        self, access: Access, config: Config, owner: LinkOwner, seeds: frozenset[Address] = frozenset()
    ) -> None:
        self.network, self.greeter = access.network, access.greeter
        self.contexts, self.lookup = access.contexts, access.lookup
        self.config, self.owner, self.peer, self.faults = config, owner, owner.peer, owner.faults
        # Handles an accepted connection whose Hello says that it joins a link or a tunnel. None: it is run as a link.
        self.on_joining: Callable[[Link, Hello], Awaitable[None]] | None = None
        self.seeds = SeedStatus(seeds, config.join_timeout_s / 2, self.spawn, self.notify_once)
        # For each address that is being dialled, and whether as a stranger's: the peers that are expected there, None
        # for a seed.
        self.dialling: dict[tuple[Address, bool], set[PeerId | None]] = {}
        self.dial_limit = trio.CapacityLimiter(MAX_DIALS)
        self.stranger_limit = trio.CapacityLimiter(MAX_STRANGER_DIALS)
        self.silent_limit = trio.CapacityLimiter(MAX_SILENT_DIALS)
        self.budget = DialBudget()
        self.silent_addresses = Recent[Address, None](MAX_SILENT_ADDRESSES)  # Addresses whose last dial timed out.
        # The address ranges of contacted members' hosts, and the value of `Membership.turnover` (a count of changes)
        # when they were collected; -1: never.
        self.member_hosts, self.hosts_turnover = frozenset[str](), -1
        self.handshake_pool = HandshakePool(self.favoured_hosts, self.on_failed_handshake)
        self.notified: dict[str, set[str]] = {}  # The sentences that the user was told, by kind.
        self.nursery: trio.Nursery | None = None  # None before :meth:`open`.
        self.is_closed = False

    def open(self, nursery: trio.Nursery) -> None:
        """Begin to dial and to accept; the tasks of links run in ``nursery``."""
        self.nursery = nursery
        nursery.start_soon(self.network.serve, self.accept, nursery)

    def spawn(self, task: Callable[..., Any], *args: object) -> None:
        if self.nursery is not None and not self.is_closed:
            self.nursery.start_soon(task, *args)

    def dial(self, address: Address, expect: PeerId | None) -> None:
        """Begin a link to ``address``, where the peer ``expect`` should answer; None for a seed.

        There is one dial at a time to an address, and another beside a stranger's, which may wait long for its turn:
        strangers may claim the addresses of members.
        """
        if self.is_closed or address == self.peer.membership.me.address:
            self.spawn(self.report_failed_dials_soon, {expect})
            return
        is_known = expect is None or self.peer.membership.remembers(expect)
        is_stranger = not is_known and address not in self.seeds.addresses
        if expected := self.dialling.get((address, False)) or self.dialling.get((address, is_stranger)):
            expected.add(expect)
            return
        if is_stranger and sum(of_stranger for _, of_stranger in self.dialling) >= MAX_STRANGERS:
            self.spawn(self.report_failed_dials_soon, {expect})
            return
        self.dialling[address, is_stranger] = {expect}
        self.spawn(self.dial_task, address, expect, is_stranger)

    def limiter_for(self, address: Address, is_stranger: bool) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the limiter that a dial acquires before ``dial_limit``.

        A dial to an address that drops packets lasts until its timeout. Limiters of their own keep such dials from
        taking all places, so that dials to honest members never wait for them.
        """
        if is_stranger:
            return self.stranger_limit
        return self.silent_limit if address in self.silent_addresses else contextlib.nullcontext()

    def favoured_hosts(self) -> Collection[str]:
        """Return the address ranges for which the handshake pool reserves places: of members, seeds and this node."""
        if self.peer.membership.turnover != self.hosts_turnover:
            self.hosts_turnover = self.peer.membership.turnover
            records = map(self.peer.membership.record, self.peer.membership.contacted())
            addresses = [record.address for record in records if record is not None and record.address is not None]
            self.member_hosts = frozenset(neighbourhood(address.host) for address in addresses)
        mine = self.peer.membership.me.address
        hosts = {seed.host for seed in self.seeds.addresses} | ({mine.host} if mine is not None else set())
        return self.member_hosts.union(map(neighbourhood, hosts))

    def may_dial(self, host: str) -> bool:
        """Return True if this node may dial a numeric address to which a peer's word has led.

        A node dials no address of a smaller scope than its own: one on a public address no private networks, and one on
        a network no loopback and no link-local addresses. A node that cannot be dialled has the scope of its seeds. One
        whose router passes connections on has its scope inside.
        """
        scope, mine = scope_of(host), self.peer.membership.me.address
        if mine is not None:
            return scope >= max(Scope.LOOPBACK, scope_of((self.peer.reach.inside or mine).host))
        return scope >= min([Scope.PRIVATE, *(scope_of(seed.host) for seed in self.seeds.addresses)])

    def limits(self, address: Address, outcome: DialOutcome | None = None) -> Callable[[str], bool]:
        """Return the limits on a dial of ``address``, to ask with each numeric address that is about to be dialled.

        Raises:
            BrokenLinkError: It is a name of a domain that was looked up too often.
        """
        if is_name(address.host) and not self.budget.charge(address, trio.current_time()):
            raise BrokenLinkError(f"{address} was looked up too often.")
        noted = outcome or DialOutcome()

        def allows(host: str) -> bool:
            is_allowed = self.may_dial(host) and self.budget.charge(Address(host, address.port), trio.current_time())
            noted.is_allowed = noted.is_allowed or is_allowed
            return is_allowed

        return allows

    async def report_failed_dials_soon(self, expected: set[PeerId | None]) -> None:
        await trio.lowlevel.checkpoint()  # The report must not come inside the decision that dialled.
        self.report_failed_dials(expected)

    def report_failed_dials(self, expected: set[PeerId | None]) -> None:
        """Report each of the expected peers (None: a seed) as not reached."""
        for peer in expected:
            self.owner.on_dial_failed(peer)

    async def dial_task(self, address: Address, expect: PeerId | None, is_stranger: bool) -> None:
        """Dial an address and run the link. Without a link, report every peer that was expected there."""
        expected: set[PeerId | None] = set()  # All peers for which this address was dialled meanwhile.
        try:
            outcome = await self.dial_and_greet(address, expect, is_stranger)
        finally:
            expected = self.dialling.pop((address, is_stranger), set())
        if not outcome.is_allowed:  # That says nothing about a stranger, which is not reported.
            remembers = self.peer.membership.remembers
            self.report_failed_dials({peer for peer in expected if peer is None or remembers(peer)})
            return
        self.note_dialled(address, outcome)
        link, theirs = outcome.greeted or (None, None)
        if link is None or theirs is None or theirs.record is None:
            if link is not None:  # Only a side that dials may be an observer.
                link.stream.close_now()
            self.report_failed_dials(expected)
            return
        link.address = address
        # There must be no await between the Hello and `run_link`, which closes the stream.
        self.report_failed_dials(expected - {None, link.peer})
        await self.owner.run_link(link, theirs)

    async def dial_and_greet(self, address: Address, expect: PeerId | None, is_stranger: bool) -> DialOutcome:
        """Dial an address, once the limits on dials allow it, and shake hands there."""
        outcome, began = DialOutcome(), trio.current_time()
        try:
            async with self.limiter_for(address, is_stranger), self.dial_limit:
                began = trio.current_time()
                with trio.move_on_after(self.config.hello_timeout_s):
                    stream = await self.connect(address, outcome)
                    outcome.failure = NO_GREETING
                    outcome.greeted = await self.handshake(stream, False, None)
                    self.check_expected(address, expect, outcome.greeted[0].peer)
        except RefusedError as error:
            self.on_refusal(error, address, expect)
            outcome.refusal, outcome.is_busy = error, error.code == "closed"
        except (OSError, RemoteError) as error:
            is_closed = outcome.failure == NO_GREETING and isinstance(error, BrokenLinkError)
            outcome.is_busy = is_closed and not getattr(stream, "has_received", True)
            outcome.failure = NO_GREETING if is_closed else describe_failure(error)
        outcome.seconds = trio.current_time() - began
        return outcome

    def check_expected(self, address: Address, expect: PeerId | None, found: PeerId) -> None:
        """Tell the user if another member answers at a seed than its invite names. It is a member all the same.

        A machine that was set up anew has a new key. That it holds the secret is what makes it a member.
        """
        if address in self.seeds.addresses and expect not in (None, found) and not found.startswith(OBSERVER):
            self.notify_once(
                f"Seed {address} is member {short(found)} now, and not {short(expect)} as its invite says: it was set "
                "up anew, or another member has its address. This node takes it for a seed all the same.", "seed"
            )  # fmt: skip

    def note_dialled(self, address: Address, outcome: DialOutcome) -> None:
        """Note the outcome of a dial for later dials and for the user."""
        if outcome.greeted is not None and outcome.greeted[1].record is not None:
            self.budget.mark_proven(address)
            self.budget.mark_proven(Address(outcome.greeted[0].stream.peer_host, address.port))
        self.silent_addresses.pop(address, None)
        if outcome.greeted is None and outcome.seconds > SILENT_S:  # Later dials to it wait their turn.
            self.silent_addresses[address] = None
        if address in self.seeds.addresses:
            if outcome.is_busy:
                self.peer.on_seed_busy(address)
            failure = outcome.failure or "did not answer"
            self.seeds.on_dialled(address, outcome.greeted is not None, failure, outcome.refusal)

    def on_refusal(self, error: RefusedError, address: Address, expect: PeerId | None) -> None:
        """Handle a handshake that either side has refused at this address."""
        if error.code == "self" and address in self.seeds.addresses:
            if self.lookup is not None:
                self.lookup.on_own_address(address)
            self.peer.on_own_seed(address)
        if error.code == "self" or (error.code == "closed" and expect is not None):
            return
        if address in self.seeds.addresses:
            self.seeds.refusals[address] = error
        self.notify_once(f"{address}: {error}")

    async def accept(self, stream: ByteStream) -> None:
        """Greet the other side of an accepted connection, and run it as a link, as a lane or for an observer."""
        if self.is_closed:
            stream.close_now()
            return
        visitor = self.handshake_pool.enter(stream, trio.current_time())
        try:
            greeted = await self.greet_stranger(stream)
            if greeted is None:
                stream.close_now()
                if visitor in self.handshake_pool.visitors:  # The pool itself reports visitors that it evicts.
                    self.on_failed_handshake(stream.peer_host)
                return
            link, theirs = greeted
            if theirs.record is None:
                # An observer keeps its place in the handshake pool, so its time is limited.
                visitor.link = link
                with trio.move_on_after(OBSERVER_S) as link.visit:
                    await self.owner.run_link(link, theirs)
                return
        finally:
            self.handshake_pool.leave(visitor)
        if theirs.joins and self.on_joining is not None:
            await self.on_joining(link, theirs)
        else:
            await self.owner.run_link(link, theirs)

    def on_failed_handshake(self, host: str) -> None:
        """Handle a handshake from this host that led to no member."""
        self.owner.report_misbehaviour(host, "strangers")

    async def greet_stranger(self, stream: ByteStream) -> tuple[Link, Hello] | None:
        """Return the link over an accepted connection, and the other side's Hello; None if the handshake fails."""
        try:
            with trio.move_on_after(self.config.hello_timeout_s):
                return await self.handshake(stream, True, None)
        except RefusedError as error:
            if error.code in ("layout", "swarm", "version", "secret"):
                self.notify_once(str(error))
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
        """Authenticate both sides of a connection, and return the link and the other side's Hello.

        Args:
            stream: The connection, which is closed if this fails.
            server_side: True if the other side has dialled.
            expect: The peer that should answer, if any.
            joins: The name of the link that this connection joins as a lane.

        Raises:
            OSError, RemoteError: The handshake failed.
        """
        try:
            plain = socket_of(stream)
            seen = "" if plain is None else str(plain.remote)
            proven, share = None, b""  # Without TLS no id is proved, and no record is sealed.
            name = b"" if joins else secrets.token_bytes(NAME_BYTES)  # A lane takes no lanes, and needs no name.
            if self.contexts is not None:
                tls = TlsStream(stream, self.contexts, server_side=server_side)
                await tls.handshake()
                stream, proven, share = tls, tls.peer_id, fresh_share()
            reader = FrameReader(stream)
            theirs = await self.greeter.greet(
                stream, reader, self.peer.membership.me, proven, expect, share, name, joins, seen
            )
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
        peer = PeerId(OBSERVER + secrets.token_bytes(8)) if theirs.record is None else theirs.record.id
        link = Link(stream, reader, peer)
        link.name_for_their_lanes, link.name_for_our_lanes = name, theirs.lanes
        if plain is not None:
            link.sighting = Sighting(plain.remote, numeric_address(theirs.seen))
        return link, theirs

    async def try_dial(self, address: Address) -> bool:
        """Return True if a connection to ``address`` can be opened, on request of a member.

        The dial stays charged to the budget of the host, because a connection does not prove that a member listens
        there: members cannot scan the ports of a host through others, nor those of their own.
        """
        with trio.move_on_after(TRY_S), contextlib.suppress(OSError, RemoteError):
            stream = await self.connect(address)
            await stream.aclose()
            return True
        return False

    async def connect(self, address: Address, outcome: DialOutcome | None = None) -> ByteStream:
        """Dial ``address``. Another peer may have made it up, so any fault that it causes is a failed dial.

        All limits apply to the numeric addresses to which it leads, as each is dialled. Only seeds have none.

        Raises:
            OSError, RemoteError: Nothing answers. ``outcome.is_allowed`` says whether anything was dialled.
        """
        try:
            if address in self.seeds.addresses:
                if outcome is not None:
                    outcome.is_allowed = True
                return await self.network.connect(address)
            return await self.network.connect(address, self.limits(address, outcome))
        except (OSError, RemoteError):
            raise
        except Exception as error:
            self.faults.contain(error, "Dialling an address from another member", "it is not dialled")
            raise BrokenLinkError(f"{address} cannot be dialled.") from None

    def notify_once(self, sentence: str, kind: str = "refused") -> None:
        """Tell the user a sentence, unless the user was told already or too many others of its kind."""
        told = self.notified.setdefault(kind, set())
        if sentence not in told and len(told) < MAX_NOTICES:
            told.add(sentence)
            self.owner.notify(kind, sentence)


def describe_failure(error: OSError | RemoteError) -> str:
    """Return in a clause why a connection failed."""
    if isinstance(error, socket.gaierror):
        return "has a name that cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection: no node listens there"
    if isinstance(error, RemoteError):
        return "did not answer" if error.code == "broken" else f"did not greet: {str(error).removesuffix('.')}"
    return f"cannot be reached: {(error.strerror or str(error)).lower()}"
