"""Attacks by donors on newcomers, by chunks with NaN, and over the stripes of a link."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio
import trio.lowlevel
from attack import attack
from foe import Foe, Member, Session
from line import Line, chunk_of, open_lane

from gossip.codecs import get_codec
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Fetch, Ping, Serving

HALF = 8_192  # elements of the first chunk: a multiple of every codec's block size

Send = Callable[[Line, int, bytes], Awaitable[None]]


async def serve(member: Member, vector: np.ndarray[Any, Any], send: Send, version: float | None = None) -> None:
    """Serve these weights to newcomers, with the optimizer state, and by default the version, of an honest donor."""
    servings: list[Serving] = []

    async def on_serving(_line: Line, serving: Serving, _body: bytes) -> None:
        servings.append(serving)

    async def on_fetch(line: Line, fetch: Fetch, _body: bytes) -> None:
        stated = servings[0].version if version is None else version
        await line.send(dataclasses.replace(servings[0], session=fetch.session, version=stated))
        if fetch.stop > fetch.start:
            values = np.resize(vector, fetch.stop)[fetch.start :]
            await send(line, fetch.session, values.astype("<f4").tobytes())

    member.handlers[Serving] = on_serving
    while not servings:
        for line in member.open_lines():
            await line.send(Fetch(1, (), 0, 0))
        await trio.sleep(0.2)
    member.handlers[Fetch] = on_fetch


async def whole(line: Line, session: int, body: bytes) -> None:
    await line.send(chunk_of(session, 0, len(body) // 4, body), body)


async def byte_by_byte(line: Line, session: int, body: bytes) -> None:
    await line.write(encode(chunk_of(session, 0, len(body) // 4, body), len(body)))
    for place in range(len(body)):
        await trio.sleep(1.0)
        await line.write(body[place : place + 1])


async def spoiled(line: Line, session: int, body: bytes) -> None:
    """Send the body in two chunks, with a NaN in the second one."""
    half = len(body) // 8 * 4
    second = np.frombuffer(body[half:], "<f4").copy()
    second[second.size // 2] = np.nan
    await line.send(chunk_of(session, 0, half // 4, body[:half]), body[:half])
    await line.send(chunk_of(session, half // 4, second.size, second.tobytes()), second.tobytes())


async def lying_seeds(foe: Foe, vector: np.ndarray[Any, Any], send: Send) -> None:
    """Make two members the seeds of a newcomer; they serve it these weights with the function ``send``."""
    for _ in range(2):
        member = await foe.member()
        await serve(member, vector, send)
        foe.seed(member)


@attack("two of a newcomer's three seeds give it the same noise", named="", newcomer=True, seeds=2)
async def colluders(foe: Foe) -> None:
    noise = np.random.default_rng(0).standard_normal(foe.target.elements).astype(np.float32)
    await lying_seeds(foe, noise, whole)


@attack("two of a newcomer's three seeds give it one byte a second", newcomer=True, seeds=2)
async def slow_pieces(foe: Foe) -> None:
    await lying_seeds(foe, np.zeros(foe.target.elements, np.float32), byte_by_byte)


@attack("two of a newcomer's three seeds give it weights with a NaN in the middle", named="", newcomer=True, seeds=2)
async def nan_pieces(foe: Foe) -> None:
    await lying_seeds(foe, np.zeros(foe.target.elements, np.float32), spoiled)


@attack("sends back what it was sent in two chunks, with a NaN in the second", partners=1)
async def nan_chunks(foe: Foe) -> None:
    member = await foe.member(mixes=True)

    async def send_vector(session: Session, vector: np.ndarray[Any, Any]) -> None:
        vector = vector.copy()
        vector[(HALF + vector.size) // 2] = np.nan
        codec = get_codec(session.codec)
        for start, stop in ((0, HALF), (HALF, vector.size)):
            body = bytearray(codec.encoded_bytes(stop - start))
            codec.encode(np.ascontiguousarray(vector[start:stop], np.float32), body, session.number, start)
            await session.line.send(chunk_of(session.number, start, stop - start, bytes(body)), bytes(body))

    member.send_vector = send_vector  # type: ignore[method-assign]
    await member.offer_for_ever(0.05)


@attack(
    "opens more connections of its links and sends over them a chunk of no session, half a chunk, a ping, or nothing",
    partners=1,
    named="",
)
async def stripes(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    kinds = itertools.cycle(["stranger", "half", "ping", "silent"])

    async def lane(line: Line, kind: str) -> None:
        opened = await open_lane(line, member.contexts, foe.target.fingerprint, member.record)
        if opened is None:
            return
        body = bytes(4 * 4096)
        frame = encode(chunk_of(1, 0, 4096, body), len(body)) + body
        if kind == "stranger":
            await opened.write(frame)
        elif kind == "half":
            session = next(reversed(member.sessions), 1)
            frame = encode(Chunk(session, 0, 4096, 0), len(body)) + body
            await opened.write(frame[: len(frame) // 2])
        elif kind == "ping":
            await opened.write(encode(Ping(1, ())))
        await trio.sleep(4.0)
        opened.close()

    async def keep(line: Line) -> None:
        while line.open:
            await lane(line, next(kinds))
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        for line in member.open_lines():
            for _ in range(4):
                nursery.start_soon(keep, line)
        await member.offer_for_ever(0.1)
