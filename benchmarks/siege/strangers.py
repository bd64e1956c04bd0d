"""Attacks on the transport and the wire format: peers without the secret, malformed frames and fields, replays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import trio
from attack import attack
from foe import Foe
from line import Line, open_line, plain, tls

from gossip.ids import Address, MemberRecord
from gossip.wire.frames import encode
from gossip.wire.messages import MESSAGES, Chunk, Gossip, Hint, Message
from node.identity.keys import Identity
from node.transport.tls import swarm_contexts


async def hold(address: Address, first: bytes, drip_s: float = 0.0) -> None:
    """Keep a connection open that sends ``first``, then nothing or a byte each ``drip_s``; reopen it when closed."""
    while True:
        try:
            stream = await plain(address)
            if first:
                await stream.send_all(first)
            with trio.CancelScope():
                async with trio.open_nursery() as nursery:
                    if drip_s:
                        nursery.start_soon(drip, stream, drip_s)
                    buffer = memoryview(bytearray(4096))
                    while await stream.receive_into(buffer):
                        pass
                    nursery.cancel_scope.cancel()
            stream.close_now()
        except Exception:  # the node closed or refused the connection
            await trio.sleep(0.1)


async def drip(stream: Any, every_s: float) -> None:
    try:
        while True:
            await stream.send_all(os.urandom(1))
            await trio.sleep(every_s)
    except Exception:  # the node closed the connection
        return


@attack("80 sockets to each node that say nothing, without the secret", named="address", newcomer=True)
async def silent(foe: Foe) -> None:
    await foe.at_each_node(functools.partial(hold, first=b""), 80)


@attack("a byte a second: before TLS, and inside a Hello, a header and a body", named="address", newcomer=True)
async def slowloris(foe: Foe) -> None:
    member = await foe.member()
    client_hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"

    async def inside_tls(address: Address, beginning: bytes) -> None:
        while True:
            try:
                stream = await tls(address, member.contexts)
                await stream.send_all(beginning)
                await drip(stream, 1.0)
                stream.close_now()
            except Exception:  # the node refused the connection
                await trio.sleep(0.2)

    async def in_chunk(address: Address) -> None:
        body = bytes(4 * foe.target.elements)
        from line import chunk_of

        while True:
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            if line is not None:
                number = await member.offer(line)
                frame = encode(chunk_of(number, 0, foe.target.elements, body), len(body))
                await trio.sleep(0.3)
                for byte in frame:
                    await line.write(bytes([byte]))
                    await trio.sleep(1.0)
                    if not line.open:
                        break
            await trio.sleep(0.2)

    async with trio.open_nursery() as nursery:
        for address in foe.target.nodes:
            for _ in range(20):
                nursery.start_soon(hold, address, client_hello, 1.0)
            for _ in range(4):
                nursery.start_soon(inside_tls, address, b"GSP1")
            nursery.start_soon(in_chunk, address)


@attack("garbage at every layer: before TLS, inside TLS, frames, msgpack, wrong fields")
async def garbage(foe: Foe) -> None:
    member = foe.quiet()
    rng = random.Random(0)

    async def outside(address: Address) -> None:
        while True:
            try:
                stream = await plain(address)
                await stream.send_all(rng.randbytes(rng.randrange(1, 2000)))
                await trio.sleep(0.05)
                stream.close_now()
            except Exception:  # the node refused the connection
                await trio.sleep(0.1)

    async def inside(address: Address) -> None:
        for junk in junks(rng):
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            if line is not None:
                await line.write(junk)
                with trio.move_on_after(0.3):
                    await line.read_all(member.on_message)
                line.close()
            await trio.sleep(0.1)

    async def instead_of_hello(address: Address) -> None:
        for junk in junks(rng):
            try:
                stream = await tls(address, member.contexts)
                await stream.send_all(junk)
                await trio.sleep(0.05)
                stream.close_now()
            except Exception:  # the node refused the connection
                await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for address in foe.target.nodes:
            for send_garbage in (outside, inside, instead_of_hello):
                nursery.start_soon(send_garbage, address)


def junks(rng: random.Random) -> Iterator[bytes]:
    def frame(header: bytes, body: int = 0, magic: bytes = b"GSP1", length: int | None = None) -> bytes:
        return struct.pack(">4sII", magic, len(header) if length is None else length, body) + header

    nested: Any = 0
    for _ in range(500):
        nested = [nested]
    ping = {"t": "ping", "seq": 1, "updates": []}
    makers = itertools.cycle([
        lambda: rng.randbytes(rng.randrange(1, 3000)),
        lambda: frame(b"x" * 100, magic=b"GSP2"),
        lambda: frame(b"", length=2**32 - 1),
        lambda: frame(b"", length=0),
        lambda: frame(msgpack.packb(ping), body=2**32 - 1),
        lambda: frame(msgpack.packb(ping), body=100) + bytes(100),
        lambda: frame(rng.randbytes(rng.randrange(1, 400))),
        lambda: frame(msgpack.packb({**ping, "more": 1})),
        lambda: frame(msgpack.packb({"t": "ping"})),
        lambda: frame(msgpack.packb({"t": "no such thing"})),
        lambda: frame(msgpack.packb({**ping, "updates": nested})),
        lambda: frame(msgpack.packb([1, 2, 3])),
        lambda: frame(msgpack.packb(ping)[:-2]),
        lambda: frame(msgpack.packb(ping) + b"\x00"),
        lambda: frame(b"\xdf\xff\xff\xff\xff"),
        lambda: frame(msgpack.packb({"t": "gossip", "updates": [[b"x" * 16] * 15]})),
        lambda: frame(b"\x82\xa1t\xa4ping\xa1t\xa4ping"),
        lambda: frame(b"\x82\xa1t\xa4ping\xa3seq\xc7\x05\x01hello"),
        lambda: encode(Chunk(rng.getrandbits(62), 0, 1024, 0), 4096) + bytes(4096),
    ])  # fmt: skip
    while True:
        yield next(makers)()


@attack("absurd numbers in every field of every message, each over a link of its own where one is needed")
async def absurd(foe: Foe) -> None:
    member = foe.quiet()
    frames = itertools.cycle(list(absurdities(member.record)))

    async def attack_node(address: Address) -> None:
        while True:
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            while line is not None and line.open:
                await line.write(next(frames))
                with trio.move_on_after(0.01):
                    await line.read_all(member.on_message)
                    break
            await trio.sleep(0.02)

    await foe.at_each_node(attack_node)


EXTREMES: dict[str, list[Any]] = {
    "int": [0, 1, 2**31, 2**53 - 1, 2**53, 2**63 - 1],
    "float": [0.0, -1.0, 1e-308, 1e308, -1e308, 2.0**53],
    "bool": [True, False],
    "text": ["", "x" * 16, "all", "mask 0", "top 0.0000001", "fragment 0/1", "\u2603" * 16, "moniqua4"],
    "bytes": [b"", b"\xff" * 16],
    "id": [b"\x00" * 16, b"\xff" * 16],
    "ids": [[], [b"\x00" * 16] * 15],
    "names": [[], ["x" * 64] * 4],
    "scalars": [[], [["step", 1e308]] * 16],
    "record?": [None],
    "updates": [[]],
    "records": [[]],
    "claim": [[0] * 4, [2**53] * 4, [2**53, 0, 2**53, 1], [2**63 - 1] * 4, [1.0] * 4, []],
    "any": [[], [1e308] * 100, [2**64 - 1], ["x" * 4096], [[[[]]]]],
}


def absurdities(record: MemberRecord) -> Iterator[bytes]:
    """Yield every message with each of its fields at each extreme, the others at their first; and such records."""
    for tag, cls in MESSAGES.items():
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        plainest = {field.name: EXTREMES[field.metadata["kind"].form][0] for field in fields}
        for field in fields:
            for value in EXTREMES[field.metadata["kind"].form]:
                header = msgpack.packb({"t": tag, **plainest, field.name: value})
                yield struct.pack(">4sII", b"GSP1", len(header), 0) + header
    for name in ("incarnation", "sequence", "steps", "samples", "progress"):
        for value in (0, 2**53 - 1, 2**53, 2**63 - 1):
            yield encode(Gossip((dataclasses.replace(record, **{name: value}),)))
    yield encode(Gossip((Hint(record.id, 2**63 - 1, True, record.id),)))


@attack("every frame that a node sends it, to all others and back, again and again", named="")
async def replays(foe: Foe) -> None:
    member = await foe.member()
    recorded: list[tuple[bytes, bytes]] = []
    usual_handler = member.on_message

    async def keep(line: Line, message: Message, body: bytes) -> None:
        if len(recorded) < 2000 and type(message).__name__ not in ("Hello", "Close"):
            recorded.append((encode(message, len(body)), body))
        await usual_handler(line, message, body)

    member.on_message = keep  # type: ignore[method-assign]
    rng = random.Random(0)
    for line in member.open_lines():
        line.close()  # live() reopens the line, whose messages then go to keep()
    while True:
        await trio.sleep(0.01)
        lines = member.open_lines()
        if recorded and lines:
            frame, body = rng.choice(recorded)
            await rng.choice(lines).write(frame + body)


@attack("a certificate signed by itself, and one of another swarm's secret", named="address")
async def other_secret(foe: Foe) -> None:
    """Dial as a member of another swarm that knows this one's addresses; it must not read or join anything."""
    contexts = swarm_contexts(Identity.fresh(), bytes(range(32)))

    async def attack_node(address: Address) -> None:
        while True:
            try:
                stream = await tls(address, contexts)
                await stream.send_all(b"GSP1")
                buffer = memoryview(bytearray(4096))
                if await stream.receive_into(buffer):
                    print("READ: a node spoke to another swarm", flush=True)
                stream.close_now()
            except Exception:  # expected: the TLS handshake fails
                await trio.sleep(0.05)

    await foe.at_each_node(attack_node)
