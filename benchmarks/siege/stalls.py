"""Attacks on exchanges: stalls at every step, too many exchanges, false vectors, and messages out of order."""

from __future__ import annotations

import itertools

import numpy as np
import trio
import trio.lowlevel
from attack import attack
from foe import Foe, nothing
from line import Line, chunk_of

from gossip.wire.messages import (
    Abort,
    Accept,
    Busy,
    Chunk,
    Commit,
    Fetch,
    Invite,
    Joined,
    Offer,
    Outcome,
    Refuse,
    Serving,
)


@attack("offers to everybody, all the time, and streams nothing")
async def offer_stall(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    member.handlers[Chunk] = nothing
    await member.offer_for_ever(0.05)


@attack("takes every offer, and streams nothing")
async def accept_stall(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    member.handlers[Chunk] = nothing


@attack("answers no offer")
async def answer_stall(foe: Foe) -> None:
    member = await foe.member()
    member.handlers[Offer] = nothing


@attack("streams everything, and never says commit; nor does it answer how it ended")
async def commit_stall(foe: Foe) -> None:
    member = await foe.member(mixes=True)

    async def chunk(line: Line, chunk: Chunk, body: bytes) -> None:
        session = member.take_chunk(chunk, body)
        if session is not None:
            await member.send_vector(session, member.decoded(session))

    member.handlers[Chunk], member.handlers[Commit], member.handlers[Outcome] = chunk, nothing, nothing
    await member.offer_for_ever(0.1)


@attack("stalls at one step after another: half a body, no second half, an accept and silence, a fetch never read")
async def stalls(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    steps = itertools.cycle(["half-frame", "half-stream", "fetch", "abort-late"])

    async def chunk(line: Line, chunk: Chunk, body: bytes) -> None:
        session = member.sessions.pop(chunk.session, None)
        if session is None:
            return
        step = next(steps)
        whole = bytes(4 * foe.target.elements)
        if step == "half-frame":
            from gossip.wire.frames import encode

            await line.write(encode(chunk_of(session.number, 0, foe.target.elements, whole), len(whole)) + whole[:1000])
            await trio.sleep(4.0)
            line.close()
        elif step == "half-stream":
            half = bytes(4 * 1024)
            await line.send(chunk_of(session.number, 0, 1024, half), half)
        elif step == "fetch":
            await line.send(Fetch(session.number + 1, (), 0, foe.target.elements))
        else:
            await trio.sleep(1.0)
            await line.send(Abort(session.number, "replaced"))

    member.handlers[Chunk] = chunk
    await member.offer_for_ever(0.2)


@attack("offers and accepts, and aborts when everything has been streamed, giving an innocent reason")
async def aborts(foe: Foe) -> None:
    member = await foe.member(mixes=True)

    async def chunk(line: Line, chunk: Chunk, _body: bytes) -> None:
        if member.sessions.pop(chunk.session, None) is not None:
            await line.send(Abort(chunk.session, "replaced"))

    member.handlers[Chunk] = chunk
    await member.offer_for_ever(0.05)


@attack("mixes with everybody as often as it can", partners=1, named="")
async def monopoly(foe: Foe) -> None:
    await (await foe.member(mixes=True)).offer_for_ever(0.02)


@attack("a patient liar: theirs and half a unit more in one direction, below what is cut off", partners=1, named="")
async def frog(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    push = np.full(foe.target.elements, 0.5 / foe.target.elements**0.5, np.float32)
    member.transform = lambda vector: vector + push
    await member.offer_for_ever(0.02)


@attack("sends NaN, 1e38, the vector's opposite and noise by turns", partners=1)
async def poison(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    rng = np.random.default_rng(0)
    lies = itertools.cycle([
        lambda v: np.full_like(v, np.nan), lambda v: np.full_like(v, 1e38), lambda v: -v,
        lambda v: rng.standard_normal(v.size).astype(np.float32) * 10,
    ])  # fmt: skip
    member.transform = lambda vector: next(lies)(vector)
    await member.offer_for_ever(0.05)


@attack("says commit before busy, so that it might count with the next partner", named="")
async def third_party(foe: Foe) -> None:
    member = await foe.member()

    async def offered(line: Line, offer: Offer, _body: bytes) -> None:
        await line.send(Commit(offer.session))
        await line.send(Busy(offer.session))

    member.handlers[Offer] = offered


@attack("refuses every offer for one reason after another", named="")
async def refuser(foe: Foe) -> None:
    member = await foe.member()
    codes = itertools.cycle(["layout", "run_id", "mixing", "codec", "version", "weight", "x" * 32])

    async def offered(line: Line, offer: Offer, _body: bytes) -> None:
        await line.send(Refuse(offer.session, next(codes)))

    member.handlers[Offer] = offered


@attack("an exchange of a part first, then all under Moniqua", partners=1, named="", codec="moniqua4")
async def moniqua(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    while True:
        for line in member.open_lines():
            await member.offer(line, part="mask 1", codec="int8")
            await trio.sleep(0.2)
            await member.offer(line, codec="moniqua4")
        await trio.sleep(0.2)


@attack("offers of parts, pushes, invitations, and answers that nobody asked for", named="")
async def other_kinds(foe: Foe) -> None:
    member = await foe.member()
    target = foe.target
    number = itertools.count(1)
    while True:
        for line in member.open_lines():
            await member.offer(line, part="mask 1")
            await member.offer(line, part="fragment 0/1000000")
            await member.offer(line, mixing="push", mass=2.0**31)
            await line.send(Invite(next(number), target.fingerprint, target.run_id, 1.0, "fp32"))
            await line.send(Accept(next(number), 1.0, 0.5, "fp32"))
            await line.send(Joined(next(number), 1.0, "fp32"))
            await line.send(Commit(next(number)))
            await line.send(Serving(next(number), 1.0, target.run_id, (), ()))
        await trio.sleep(0.1)
