"""Attacks by false statements: samples, versions, accusations, invented members (Sybils), weights for newcomers."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import numpy as np
import trio
from attack import attack
from foe import MAX, Foe, Member
from line import Line, chunk_of, open_line

from gossip.ids import Address, MemberRecord
from gossip.membership.accusations import accusation
from gossip.wire.messages import MAX_UPDATES, Fetch, Gossip, Reach, Records, Serving, StatusQuery
from gossip.wire.records import signed
from node.identity.keys import Identity
from node.transport.tls import swarm_contexts

SYBILS = 300


def sybils(foe: Foe, count: int, **fields: Any) -> list[MemberRecord]:
    """Create signed records of members that do not exist."""
    records = []
    for _ in range(count):
        identity = Identity.fresh()
        values = {"incarnation": 1, "ready": True, "run_id": foe.target.run_id} | fields
        records.append(signed(MemberRecord(identity.id, identity.public_key, **values), identity.sign))
    return records


async def spread(member: Member, records: list[MemberRecord], pause_s: float = 0.01) -> None:
    for start in range(0, len(records), MAX_UPDATES):
        await member.tell(Gossip(tuple(records[start : start + MAX_UPDATES])))
        await trio.sleep(pause_s)


async def ask_status(foe: Foe, address: Address) -> None:
    """Ask a node for its status, which any holder of the secret may do."""
    contexts = swarm_contexts(Identity.fresh(), foe.target.secret)
    line = await open_line(address, contexts, "", None)
    if line is not None:
        await line.send(StatusQuery(b""))
        await trio.sleep(0.3)
        line.close()


@attack("2,200 identities with 2^53 samples each, and everybody asked for its status", named="")
async def overflow(foe: Foe) -> None:
    member = await foe.member()
    await spread(member, sybils(foe, 2200, samples=MAX, address=None))
    while True:
        for address in foe.target.nodes:
            await ask_status(foe, address)


@attack("mixes with everybody, stating the largest version there is", named="member", partners=1)
async def version(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    member.version = float(MAX)
    await member.offer_for_ever(0.05)


@attack("a run of its own with 2^53 samples behind it, and noise for whoever joins it")
async def richer(foe: Foe) -> None:
    member = await foe.member(run_id=b"\xff" * 16, samples=MAX, progress=MAX, version=1000.0)
    noise = np.random.default_rng(0).standard_normal(foe.target.elements).astype(np.float32)
    member.handlers[Fetch] = donor(member, noise, b"\xff" * 16, 1000.0, ())


@attack("a donor of noise that states the highest version and an optimizer of its own", newcomer=True)
async def donors(foe: Foe) -> None:
    member = await foe.member(version=float(MAX), samples=10**9)
    noise = np.random.default_rng(0).standard_normal(foe.target.elements).astype(np.float32)
    member.handlers[Fetch] = donor(member, 3 * noise, foe.target.run_id, float(MAX), ("zzz",))


def donor(member: Member, vector: np.ndarray[Any, Any], run_id: bytes, version: float, keys: tuple[str, ...]) -> Any:
    """Return a handler of Fetch that gives a newcomer this vector, and states these optimizer keys."""

    async def serve(line: Line, fetch: Fetch, _body: bytes) -> None:
        scalars = tuple((f"{key}.step", 1e308) for key in keys)
        await line.send(Serving(fetch.session, version, run_id, keys, scalars))
        if fetch.stop > fetch.start:
            values = np.resize(vector, fetch.stop - fetch.start).astype("<f4")
            body = values.tobytes()
            await line.send(chunk_of(fetch.session, 0, values.size, body), body)

    return serve


@attack("says of all others, ten times a second, that they are dead")
async def accusations(foe: Foe) -> None:
    member = await foe.member()
    while True:
        hints = tuple(
            accusation(peer, record.incarnation, dead, member.record.id, member.identity.sign)
            for peer, record in member.known.items() for dead in (False, True) if peer != member.record.id
        )  # fmt: skip
        await member.tell(Gossip(hints[:MAX_UPDATES]))
        await trio.sleep(0.1)


@attack("the same in the names of others", named="")
async def forged_accusations(foe: Foe) -> None:
    member = await foe.member()
    while True:
        hints = tuple(
            dataclasses.replace(
                accusation(peer, record.incarnation, True, member.record.id, member.identity.sign), by=other
            )
            for peer, record in member.known.items() for other in member.known if other not in (peer, member.record.id)
        )  # fmt: skip
        await member.tell(Gossip(hints[:MAX_UPDATES]))
        await trio.sleep(0.1)


@attack("accuses everybody at its current incarnation at once, so that it runs away", named="member")
async def incarnations(foe: Foe) -> None:
    member = await foe.member()

    async def accuse(line: Line) -> None:
        while line.open and line.peer is not None:
            record = member.known.get(line.peer)
            if record is not None:
                hint = accusation(line.peer, record.incarnation, True, member.record.id, member.identity.sign)
                await line.send(Gossip((hint,)))
            await trio.sleep(0.02)

    while True:
        async with trio.open_nursery() as nursery:
            for line in member.open_lines():
                nursery.start_soon(accuse, line)
            await trio.sleep(2.0)
            nursery.cancel_scope.cancel()


@attack("300 signed members that nobody ever met, at addresses that refuse", named="", newcomer=True)
async def sybils_refusing(foe: Foe) -> None:
    member = await foe.member()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening, so that dials are refused
        port = unused.getsockname()[1]
        while True:
            await spread(member, sybils(foe, SYBILS, address=Address("127.0.0.1", port), samples=10_000))
            await trio.sleep(5.0)


@attack("300 signed members that nobody ever met, at addresses that swallow packets", named="", newcomer=True)
async def sybils_swallowing(foe: Foe) -> None:
    member = await foe.member()
    traps = []
    for _ in range(16):
        trap = socket.socket()
        trap.bind(("127.0.0.1", 0))
        trap.listen(0)
        traps.append(trap)
        for _ in range(2):  # fill the accept queue, so that the kernel drops further SYNs
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(trap.getsockname())
            traps.append(filler)
    addresses = [trap.getsockname() for trap in traps[::3]]
    while True:
        made = [
            record for host, port in addresses
            for record in sybils(foe, SYBILS // 16 + 1, address=Address(host, port), samples=10_000)
        ]  # fmt: skip
        await spread(member, made)
        await trio.sleep(5.0)


@attack("full messages of new records, each of which costs a signature's check, a hundred a second to each")
async def sign_flood(foe: Foe) -> None:
    member = await foe.member()
    identity = Identity.fresh()
    sequence = 1
    while True:
        batch = []
        for number in range(MAX_UPDATES):
            record = MemberRecord(identity.id, identity.public_key, 1, sequence + number, run_id=foe.target.run_id)
            batch.append(signed(record, identity.sign))
        await member.tell(Gossip(tuple(batch)))  # the newest record last, so that each one is news
        sequence += MAX_UPDATES
        await trio.sleep(0.005)


@attack("members that join, are trusted, and leave, five a second", named="")
async def leavers(foe: Foe) -> None:
    while True:
        async with trio.open_nursery() as nursery:
            member = await Foe(foe.target, nursery).member(listen=False)
            await member.tell(Gossip((member.update(left=True),)))
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()


@attack("says of a newcomer and of everybody that nobody can dial it", named="", newcomer=True)
async def out_of_reach(foe: Foe) -> None:
    from gossip.wire.messages import Reached

    member = await foe.member()

    async def lie(line: Line, _reach: Reach, _body: bytes) -> None:
        await line.send(Reached(False))

    member.handlers[Reach] = lie
    while True:
        await member.tell(Reached(False))
        await trio.sleep(0.2)


@attack("records of others with its own signature, and its own with others' keys", named="member")
async def stolen_records(foe: Foe) -> None:
    member = await foe.member()
    while True:
        for peer, record in list(member.known.items()):
            if peer == member.record.id:
                continue
            forged = member.sign(record, incarnation=record.incarnation + 1, left=True)
            await member.tell(Gossip((forged,)))
            await trio.sleep(0.2)


@attack("another member's record in its own Hello", named="address")
async def stolen_identity(foe: Foe) -> None:
    member = await foe.member()
    while True:
        victims = [record for peer, record in member.known.items() if peer != member.record.id]
        for record in victims:
            for address in foe.target.nodes:
                line = await open_line(address, member.contexts, foe.target.fingerprint, record)
                if line is not None:
                    line.close()
        await trio.sleep(0.1)


@attack("answers everything with what it made up, and is a newcomer's first seed", named="", newcomer=True, partners=1)
async def eclipse(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    made = sybils(foe, 100, address=member.record.address, samples=50_000)
    noise = np.random.default_rng(0).standard_normal(foe.target.elements).astype(np.float32)
    member.handlers[Fetch] = donor(member, noise, foe.target.run_id, member.version + 10, ())
    while True:
        await spread(member, made)
        await member.tell(Records((member.record, *made[:64]), b""))
        for line in member.open_lines():
            await member.offer(line)
        await trio.sleep(0.1)
