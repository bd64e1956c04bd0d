"""Attacks by volume: floods of messages, queries, offers and connections; and a member that never reads."""

from __future__ import annotations

import itertools
import random

import trio
from attack import attack
from foe import Foe, Member, nothing
from line import Line, open_line

from gossip.ids import Address, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Digest, Meet, Offer, Ping, PingReq, Reach, StatusQuery

BATCH = 64  # frames in one write


async def pour(member: Member, frames: itertools.cycle[bytes], pause_s: float) -> None:
    """Send batches of frames over every open link, as fast as the nodes take them, with a pause after each batch."""

    async def pour_into(line: Line) -> None:
        while line.open:
            await line.write(b"".join(itertools.islice(frames, BATCH)))
            await trio.sleep(pause_s)

    while True:
        async with trio.open_nursery() as nursery:
            for line in member.open_lines():
                nursery.start_soon(pour_into, line)
        await trio.sleep(0.1)


@attack("pings as fast as the socket takes them")
async def flood_pings(foe: Foe) -> None:
    await pour(await foe.member(), itertools.cycle([encode(Ping(1, ()))]), 0.001)


@attack("1,500 offers a second to each, just below the limit of messages")
async def flood_offers(foe: Foe) -> None:
    member = await foe.member()
    target = foe.target
    offers = [
        encode(Offer(random.getrandbits(62), target.fingerprint, target.run_id, target.version, 0.5, "fp32"))
        for _ in range(4096)
    ]
    await pour(member, itertools.cycle(offers), BATCH / 1500)


@attack("questions that are costly to answer: everybody's records, the status, probes for others", named="")
async def flood_questions(foe: Foe) -> None:
    member = await foe.member()
    frames = [encode(Digest(b"")), encode(StatusQuery(b"")), encode(Reach())]
    frames += [encode(PingReq(number, peer, ())) for number, peer in enumerate(member.known)]
    await pour(member, itertools.cycle(frames), BATCH / 1500)


@attack("asks for meetings at a victim's address, in others' names too, and for tunnels", named="")
async def introductions(foe: Foe) -> None:
    member = await foe.member()

    async def speak(line: Line, target: PeerId) -> None:
        victim, signature = f"10.9.0.1:{random.randrange(1, 65_536)}", random.randbytes(64)
        for origin in (member.record.id, random.choice(list(member.known))):
            for stage in ("ask", "answer", "go"):
                await line.send(Meet(origin, target, stage, victim, victim, signature, victim))
        await line.send(Meet(member.record.id, target, "relay", name=random.randbytes(16)))

    while True:
        for line in member.open_lines():
            for target in list(member.known):
                await speak(line, target)
        await trio.sleep(0.02)


@attack("asks, and never reads an answer", named="")
async def never_reads(foe: Foe) -> None:
    member = foe.quiet()
    frames = b"".join([encode(Digest(b"")), encode(StatusQuery(b"")), encode(Ping(1, ()))])

    async def attack_node(address: Address) -> None:
        while True:
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            while line is not None and line.open:
                with trio.move_on_after(1.0):
                    await line.write(frames * 20)
                await trio.sleep(0.05)
            await trio.sleep(0.2)

    await foe.at_each_node(attack_node)


@attack("200 links a second, each up to its Hello", named="")
async def flood_connections(foe: Foe) -> None:
    member = await foe.member()

    async def attack_node(address: Address) -> None:
        while True:
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            if line is not None:
                line.close()
            await trio.sleep(0.02)

    await foe.at_each_node(attack_node)


@attack("300 links of 300 members, held open", named="", newcomer=True)
async def crowd(foe: Foe) -> None:
    async def attack_node(address: Address) -> None:
        while True:
            member = foe.quiet()
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            if line is not None:
                await line.read_all(member.on_message)
            await trio.sleep(0.5)

    await foe.at_each_node(attack_node, 75)


@attack("300 members that come and go: each takes every offer and makes its own, and streams nothing", named="")
async def crowd_stall(foe: Foe) -> None:
    async def attack_node(address: Address) -> None:
        while True:
            member = foe.quiet()
            member.mixes, member.handlers[Chunk] = True, nothing
            line = await open_line(address, member.contexts, foe.target.fingerprint, member.record)
            if line is not None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(offering, member, line)
                    await line.read_all(member.on_message)
                    nursery.cancel_scope.cancel()
            await trio.sleep(0.5)

    async def offering(member: Member, line: Line) -> None:
        while line.open:
            await member.offer(line)
            await trio.sleep(1.0)

    await foe.at_each_node(attack_node, 75)
