"""The attacker: a real member of the swarm that holds the secret and behaves well except where an attack changes it.

It keeps links, answers probes and refutes suspicions, so that honest nodes take it for a member. It answers offers with
Busy. With ``mixes`` it accepts them and returns the partner's own vector, which changes no model. An attack replaces
the handlers of some messages, or sends messages of its own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.lowlevel
from line import Line, chunk_of, hello_of, open_line

from gossip.codecs import get_codec
from gossip.ids import UNSTATED, Address, MemberRecord, PeerId
from gossip.wire.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Chunk,
    Commit,
    Digest,
    Fetch,
    Gossip,
    Hint,
    Invite,
    Message,
    Nack,
    Offer,
    Outcome,
    Ping,
    PingReq,
    Reach,
    Reached,
    Records,
    Refuse,
    Settled,
)  # fmt: skip
from gossip.wire.records import signed
from node.identity.keys import Identity
from node.transport.tls import Contexts, swarm_contexts

MAX = 2**53 - 1  # the largest number in a record
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class Target:
    """The swarm under attack, as far as an attack knows it."""

    nodes: list[Address]
    secret: bytes
    fingerprint: str
    run_id: bytes
    elements: int
    identities: Path  # file with one line for each of the attacker's identities, for searching the logs
    seeds: Path  # file with one line for each address that a newcomer must dial first
    version: float = 100.0
    pushes: bool = False  # Members push instead of exchanging.


@dataclass
class Session:
    """An exchange as the attacker sees it."""

    line: Line
    number: int
    codec: str
    weight: float
    received: bytearray
    elements: int = 0  # elements received
    answered: bool = False


class Member:
    """One identity of the attacker, with links to the honest nodes."""

    def __init__(self, target: Target, identity: Identity | None = None, mixes: bool = False, **record: Any) -> None:
        self.target, self.mixes = target, mixes
        self.identity = identity or Identity.fresh()
        self.contexts: Contexts = swarm_contexts(self.identity, target.secret)
        fields: dict[str, Any] = {
            "incarnation": 1, "ready": True, "run_id": target.run_id, "version": target.version, "samples": 1000,
            "steps": 60,
        }  # fmt: skip
        self.record = self.sign(MemberRecord(self.identity.id, self.identity.public_key, **(fields | record)))
        self.lines: list[Line] = []
        self.known: dict[PeerId, MemberRecord] = {}
        self.sessions: dict[int, Session] = {}
        self.handlers: dict[
            type, Callable[[Line, Any, bytes], Awaitable[None]]
        ] = {}  # the attack's handlers, by message
        self.transform: Callable[[Floats], Floats] = lambda vector: vector  # received vector -> vector to send
        self.version: float = target.version  # version stated in Offer and Accept
        self.claim = UNSTATED  # progress stated in Offer and Accept
        self.mixed = 0
        with target.identities.open("a") as file:
            file.write(self.identity.id.hex() + "\n")

    def sign(self, record: MemberRecord, **changes: Any) -> MemberRecord:
        return signed(dataclasses.replace(record, **changes), self.identity.sign)

    def update(self, **changes: Any) -> MemberRecord:
        self.record = self.sign(self.record, sequence=self.record.sequence + 1, **changes)
        return self.record

    # -- links -------------------------------------------------------------------------------------------------------
    async def live(self, nursery: trio.Nursery) -> Member:
        """Keep a link to every honest node, and a record whose progress grows like that of an honest member."""
        for address in self.target.nodes:
            nursery.start_soon(self.keep, address, nursery)
        nursery.start_soon(self.progress)
        with trio.move_on_after(3.0):
            while len(self.open_lines()) < len(self.target.nodes):  # noqa: ASYNC110 - an attack has time
                await trio.sleep(0.02)
        return self

    async def keep(self, address: Address, nursery: trio.Nursery) -> None:
        while True:
            line = await open_line(address, self.contexts, self.target.fingerprint, self.record)
            if line is not None:
                self.lines.append(line)
                assert line.record is not None
                self.known[line.record.id] = line.record
                await line.read_all(self.on_message)
                self.lines.remove(line)
            await trio.sleep(0.3)

    async def serve(self, nursery: trio.Nursery) -> None:
        """Listen as well, so that honest nodes can dial this member. Call it before :meth:`live`."""
        from node.transport.tcp import TcpNetwork
        from node.transport.tls import TlsStream

        network = TcpNetwork(Address("127.0.0.1", 0))
        address = await network.bind()

        async def accept(stream: Any) -> None:
            tls = TlsStream(stream, self.contexts, server_side=True)
            try:
                with trio.fail_after(5.0):
                    await tls.handshake()
            except Exception:  # the dialler has gone
                stream.close_now()
                return
            line = Line(tls)
            if await line.hello(hello_of(self.target.fingerprint, self.record)) is not None:
                self.lines.append(line)
                await line.read_all(self.on_message)
                self.lines.remove(line)

        self.update(address=address)
        nursery.start_soon(network.serve, accept, nursery)

    def open_lines(self) -> list[Line]:
        return [line for line in self.lines if line.open]

    def line_to(self, peer: PeerId) -> Line | None:
        return next((line for line in self.open_lines() if line.peer == peer), None)

    async def tell(self, message: Message) -> None:
        """Send a message over every open link."""
        for line in self.open_lines():
            await line.send(message)

    async def progress(self) -> None:
        while True:
            await trio.sleep(0.5)
            self.update(samples=min(MAX, self.record.samples + 500), steps=min(MAX, self.record.steps + 30))
            await self.tell(Gossip((self.record,)))

    # -- messages ----------------------------------------------------------------------------------------------------
    async def on_message(self, line: Line, message: Message, body: bytes) -> None:
        for update in getattr(message, "updates", getattr(message, "records", ())):
            await self.on_update(line, update)
        handler = self.handlers.get(type(message))
        if handler is not None:
            await handler(line, message, body)
            return
        await self.answer(line, message, body)

    async def on_update(self, line: Line, update: MemberRecord | Hint) -> None:
        if isinstance(update, MemberRecord):
            self.known[update.id] = update
        elif update.peer == self.record.id and update.incarnation >= self.record.incarnation:
            self.update(incarnation=update.incarnation + 1)
            await line.send(Gossip((self.record,)))

    async def answer(self, line: Line, message: Message, body: bytes) -> None:
        """Answer a message as an honest member would."""
        match message:
            case Ping():
                await line.send(Ack(message.seq, ()))
            case PingReq():
                await line.send(Nack(message.seq))
            case Digest():
                await line.send(Records((self.record,), b""))
            case Reach():
                await line.send(Reached(True))
            case Offer() if self.mixes:
                await self.accept(line, message)
            case Offer():
                await line.send(Busy(message.session))
            case Accept():
                session = self.sessions.get(message.session)
                if session is not None:
                    session.codec, session.weight = message.codec, message.weight
            case Chunk():
                await self.on_chunk(line, message, body)
            case Commit():
                self.mixed += self.sessions.pop(message.session, None) is not None
            case Outcome():
                await line.send(Settled(message.session, True))
            case Invite():
                await line.send(Busy(message.session))
            case Fetch():
                await line.send(Refuse(message.session, "not-ready"))
            case Busy() | Refuse() | Abort():
                self.sessions.pop(message.session, None)
            case _:
                pass

    # -- exchanges ---------------------------------------------------------------------------------------------------
    async def accept(self, line: Line, offer: Offer) -> None:
        self.sessions[offer.session] = Session(line, offer.session, offer.codec, offer.weight, bytearray())
        await line.send(Accept(offer.session, self.version, offer.weight, offer.codec, self.claim))

    async def offer(self, line: Line, **changes: Any) -> int:
        """Send an Offer, and return the number of the exchange."""
        number = random.getrandbits(62)
        message = Offer(number, self.target.fingerprint, self.target.run_id, self.version, 0.5, "fp32")
        if self.target.pushes:
            message = dataclasses.replace(message, mixing="push", mass=1.0)
        message = dataclasses.replace(message, **({"progress": self.claim} | changes))
        self.sessions[number] = Session(line, number, message.codec, 0.5, bytearray())
        if len(self.sessions) > 4096:
            del self.sessions[next(iter(self.sessions))]
        await line.send(message)
        return number

    async def offer_for_ever(self, pause_s: float) -> None:
        """Send an Offer over every open link, again and again, with a pause after each round."""
        while True:
            for line in self.open_lines():
                await self.offer(line)
            await trio.sleep(pause_s)

    async def on_chunk(self, line: Line, chunk: Chunk, body: bytes) -> None:
        session = self.take_chunk(chunk, body)
        if session is not None:
            await self.send_vector(session, self.transform(self.decoded(session)))
            await line.send(Commit(session.number))

    def take_chunk(self, chunk: Chunk, body: bytes) -> Session | None:
        """Add a chunk, and return its session once, when the partner's vector is complete."""
        session = self.sessions.get(chunk.session)
        if session is None or session.answered:
            return None
        session.received += body
        session.elements += chunk.elements
        session.answered = session.elements >= self.target.elements
        return session if session.answered else None

    def decoded(self, session: Session) -> Floats:
        out = np.empty(session.elements, np.float32)
        get_codec(session.codec).decode(session.received, out, out, session.number, 0)
        return out

    async def send_vector(self, session: Session, vector: Floats) -> None:
        """Send a vector in one chunk, which is large enough for the models of these runs."""
        codec = get_codec(session.codec)
        body = bytearray(codec.encoded_bytes(vector.size))
        codec.encode(np.ascontiguousarray(vector, np.float32), body, session.number, 0)
        await session.line.send(chunk_of(session.number, 0, vector.size, bytes(body)), bytes(body))


async def nothing(_line: Line, _message: Any, _body: bytes) -> None:
    """Ignore a message."""
    await trio.lowlevel.checkpoint()


class Foe:
    """The argument of an attack: a factory of members, a nursery for them, and the target."""

    def __init__(self, target: Target, nursery: trio.Nursery) -> None:
        self.target, self.nursery = target, nursery

    async def member(self, listen: bool = True, mixes: bool = False, **record: Any) -> Member:
        """Create a member with a fresh identity that has links to every honest node."""
        member = Member(self.target, mixes=mixes, **record)
        if listen:
            await member.serve(self.nursery)
        return await member.live(self.nursery)

    async def at_each_node(self, attack: Callable[[Address], Awaitable[None]], times: int = 1) -> None:
        """Run an attack on each node, so many at once and one after the other, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for address in self.target.nodes:
                for _ in range(times):
                    nursery.start_soon(attack, address)
                    await trio.sleep(0.01)

    def seed(self, member: Member) -> None:
        """Make a newcomer dial this member first."""
        with self.target.seeds.open("a") as file:
            file.write(f"{member.record.address}\n")

    def quiet(self, **record: Any) -> Member:
        """Create a member with a fresh identity and no links."""
        return Member(self.target, **record)
