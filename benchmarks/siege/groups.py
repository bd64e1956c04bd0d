"""Attacks on groups: members that say Joined and then fall silent, break off or say Commit, and inviters that do so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attack import attack
from foe import Foe, Member, nothing
from line import Line, chunk_of

from gossip.arithmetic.group_mean import member_slices
from gossip.codecs import get_codec
from gossip.wire.messages import Abort, Begin, Commit, Invite, Joined

IDENTITY_S = 4.0
GROUPS: dict[str, Any] = {"mixing": "group", "least_s": 20.0}
OnJoined = Callable[[Member, int, dict[bytes, Line]], Awaitable[None]]


async def joining_member(foe: Foe) -> Member:
    """Create a member that accepts every invitation, and sends nothing in the group."""
    member = await foe.member()

    async def invited(line: Line, invite: Invite, _body: bytes) -> None:
        await line.send(Joined(invite.session, member.version, "fp32", member.claim))

    member.handlers[Invite] = invited
    return member


async def send_half_slice(member: Member, begin: Begin) -> None:
    """Send every other member the first half of the values of its slice."""
    codec = get_codec(begin.codec)
    for owner, where in zip(begin.members, member_slices(member.target.elements, len(begin.members)), strict=True):
        line, elements = member.line_to(owner), (where.stop - where.start) // 2
        if line is not None and elements:
            body = bytes(codec.encoded_bytes(elements, where.start))
            await line.send(chunk_of(begin.session, where.start, elements, body), body)


async def begin_group(member: Member, session: int, joined: dict[bytes, Line]) -> None:
    """Begin a group with all members that have joined, once these are all nodes."""
    if len(joined) == len(member.target.nodes):
        members = tuple(sorted((member.record.id, *joined)))
        for line in joined.values():
            await line.send(Begin(session, members, member.version, "fp32", member.claim))


async def take_back(_member: Member, session: int, joined: dict[bytes, Line]) -> None:
    """Take an invitation back from the member that has joined last."""
    await next(reversed(joined.values())).send(Abort(session, "late"))


async def invite_all_the_time(foe: Foe, pause_s: float, on_joined: OnJoined | None = None) -> None:
    """Invite all nodes again and again; ``on_joined`` gets the members of a group each time that one joins."""
    member = await foe.member()
    while True:
        number, target, joined = random.getrandbits(62), member.target, dict[bytes, Line]()

        async def answered(
            line: Line, answer: Joined, _body: bytes, number: int = number, joined: dict[bytes, Line] = joined
        ) -> None:
            if answer.session == number and line.peer is not None and on_joined is not None:
                joined[line.peer] = line
                await on_joined(member, number, joined)

        member.handlers[Joined] = answered
        lines = [line for line in member.open_lines() if line.peer is not None]
        peers = tuple(line.peer for line in lines)
        for line in lines:
            await line.send(Invite(number, target.fingerprint, target.run_id, member.version, "fp32", peers))
        await trio.sleep(pause_s)


@attack("group: answers no invitation", **GROUPS)
async def group_silent(foe: Foe) -> None:
    member = await foe.member()
    member.handlers[Invite] = nothing


@attack("group: joins, and sends no slice", **GROUPS)
async def group_stall(foe: Foe) -> None:
    await joining_member(foe)


@attack("group: joins, and says Commit without a slice", **GROUPS)
async def group_commit(foe: Foe) -> None:
    member = await joining_member(foe)

    async def begun(line: Line, begin: Begin, _body: bytes) -> None:
        await line.send(Commit(begin.session))

    member.handlers[Begin] = begun


@attack("group: sends half of each slice, as a new member every 4 s", **GROUPS, named="")
async def group_half(foe: Foe) -> None:
    while True:
        async with trio.open_nursery() as nursery:
            member = await joining_member(Foe(foe.target, nursery))

            async def begun(_line: Line, begin: Begin, _body: bytes, member: Member = member) -> None:
                await send_half_slice(member, begin)

            member.handlers[Begin] = begun
            await trio.sleep(IDENTITY_S)
            nursery.cancel_scope.cancel()


@attack("group: joins, and aborts once it has begun, giving an innocent reason", **GROUPS)
async def group_abort(foe: Foe) -> None:
    member = await joining_member(foe)
    codes = itertools.cycle(["late", "replaced"])

    async def begun(line: Line, begin: Begin, _body: bytes) -> None:
        await line.send(Abort(begin.session, next(codes)))

    member.handlers[Begin] = begun


@attack("group: invites all members all the time, and begins no group", **GROUPS)
async def group_invite(foe: Foe) -> None:
    await invite_all_the_time(foe, 0.05)


@attack("group: invites all members all the time, begins, and sends no slice", **GROUPS)
async def group_begin(foe: Foe) -> None:
    await invite_all_the_time(foe, 0.05, begin_group)


@attack("group: invites all members all the time, and takes each invitation back once they have joined", **GROUPS)
async def group_withdraw(foe: Foe) -> None:
    await invite_all_the_time(foe, 0.02, take_back)
